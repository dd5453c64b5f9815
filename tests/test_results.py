"""The tables of the pages on results and benchmarks show the files in docs/data/."""

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import correlation, mean, median
from types import MappingProxyType

import pytest
import yaml

from ablation.tables import Measured, measure
from analysis.draws import Row as Transferred
from analysis.draws import is_own, paired, read_rows
from attention import ATTENTION, create_attention
from engine.reporting.tables import Spread, plus_minus, spread, verdict

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = "\n".join(path.read_text() for path in sorted(DOCS.glob("results*.md")))
BENCHMARKS = "\n".join((DOCS / f"{name}.md").read_text() for name in ("benchmarks", "gpus"))
CONTROLS = {"softmax", "identity", "mean", "pooling", "convolution"}
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a file."""
    with (DOCS / "data" / name).open() as file:
        return list(csv.DictReader(file))


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(y < x for y in values) + sum(y == x for y in values) / 2 for x in values]

    return correlation(ranks(x), ranks(y))


def read_mode(name: str, mode: str) -> list[Row]:
    """The rows of a file with this mode."""
    return [row for row in read(name) if row["mode"] == mode]


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table, its titles first."""
    titles, *rows = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, ["---"] * len(titles), *rows))


def table(rows: Sequence[Row], titles: str, cells: Callable[[Row, Row], Sequence[str]]) -> str:
    """Markdown: a line for every name, and for every size the cells of its row and the baseline's, under the titles."""
    found = {(row["name"], row["size"]): row for row in rows}
    names, sizes = (list(dict.fromkeys(pair)) for pair in zip(*found, strict=True))
    lines = [["", *(title.format(size) for size in sizes for title in titles.split("|"))]]
    for name in names:
        pairs = [(found[name, size], found[rows[0]["baseline"], size]) for size in sizes]
        lines.append([f"`{name}`", *(cell for pair in pairs for cell in cells(*pair))])
    return markdown(lines)


def speed(row: Row, baseline: Row) -> tuple[str, str]:
    """Speed-up and ratio of multiply-accumulates to the baseline; milliseconds of the baseline itself."""
    if row is baseline:
        milliseconds = f"{1e3 * float(row['seconds']) / int(row['batch']):.3g}"
        return f"{float(milliseconds):g} ms", ""
    median, low, high = (float(row[f"speedup{end}"]) for end in ("", "_q1", "_q3"))
    noise = "~" if row["speedup_noisy"] == "True" else ""
    ratio = float(baseline["macs"]) / float(row["macs"])
    return f"{noise}{median:.2f} ({low:.2f}–{high:.2f})", f"{ratio:.2f}"


def memory(row: Row, _: Row) -> tuple[str, str]:
    """Peak and saved MiB of an image."""
    return tuple(f"{float(row[name]) / int(row['batch']) / 2**20:.1f}" for name in ("peak_bytes", "saved_bytes"))


def training(row: Row, baseline: Row) -> tuple[str, str, str]:
    """Speed and peak MiB of an image."""
    return *speed(row, baseline), memory(row, baseline)[0]


def executions(rows: Sequence[Row], key: str, title: str) -> str:
    """Speed-ups by dtype and execution: a line for every name and value of `key`."""
    kinds = [(dtype, execution) for dtype in ("fp32", "bf16") for execution in ("eager", "compiled")]
    found = {(row["name"], row[key], row["dtype"], row["execution"]): row for row in rows}
    lines = [["", title, "MACs", *(f"{dtype}, {execution}" for dtype, execution in kinds)]]
    for name, value in dict.fromkeys((row["name"], row[key]) for row in rows if row["name"] != row["baseline"]):
        measured = [found.get((name, value, *kind)) for kind in kinds]
        cells = [row and speed(row, found[row["baseline"], value, row["dtype"], row["execution"]]) for row in measured]
        macs = next(cell for cell in cells if cell)[1]
        lines.append([f"`{name}`", value, macs, *(cell[0] if cell else "" for cell in cells)])
    return markdown(lines)


def test_tables_of_executions():
    for mode in ("forward", "forward+backward"):
        assert executions(read_mode("execution.csv", mode), "size", "tokens") in BENCHMARKS
    assert executions(read("execution_model.csv"), "mode", "mode") in BENCHMARKS


def test_gains_by_compilation():
    gains: dict[tuple[str, str], list[float]] = {}
    rows = read("execution.csv")
    key = itemgetter("name", "mode", "size", "dtype")
    eager = {key(row): float(row["seconds"]) for row in rows if row["execution"] == "eager"}
    for row in rows:
        if row["execution"] == "compiled":
            gains.setdefault((row["name"], row["mode"]), []).append(eager[key(row)] / float(row["seconds"]))
    shown = {each: f"{min(ratios):.2f} to {max(ratios):.2f}" for each, ratios in gains.items()}
    for name in {name for name, _ in gains}:
        line = f"- `{name}`: {shown[name, 'forward']} forward, {shown[name, 'forward+backward']} forward and backward."
        assert line in BENCHMARKS, line
    of_ours = [ratio for (name, _), ratios in gains.items() if name != "softmax" for ratio in ratios]
    assert f"layers are {min(of_ours):.2f} to {max(of_ours):.2f} times as fast as eager ones" in BENCHMARKS


def test_tables_of_time_and_memory():
    for mode in ("forward", "forward+backward"):
        assert table(read_mode("attention.csv", mode), "{} tokens|MACs", speed) in RESULTS
    assert table(read_mode("attention.csv", "forward+backward"), "{} tokens: peak|saved", memory) in RESULTS
    long = read_mode("attention_long.csv", "forward+backward")
    assert table(long, "{} tokens|MACs|peak", training) in RESULTS, table(long, "{} tokens|MACs|peak", training)
    seconds = {(row["name"], row["size"]): float(row["seconds"]) for row in long}
    growth = {name: seconds[name, "128x256"] / seconds[name, "16384"] for name, _ in seconds}
    of_softmax, combiner = growth.pop("softmax"), growth.pop("combiner")
    others = f"{min(growth.values()):.1f} to {max(growth.values()):.1f} times as long with all but"
    line = f"Twice the tokens take {others} Combiner ({combiner:.1f}) and softmax attention ({of_softmax:.1f})."
    assert line in RESULTS, line
    assert table(read_mode("attention_vision.csv", "forward"), "{} tokens|MACs", speed) in RESULTS
    assert table(read_mode("attention_vision.csv", "forward+backward"), "{} tokens|MACs|peak", training) in RESULTS
    assert table(read_mode("model.csv", "train"), "{} pixels|MACs|peak", training) in RESULTS


def drop_in() -> str:
    """Top-1 and error of every mechanism in the place of softmax attention, best first."""
    rows = sorted(read("replace.csv"), key=lambda row: -float(row["top1"]))
    lines = [["", "options", "untrained parameters", "top-1 (%)", "change", "error of attended values", "MACs (M)"]]
    for row in rows:
        top1, error = (
            f"{float(row[name]):{form}} ± {float(row[f'{name}_std']):{form}}"
            for name, form in (("top1", ".2f"), ("error", ".3f"))
        )
        untrained = f"{int(row['untrained_parameters']):,}" if int(row["untrained_parameters"]) else ""
        change, macs = f"{float(row['change']):+.2f}", f"{int(row['macs']) / 1e6:.1f}"
        lines.append([f"`{row['attention']}`", row["options"], untrained, top1, change, error, macs])
    return markdown(lines)


def transferred(name: str) -> list[Transferred]:
    """Rows of replaced, aligned and tuned models, best aligned first."""
    return sorted(read_rows(DOCS / "data" / name), key=lambda row: -row.spread("aligned", "top1").mean)


TRANSFER = transferred("transfer.csv")
OWN = next(filter(is_own, TRANSFER))
TUNED = {row.name: found for row in TRANSFER if (found := row.spread("tuned", "top1"))}
BEHIND = {row.name: found for row in TRANSFER if (found := paired(row, OWN, 0.01)) and row.name not in CONTROLS}
"""Top-1 after training on, and its difference to softmax attention's, paired by seed."""


def seconds(row: Transferred, name: str = "transfer.csv") -> str:
    """Mean time of the alignment."""
    times = [float(line["aligned_seconds"] or 0) for line in read(name) if line["attention"] == row.name]
    return f"{mean(times):.0f}"


def aligned(name: str = "transfer.csv") -> str:
    """Top-1 of every mechanism over seeds in every stage, best aligned first; its difference at the end; errors of
    outputs; and seconds.
    """
    titles = ["", "options", "replaced: top-1 (%)", "aligned: top-1 (%)", "fine-tuned: top-1 (%)", "difference"]
    lines = [[*titles, "replaced: error", "aligned: error", "seconds"]]
    rows = transferred(name)
    for row in rows:
        top1 = [plus_minus(row.spread(stage, "top1"), ".2f") for stage in ("replaced", "aligned", "tuned")]
        difference = paired(row, next(filter(is_own, rows)), 0.01)
        rest = [f"{row.spread(stage, 'outputs').mean:.3f}" for stage in ("replaced", "aligned")]
        shown = [*top1, plus_minus(difference, "+.2f") + verdict(difference), *rest]
        lines.append([f"`{row.name}`", row.options, *shown, seconds(row, name)])
    return markdown(lines)


def hybrids() -> str:
    """Top-1 of mechanisms in all layers, and beside softmax attention in the first one; differences paired by seed."""
    titles = ["everywhere: aligned (%)", "fine-tuned (%)", "softmax first: aligned (%)", "fine-tuned (%)"]
    lines = [["", *titles, "difference to everywhere", "difference to softmax"]]
    everywhere = {row.name: row for row in TRANSFER}
    for row in transferred("transfer_hybrids.csv"):
        both = everywhere[row.name], row
        top1 = [plus_minus(one.spread(stage, "top1"), ".2f") for one in both for stage in ("aligned", "tuned")]
        differences = [paired(row, other, 0.01) for other in (both[0], OWN)]
        shown = [plus_minus(difference, "+.2f") + verdict(difference) for difference in differences]
        lines.append([f"`{row.name}`", *top1, *shown])
    return markdown(lines)


def tuned(name: str) -> dict[int, dict[str, float]]:
    """Top-1 of a mechanism in all layers after training on, by seed."""
    rows = [row for row in read("transfer.csv") if row["attention"] == name]
    return {int(row["seed"]): {"top1": float(row["tuned_top1"])} for row in rows}


UNIFORM = {"0.723": "local", "0.825": "eva", "0.905": "lara"}
"""Budget of the search -> the mechanism that uses it up in all layers."""


def front() -> str:
    """Top-1 of searched assignments and of a mechanism in all layers that uses the budget up, both fine-tuned."""
    titles = ["found, by seed", "MACs", "top-1 (%)", "in all layers", "MACs", "top-1 (%)", "difference"]
    lines = [["budget", *titles]]
    shares = {tuple(row[f"layer {n}"] for n in range(3)): float(row["macs_share"]) for row in read("search.csv")}
    for budget, name in UNIFORM.items():
        rows = [row for row in read("search_front.csv") if row["budget"] == budget]
        found = {int(row["seed"]): {"top1": float(row["tuned_top1"])} for row in rows}
        both = measure([tuned(name), found], "top1")
        counts = Counter(", ".join(f"`{row[f'layer {n}']}`" for n in range(3)) for row in rows)
        assignments = "; ".join(each if count == len(rows) else f"{each} ({count})" for each, count in counts.items())
        costs = [f"{float(row['macs_share']):.3f}" for row in rows]
        macs = "–".join(sorted({min(costs), max(costs)}))
        difference = plus_minus(both[1].difference, "+.2f") + verdict(both[1].difference)
        cells = [assignments, macs, plus_minus(both[1].spread, ".2f")]
        cells += [f"`{name}`", f"{shares[name, name, name]:.3f}", plus_minus(both[0].spread, ".2f"), difference]
        lines.append([budget, *cells])
    return markdown(lines)


def scratch() -> str:
    """Top-1 after an epoch from scratch, and after alignment and an epoch in a trained model; minutes of the former."""
    lines = [["", "from scratch: top-1 (%)", "aligned and fine-tuned: top-1 (%)", "difference", "minutes from scratch"]]
    runs: dict[str, list[Row]] = {}
    for row in read("scratch_epoch.csv"):
        runs.setdefault(row["attention"], []).append(row)
    for name, rows in runs.items():
        own = {int(row["train.seed"]): {"top1": float(row["top1"])} for row in rows}
        both = measure([own, tuned(name)], "top1")
        top1 = [plus_minus(one.spread, ".2f") for one in both]
        difference = plus_minus(both[1].difference, "+.2f") + verdict(both[1].difference)
        lines.append([f"`{name}`", *top1, difference, f"{mean(float(row['minutes']) for row in rows):.0f}"])
    return markdown(lines)


def over_seeds(name: str, others: Mapping[str, Callable[[Row], float]] = MappingProxyType({})) -> str:
    """Top-1 of every setting over its seeds, its difference to the first, and other values of the runs, by titles."""
    values = {"top1": lambda row: float(row["top1"]), **others}
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for row in read(name):
        found = {title: value(row) for title, value in values.items()}
        runs.setdefault(row["attention"], {})[int(row["train.seed"])] = found
    lines = [["", "top-1 (%)", "of seeds 0, 1, 2", "difference to softmax", *others]]
    columns = [measure(list(runs.values()), title) for title in values]
    for setting, top1, *rest in zip(runs, *columns, strict=True):
        seeds = ", ".join(f"{top1.values[seed]:.2f}" for seed in sorted(top1.values))
        difference = plus_minus(top1.difference, "+.2f") + verdict(top1.difference)
        means = [plus_minus(other.spread, ".2f") for other in rest]
        lines.append([f"`{setting}`", plus_minus(top1.spread, ".2f"), seeds, difference, *means])
    return markdown(lines)


EQUAL = [row for row in read("equal_macs.csv") if (row["tokens"], row["processor"]) != ("196", "epyc")]
"""Runs at equal multiply-accumulates; all seeds at 196 tokens, and every seed at 784 tokens, ran on one machine."""


def equal_runs(tokens: str) -> dict[str, Measured]:
    """Mechanism -> top-1 at equal multiply-accumulates over seeds."""
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for row in EQUAL:
        if row["tokens"] == tokens:
            runs.setdefault(row["name"], {})[int(row["seed"])] = {"top1": float(row["top1"])}
    return dict(zip(runs, measure(list(runs.values()), "top1"), strict=True))


def from_scratch() -> dict[str, Spread]:
    """Mechanism -> top-1 over seeds in the table from scratch."""
    found: dict[str, list[float]] = {}
    for row in read("fashion_mnist.csv"):
        if "window_size: 2" not in row["attention"] and "num_landmarks: 1}" not in row["attention"]:
            found.setdefault(row["attention"].strip("{}").split(",")[0].removeprefix("name: "), []).append(
                float(row["top1"])
            )
    return {name: spread(values) for name, values in found.items()}


def equal(tokens: str, title: str, elsewhere: dict[str, Spread]) -> str:
    """Top-1 at equal multiply-accumulates over seeds, best first, and its difference to softmax attention's; top-1
    elsewhere.
    """
    settings = {row["name"]: row for row in EQUAL if row["tokens"] == tokens}
    lines = [["", "size", "MACs of a token", "top-1 (%)", "difference to softmax", title]]
    for name, top1 in sorted(equal_runs(tokens).items(), key=lambda pair: -pair[1].spread.mean):
        difference = plus_minus(top1.difference, "+.2f") + verdict(top1.difference)
        other = plus_minus(elsewhere[name], ".2f") if name in elsewhere else ""
        row = settings[name]
        lines.append([f"`{name}`", row["size"], row["token_macs"], plus_minus(top1.spread, ".2f"), difference, other])
    return markdown(lines)


def equal_tables() -> tuple[str, str]:
    """The tables at 196 and at 784 tokens."""
    at_196 = {name: top1.spread for name, top1 in equal_runs("196").items()}
    return equal("196", "at its size above (%)", from_scratch()), equal("784", "at 196 tokens (%)", at_196)


def resolutions() -> dict[str, dict[str, Measured]]:
    """Mechanism -> tokens -> top-1 of the models of 196 tokens; differences are to 196 tokens."""
    runs: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    for row in [row for row in EQUAL if row["tokens"] == "196"] + read("resolutions.csv"):
        of_tokens = runs.setdefault(row["name"], {}).setdefault(row["tokens"], {})
        of_tokens[int(row["seed"])] = {"top1": float(row["top1"])}
    whole = {name: settings for name, settings in runs.items() if len(settings) == 4}
    return {name: dict(zip(own, measure([*own.values()], "top1"), strict=True)) for name, own in whole.items()}


def test_table_of_other_resolutions():
    found, trained, sizes = resolutions(), equal_runs("784"), ("100", "196", "441", "784")
    order = sorted(found, key=lambda name: -found[name]["784"].spread.mean)
    titles = ["", *(f"{size} tokens (%)" for size in sizes), "784 less 196", "trained at 784 (%)"]
    lines = []
    for name in order:
        loss = plus_minus(found[name]["784"].difference, "+.2f") + verdict(found[name]["784"].difference)
        means = [plus_minus(found[name][size].spread, ".2f") for size in sizes]
        lines.append([f"`{name}`", *means, loss, plus_minus(trained[name].spread, ".2f")])
    table = markdown([titles, *lines])
    assert table in RESULTS, table
    means = {size: [found[name][size].spread.mean for name in order] for size in sizes}
    correlations = [rank_correlation(means["196"], means[size]) for size in ("784", "100")]
    behind = {name: to_softmax(found, name, "784") for name in order if name != "softmax"}
    of_noise = {name: -each.mean for name, each in behind.items() if not each.is_noise}
    assert sorted(of_noise) == ["abc", "performer", "rfa", "scatterbrain", "transformer_ls"]
    assert not any(each.mean > 0 and not each.is_noise for each in behind.values())
    gains = {name: trained[name].spread.mean - found[name]["784"].spread.mean for name in order}
    assert (min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)) == ("dpfp", "transformer_ls")
    deviations = {name: found[name]["784"].spread.std for name in order}
    assert max(deviations, key=deviations.__getitem__) == "eva"
    texts = [
        f"softmax attention alone loses {-found['softmax']['784'].difference.mean:.1f} points",
        f"are {min(of_noise.values()):.1f} to {max(of_noise.values()):.1f} points behind softmax attention at 784",
        f"Longformer is ahead of it by {to_softmax(found, 'longformer', '441').mean:.1f}",
        f"DPFP is ahead by {to_softmax(found, 'dpfp', '784').mean:.1f} points (noise)",
        f"rank correlation of {correlations[0]:.2f} with that at 784, and {correlations[1]:.2f} with that at 100",
        f"up to {deviations['eva']:.1f} points (EVA)",
        f"worth {gains['dpfp']:.0f} points (DPFP) to {gains['transformer_ls']:.0f} (Long-Short)",
    ]
    section = " ".join(RESULTS.partition("### Other resolutions at test time\n")[2].partition("\n### ")[0].split())
    assert [text for text in texts if text not in section] == []


def to_softmax(found: dict[str, dict[str, Measured]], name: str, size: str) -> Spread:
    """Differences of seeds to softmax attention at this number of tokens."""
    own, softmax = (found[each][size].values for each in (name, "softmax"))
    return spread(own[seed] - softmax[seed] for seed in own)


def first_softmax() -> dict[str, list[Measured]]:
    """Mechanism -> top-1 from scratch with it everywhere, with softmax attention in the first layer instead, and with
    softmax attention everywhere; differences are to the first of the three.
    """
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for row in read("first_softmax.csv"):
        assert row["size"] == next(other["size"] for other in EQUAL if other["name"] == row["name"])
        runs.setdefault(row["name"], {})[int(row["seed"])] = {"top1": float(row["top1"])}
    everywhere = equal_runs("196")
    of_seeds = {name: {seed: {"top1": top1} for seed, top1 in everywhere[name].values.items()} for name in everywhere}
    return {name: measure([of_seeds[name], runs[name], of_seeds["softmax"]], "top1") for name in runs}


def test_table_of_softmax_attention_in_the_first_layer_from_scratch():
    lines = [["", "everywhere (%)", "softmax first (%)", "difference to everywhere", "difference to softmax"]]
    found = first_softmax()
    for name, (everywhere, first, softmax) in found.items():
        to_softmax = spread(first.values[seed] - softmax.values[seed] for seed in first.values)
        differences = [plus_minus(each, "+.2f") + verdict(each) for each in (first.difference, to_softmax)]
        lines.append([f"`{name}`", *(plus_minus(each.spread, ".2f") for each in (everywhere, first)), *differences])
    assert markdown(lines) in RESULTS, markdown(lines)
    gains = {name: first.difference for name, (_, first, _) in found.items()}
    ahead, behind = {"longformer", "eva"}, {"lara", "performer", "rfa"}
    assert all(gains[name].mean < 0 and gains[name].is_noise for name in ahead)
    assert {*gains} == ahead | behind
    assert not any(gains[name].is_noise for name in behind)
    assert all("(noise)" in line[-1] for line in lines[1:])
    least, most = (bound((gains[name].mean, name) for name in behind) for bound in (min, max))
    shown = {"lara": "LARA", "rfa": "RFA"}
    text = f"gain {least[0]:.1f} ({shown[least[1]]}) to {most[0]:.1f} points ({shown[most[1]]})"
    assert text in RESULTS, text


def without_and_with(name: str, key: str, titles: Sequence[str], other: str | None = None) -> str:
    """Top-1 over seeds for either value of `key`, the second's difference to the first, and another column's figure."""
    runs: dict[str, dict[str, dict[int, dict[str, float]]]] = {}
    others = {}
    for row in read(name):
        seeds = runs.setdefault(row["attention"], {}).setdefault(row[key], {})
        seeds[int(row["train.seed"])] = {"top1": float(row["top1"])}
        others[row["attention"]] = [row[other]] if other else []
    lines = [["", *titles]]
    for attention, settings in runs.items():
        measured = measure(list(settings.values()), "top1")
        means = [plus_minus(top1.spread, ".2f") for top1 in measured]
        difference = measured[-1].difference
        both = [*means, plus_minus(difference, "+.2f") + verdict(difference)] if difference else [*means, "", ""]
        lines.append([f"`{attention}`", *both, *others[attention]])
    return markdown(lines)


def difference_of(name: str, one: str, other: str, **where: str) -> str:
    """Mean difference over seeds of the top-1 of two settings of a file, and whether it is noise."""
    runs: dict[str, dict[int, dict[str, float]]] = {one: {}, other: {}}
    for row in read(name):
        if row["attention"] in runs and all(row[key] == value for key, value in where.items()):
            runs[row["attention"]][int(row["train.seed"])] = {"top1": float(row["top1"])}
    difference = measure([*runs.values()], "top1")[1].difference
    return f"{difference.mean:+.2f}{verdict(difference)}"


def test_findings_that_compare_other_rows_than_the_first():
    eva, convolution = "{{name: eva, window_size: {}, num_landmarks: {}}}", "{name: convolution}"
    assert difference_of("fashion_mnist.csv", eva.format(2, 1), eva.format(2, 49)) == "+2.73 (noise)"
    assert "79.96, and with C = 1 77.22 (noise)" in RESULTS
    assert difference_of("fashion_mnist.csv", eva.format(7, 1), eva.format(7, 49)) == "+0.26 (noise)"
    assert difference_of("simmim.csv", convolution, "{name: softmax}", start="pretrained") == "+1.61 (noise)"
    assert "softmax attention is 1.6 points ahead of the convolution (noise, though in all three pairs)" in RESULTS
    listops = "{name: eva, window_size: 8, num_landmarks: 8, layout: 1d, partition: all_1d}"
    assert difference_of("listops.csv", "{name: softmax}", listops) == "+0.90"
    assert "EVA is 0.9 points ahead of softmax attention, Combiner level with it" in RESULTS


def test_table_of_pre_training():
    titles = ["from scratch (%)", "pre-trained (%)", "difference", "L1 of masked pixels"]
    assert without_and_with("simmim.csv", "start", titles, "masked_l1") in RESULTS
    assert len(read("simmim.csv")) == 2 * 3 * 6
    assert without_and_with("survey.csv", "start", titles, "masked_l1") in RESULTS
    assert len(read("survey.csv")) == 2 * 3 * 13


def by_name(rows: Iterable[Row]) -> dict[str, dict[int, dict[str, float]]]:
    """Mechanism -> seed -> top-1."""
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        name = re.match(r"{name: (\w+)", row["attention"])[1]
        runs.setdefault(name, {})[int(row["train.seed"])] = {"top1": float(row["top1"])}
    return runs


def test_findings_on_a_surveys_mechanisms():
    rows = read("survey.csv")
    runs = {start: by_name(row for row in rows if row["start"] == start) for start in ("scratch", "pretrained")}
    both = [measure([runs[start][name] for start in runs], "top1")[1].difference for name in runs["scratch"]]
    gains = sorted((each.mean, name) for name, each in zip(runs["scratch"], both, strict=True) if not each.is_noise)
    assert (gains[0][1], gains[-1][1]) == ("transnormer", "linear")
    section = " ".join(RESULTS.partition("### The survey's 13 mechanisms\n")[2].partition("\n## ")[0].split())
    shown = (
        f"{len(gains)} of the 13 beyond noise, by {gains[0][0]:.1f} points (Transnormer) to {gains[-1][0]:.1f} (linear"
    )
    assert shown in section, shown

    def beyond_noise(start: str) -> dict[str, float]:
        top1 = zip(runs[start], measure(list(runs[start].values()), "top1"), strict=True)
        found = {name: each.difference for name, each in top1 if each.difference and not each.difference.is_noise}
        return {name: found[name].mean for name in sorted(found, key=lambda name: found[name].mean)}

    scratch, pretrained = beyond_noise("scratch"), beyond_noise("pretrained")
    ahead = ["transnormer", "nystrom", "longformer", "linformer"]
    assert [*scratch] == ["performer", "linear", "reformer", *ahead]
    least, transnormer, *_, most = (scratch[name] for name in ("nystrom", "transnormer", "linformer"))
    assert (
        f"are {least:.1f} to {most:.1f} points ahead of softmax attention, and Transnormer {transnormer:.1f}" in section
    )
    assert f"are {-scratch['reformer']:.1f} to {-scratch['performer']:.1f} behind" in section
    assert [*pretrained] == ["performer", "synthesizer", "cosformer"]
    performer, synthesizer, cosformer = (f"{abs(each):.1f}" for each in pretrained.values())
    shown = f"only Performer ({performer} points behind softmax attention), Synthesizer ({synthesizer} behind)"
    assert f"{shown} and cosFormer ({cosformer} ahead)" in section
    assert not {name for _, name in gains} & {*ahead} - {"transnormer"}
    l1 = {row["attention"]: float(row["masked_l1"]) for row in rows if row["masked_l1"]}
    assert min(l1, key=l1.__getitem__).startswith("{name: nystrom")


def test_table_of_the_copy_task():
    assert over_seeds("copy_task.csv", {"perplexity": lambda row: math.exp(float(row["loss"]))}) in RESULTS
    assert len(read("copy_task.csv")) == 3 * 12


def test_table_of_listops():
    assert over_seeds("listops.csv", {"training loss": lambda row: float(row["train_loss"])}) in RESULTS
    assert len(read("listops.csv")) == 3 * 11


def test_table_of_long_range_arenas_image():
    rows = read("lra_image.csv")
    assert over_seeds("lra_image.csv", {"training loss": lambda row: float(row["train_loss"])}) in RESULTS
    section = " ".join(
        RESULTS.partition("# Long Range Arena's Image on Fashion-MNIST\n")[2].partition("\n## ")[0].split()
    )
    printed = yaml.safe_load((DOCS.parent / "configs/ablation/lra_image.yaml").read_text())["runs"]
    assert [(row["attention"], int(row["train.seed"])) for row in rows] == [
        (name, seed) for name in dict.fromkeys(row["attention"] for row in rows) for seed in range(3)
    ]
    top1, loss = (
        [mean(float(row[key]) for row in rows[start : start + 3]) for start in range(0, len(rows), 3)]
        for key in ("top1", "train_loss")
    )
    correlation = f"{rank_correlation([row['paper'] for row in printed], top1):.2f}"
    assert f"with the mean top-1 is {correlation}" in section
    assert f"with the printed figures is {correlation}" in RESULTS
    assert f"the training loss (rank correlation {rank_correlation(loss, top1):.2f})" in section
    softmax = [float(row["top1"]) for row in rows if row["attention"] == "{name: softmax}"]
    assert f"because softmax attention's three runs are {max(softmax) - min(softmax):.1f} points apart" in section
    assert f"{sum(row['processor'] == 'xeon' for row in rows)} runs had a core of an Intel Xeon" in section

    runs = by_name(rows)
    found = {name: each.difference for name, each in zip(runs, measure([*runs.values()], "top1"), strict=True)}
    assert [name for name, each in found.items() if each and not each.is_noise] == ["linformer", "reformer"]
    names = "linformer", "reformer", "eva", "performer"
    linformer, reformer, eva, performer = (f"{abs(found[name].mean):.1f}" for name in names)
    ahead_and_behind = f"{linformer} points ahead of softmax attention and Reformer {reformer} behind, beyond noise"
    assert f"Linformer is {ahead_and_behind}" in section
    assert f"EVA is {eva} points ahead, and Performer {performer} behind" in section
    signs = {
        name: {each[seed]["top1"] > runs["softmax"][seed]["top1"] for seed in range(3)} for name, each in runs.items()
    }
    ahead, behind = "eva combiner local transformer_ls nystrom linformer", "performer lara bigbird reformer"
    assert {name for name, found in signs.items() if found == {True}} == {*ahead.split()}
    assert {name for name, found in signs.items() if found == {False}} - {"softmax"} == {*behind.split()}
    by_top1 = sorted(runs, key=dict(zip(runs, top1, strict=True)).__getitem__)
    assert by_top1[-2:] == ["eva", "linformer"]
    assert by_top1[0] == "reformer"
    rates: dict[str, dict[float, float]] = {}
    for row in read("lra_image_rates.csv"):
        rates.setdefault(row["attention"], {})[float(row["optim.lr"])] = float(row["top1"])
    assert [*rates] == ["softmax", "local", "eva", "performer"]
    assert all(max(each, key=each.__getitem__) == max(each) == 4e-3 for each in rates.values())


def test_table_of_other_mechanisms_in_a_trained_model():
    assert drop_in() in RESULTS
    assert len(read("replace.csv")) == 30


def test_table_of_alignment():
    assert aligned() in RESULTS, aligned()
    rows, own = [row for row in TRANSFER if row.name not in CONTROLS], OWN.spread("replaced", "top1").mean
    near = [sum(own - row.spread("aligned", "top1").mean < points for row in rows) for points in (1, 2.5)]
    assert f"{near[0]} of the {len(rows)} mechanisms are within 1.0 point" in RESULTS
    assert f"{near[1]} within 2.5" in RESULTS
    times = [seconds(row) for row in TRANSFER if row is not OWN]
    first_page = " ".join((DOCS.parent / "README.md").read_text().split())
    assert f"each of {len(rows)} mechanisms and four controls" in first_page
    assert f"({min(times, key=int)} to {max(times, key=int)} seconds of one core)" in first_page
    assert f"| {near[0]} of {len(rows)} mechanisms come within 1.0 point" in RESULTS
    assert f"before it, {sum(own - row.spread('replaced', 'top1').mean < 2.5 for row in rows)} are" in RESULTS


def test_table_of_hybrids():
    assert hybrids() in RESULTS, hybrids()
    rows, everywhere = transferred("transfer_hybrids.csv"), {row.name: row for row in TRANSFER}
    own = OWN.spread("aligned", "top1").mean
    far = {row.name for row in rows if own - row.spread("aligned", "top1").mean > 0.4}
    assert far == {"xca"}
    assert all(-paired(row, OWN, 0.01).mean <= 0.4 for row in rows)
    behind = [f"{-paired(everywhere[row.name], OWN, 0.01).mean:.1f}" for row in rows]
    times = [seconds(row, "transfer_hybrids.csv") for row in rows]
    (xca,) = (row for row in rows if row.name == "xca")
    more = [
        xca.spread(stage, "top1").mean - everywhere["xca"].spread(stage, "top1").mean for stage in ("aligned", "tuned")
    ]
    labels = {row.name: row.spread("tuned", "top1").mean - row.spread("aligned", "top1").mean for row in rows}
    shares = {tuple(row[f"layer {n}"] for n in range(3)): float(row["macs_share"]) for row in read("search.csv")}
    linear = [f"{100 * shares[first, 'linear', 'linear']:.0f} %" for first in ("own", "linear")]
    found = [
        f"after {min(times, key=int)} to {max(times, key=int)} seconds",
        f"In all layers they were {min(behind)} to {max(behind)} behind.",
        f"top-1 is {more[0]:.1f} points higher after alignment, and {more[1]:.1f} points higher after fine-tuning",
        f"Labels add at most {max(x for name, x in labels.items() if name != 'xca'):.1f} points",
        f"but {labels['xca']:.1f} to that of XCA",
        f"leaves {linear[0]} of the model's multiply-accumulates, and in all three {linear[1]}",
    ]
    section = " ".join(
        RESULTS.partition("### Softmax attention in the first layer\n")[2].partition("\n### ")[0].split()
    )
    assert [text for text in found if text not in section] == []


def test_table_of_training_from_scratch_for_the_same_time():
    assert scratch() in RESULTS, scratch()
    differences = [float(value) for value in re.findall(r"\| \+([\d.]+) ±", scratch())]
    assert f"{min(differences):.1f} to {max(differences):.1f} points behind one that was aligned" in RESULTS


def test_table_of_searched_assignments():
    assert front() in RESULTS, front()


def test_table_of_a_deeper_model():
    assert aligned("transfer_six_layers.csv") in RESULTS, aligned("transfer_six_layers.csv")
    rows = transferred("transfer_six_layers.csv")[1:]
    names = [row.name for row in rows]
    assert names == ["lara", "eva", "linear", "performer", "local"]
    behind = {}
    for name in ("transfer_six_layers.csv", "transfer.csv"):
        own, *others = transferred(name)
        top1 = {row.name: row.spread("aligned", "top1").mean for row in others}
        behind[name] = [f"{own.spread('aligned', 'top1').mean - top1[row]:.1f}" for row in names]
    section = " ".join(RESULTS.partition("### A deeper model\n")[2].partition("\n### ")[0].split())
    for values in behind.values():
        assert f"{', '.join(values[:-1])} and {values[-1]}" in section, values


def test_table_of_mechanisms_trained_on():
    near = sum(-difference.mean <= 1 for difference in BEHIND.values())
    assert (
        f"After fine-tuning, {near} of the {len(BEHIND)} mechanisms are within 1.0 point of softmax attention"
        in RESULTS
    )
    assert f"After one more epoch with labels, {near} of {len(BEHIND)} are." in RESULTS
    (sentence,) = re.findall(r"The other \w+ are behind it by [^.]*?: ((?:.|\n)*?\))\.", RESULTS)
    named = dict(re.findall(r"`(\w+)`\s+\(([\d.]+)\)", sentence))
    assert named == {name: f"{-difference.mean:.1f}" for name, difference in BEHIND.items() if difference.mean < -1}
    absent = sorted(set(ATTENTION) - {row.name for row in TRANSFER})
    not_tuned = [row.name for row in TRANSFER if row.name not in TUNED]
    text = " ".join(RESULTS.split())
    assert f"mechanisms that were not aligned: {', '.join(absent)} - rows that" in text
    assert f"rows that were not fine-tuned: {', '.join(not_tuned)} - another" in text
    noise = sorted(name for name, difference in BEHIND.items() if difference.is_noise)
    section = RESULTS.partition("### Aligned, and fine-tuned\n")[2].partition("\n### ")[0]
    (sentence,) = re.findall(r"The differences of ([^.]*?) are\s+noise", section)
    assert sorted(re.findall(r"`(\w+)`", sentence)) == noise
    controls = [row.spread("aligned", "top1").mean for row in TRANSFER if row.name in CONTROLS and row is not OWN]
    assert f"The controls do not reach {math.ceil(max(controls))} % aligned." in RESULTS
    floors = [f"{TUNED[name].mean:.1f}" for name in ("identity", "convolution")]
    assert f"fine-tuned, `identity` comes to {floors[0]} and the convolution to {floors[1]}" in RESULTS


def bias(rows: Sequence[Row]) -> str:
    """Means over layers, and the share of bias in each; in stages, if there are any."""
    titles = [f"bias, layer {layer} (%)" for layer in (1, 2, 3)]
    lines = [["", "options", "error", "squared bias", *titles]]
    for name, steps in dict.fromkeys((row["attention"], row.get("aligned_steps", "0")) for row in rows):
        here = [row for row in rows if (row["attention"], row.get("aligned_steps", "0")) == (name, steps)]
        pairs = [(float(row["error"]), float(row["squared_bias"])) for row in here]
        error, share = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        shares = [f"{max(0, 100 * part / whole):.0f}" for whole, part in pairs]
        label = f"`{name.split(',')[0].split(': ')[-1]}`" + (", aligned" if int(steps) else "")
        lines.append([label, here[0]["options"], f"{error:.4f}", f"{abs(share):.4f}", *shares])
    return markdown(lines)


def errors_by_tokens() -> dict[tuple[str, str, str], float]:
    """Attention, tokens, budget -> error, the mean over layers."""
    errors: dict[tuple[str, str, str], list[float]] = {}
    for row in read("error_tokens.csv"):
        errors.setdefault((row["attention"], row["tokens"], row["budget"]), []).append(float(row["error"]))
    return {setting: mean(of_layers) for setting, of_layers in errors.items()}


def test_errors_by_the_number_of_tokens():
    errors = errors_by_tokens()
    names, sizes, budgets = ([*dict.fromkeys(setting[place] for setting in errors)] for place in range(3))
    lines = [["samples", *(f"`{name}`, {size}" for name in names for size in sizes)]]
    for budget in budgets:
        found = [errors.get((name, size, budget)) for name in names for size in sizes]
        lines.append([budget, *(f"{error:.3g}" if error else "" for error in found)])
    assert markdown(lines) in RESULTS, markdown(lines)
    section = " ".join(RESULTS.partition("### By the number of tokens\n")[2].partition("\n### ")[0].split())
    rises = [f"{errors[name, '784', '16'] / errors[name, '196', '16']:.2f}" for name in ("performer", "lara", "ra")]
    shown = "is {} times as large at 784 as at 196 tokens for Performer, {} times for LARA and {} times for RA"
    assert shown.format(*rises) in section, rises
    falls = []
    for name in ("ra", "performer", "lara"):
        found = sorted({f"{errors[name, size, '16'] / errors[name, size, '196']:.2g}" for size in sizes})
        falls.append(" to ".join(found))
    assert "RA's falls {} times, Performer's {} times and LARA's {} times".format(*falls) in section, falls


def test_errors_by_the_number_of_tokens_are_those_of_the_reference():
    """RA's error at 49 samples is that of the other table of the same model: within 3 %, four of its deviations."""
    ra = mean(float(row["error"]) for row in read("bias.csv") if row["attention"] == "ra")
    assert abs(errors_by_tokens()["ra", "196", "49"] / ra - 1) < 0.03
    rows = [row for row in read("error_tokens.csv") if row["attention"] == "ra" and row["budget"] == "49"]
    macs = {row["tokens"]: int(row["macs"]) for row in rows}  # of three layers of 48 channels
    assert macs == {str(n): 3 * (4 * n * 48**2 + (49 + 2) * n**2 * 48) for n in (196, 576, 784)}


@pytest.mark.parametrize("name", ["bias.csv", "bias_aligned.csv"])
def test_table_of_bias_and_variance(name):
    assert bias(read(name)) in RESULTS, bias(read(name))


def test_findings_of_bias_after_alignment():
    rows, means = read("bias_aligned.csv"), {}
    for row in rows:
        means.setdefault((row["attention"], row["aligned_steps"]), []).append(float(row["error"]))
    falls = {name: mean(means[name, "0"]) / mean(means[name, "150"]) for name, _ in means}
    shown = [f"{falls[name]:.0f} times" for name in ("lara", "eva", "performer")]
    assert "Alignment lowers the error of LARA {}, of EVA {}, and of Performer {}.".format(*shown) in RESULTS
    shares = {}
    for row in rows:
        if row["aligned_steps"] == "150":
            shares.setdefault(row["attention"], []).append(100 * float(row["squared_bias"]) / float(row["error"]))
    shown = [f"{min(shares[name]):.0f} to {max(shares[name]):.0f} %" for name in ("lara", "eva", "performer")]
    found = "Bias is still {} of LARA's error, {} of EVA's and {} of Performer's.".format(*shown)
    assert found in " ".join(RESULTS.split()), found


def efficiency() -> str:
    """Quotients of speed-up and ratio of multiply-accumulates at every size; at 784 tokens also peak and operators."""
    found = {(row["name"], row["size"], row["dtype"]): row for row in read("efficiency.csv")}
    titles = [f"{size} tokens" for size in ("196", "784", "3136")]
    lines = [["", *titles, "784 tokens, bf16", "speed-up", "ratio of MACs", "peak", "operators"]]
    kinds = [("196", "fp32"), ("784", "fp32"), ("3136", "fp32"), ("784", "bf16")]
    names = [name for name in dict.fromkeys(name for name, *_ in found) if name != "softmax"]
    for name in sorted(names, key=lambda name: -float(found[name, "784", "fp32"]["efficiency"])):
        rows = [found[name, *kind] for kind in kinds]
        quotients = [
            ("~" if row["speedup_noisy"] == "True" else "") + f"{float(row['efficiency']):.2f}" for row in rows
        ]
        row = rows[1]
        ratios = [f"{float(row[key]):.2f}" for key in ("speedup", "macs_ratio", "peak_ratio")]
        lines.append([f"`{name}`" + "*" * (row["searches"] == "True"), *quotients, *ratios, row["operators"]])
    return markdown(lines)


def slow() -> list[Row]:
    """Rows of mechanisms whose quotient at 784 tokens in fp32 is below 0.70 as printed, the best first."""
    rows = [row for row in read("efficiency.csv") if (row["size"], row["dtype"]) == ("784", "fp32")]
    found = [row for row in rows if round(float(row["efficiency"]), 2) < 0.7 and row["name"] not in CONTROLS]
    return sorted(found, key=lambda row: -float(row["efficiency"]))


def spent() -> str:
    """Shares of time by kind of operator, and the quotient of a layer without operators that MACs leave out."""
    found = {row["name"]: row for row in read("shares.csv")}
    kinds = [name for name in next(iter(found.values())) if name not in ("name", "tokens")]
    lines = [["", "of the ratio of MACs", *kinds, "products and convolutions alone"]]
    for row in slow():
        of_kind = {kind: float(found[row["name"]][kind]) for kind in kinds}
        alone = float(row["efficiency"]) / sum(of_kind[kind] for kind in ("products", "convolutions"))
        cells = [f"{100 * share:.0f}" for share in of_kind.values()]
        lines.append([f"`{row['name']}`", f"{float(row['efficiency']):.2f}", *cells, f"{alone:.2f}"])
    return markdown(lines)


def exported(batch: int) -> str:
    """Milliseconds of an image in every runtime, and in parentheses the speed-up over the first model there."""
    rows = [row for row in read("exported.csv") if row["batch"] == str(batch)]
    runtimes = list(dict.fromkeys(row["execution"] for row in rows))
    lines = [["", "MACs", *runtimes]]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = {row["execution"]: row for row in rows if row["name"] == name}
        of_baseline = next(row for row in rows if row["name"] == row["baseline"])
        ratio = float(of_baseline["macs"]) / float(own["eager"]["macs"])
        cells = [
            ("~" if row["seconds_noisy"] == "True" else "")
            + f"{1e3 * float(row['seconds']) / batch:.0f} ({float(row['speedup']):.2f})"
            for row in map(own.__getitem__, runtimes)
        ]
        lines.append([f"`{name}`", f"{ratio:.2f}", *cells])
    return markdown(lines)


def test_tables_of_exported_models():
    section = " ".join(BENCHMARKS.partition("### Exported models\n")[2].partition("\n### ")[0].split())
    for batch in (1, 32):
        assert exported(batch) in BENCHMARKS, exported(batch)
        rows = {(row["name"], row["execution"]): row for row in read("exported.csv") if row["batch"] == str(batch)}
        seconds = {key: float(row["seconds"]) for key, row in rows.items()}
        gains = {
            runtime: [seconds[name, "eager"] / seconds[name, runtime] for name, other in rows if other == "eager"]
            for runtime in ("onnx", "aot", "onnx-int8")
        }
        ranges = [f"{min(each):.2f} to {max(each):.2f}" for each in gains.values()]
        line = "ONNX Runtime is {} times as fast as eager, AOTInductor {}, and 8 bits {}".format(*ranges)
        assert line in section, line
        assert all(float(row["speedup"]) > 1 for row in rows.values() if row["name"] != row["baseline"])
    rows = {(row["name"], row["execution"], row["batch"]): row for row in read("exported.csv")}
    alone = {(name, runtime): float(row["seconds"]) for (name, runtime, batch), row in rows.items() if batch == "1"}
    assert all(float(rows[*key, "32"]["seconds"]) / 32 > seconds for key, seconds in alone.items())
    gains = {name: [float(rows[name, each, "1"]["speedup"]) for each in ("eager", "onnx-int8")] for name, _ in alone}
    assert [name for name, (eager, eight) in gains.items() if eight < eager] == ["deit_tiny_p8:performer"]


def lean() -> str:
    """Peaks of forward and backward relative to fused softmax attention's, and the time of the path "lean"; the highest
    peaks first.
    """
    rows = {row["name"]: row for row in read("lean.csv")}
    softmax = float(rows["softmax"]["peak_bytes"])
    lines = [["", "peak", "peak, lean", "time, lean"]]
    for name, row in sorted(rows.items(), key=lambda pair: -float(pair[1]["peak_bytes"])):
        peaks = [float(row[key]) / softmax for key in ("peak_bytes", "lean_peak_bytes")]
        if peaks[0] > 1.3:
            noise = "~" if row["noisy"] == "True" else ""
            lines.append([f"`{name}`", *(f"{peak:.2f}" for peak in peaks), f"{noise}{float(row['time_ratio']):.2f}"])
    return markdown(lines)


def test_table_of_the_path_of_least_memory():
    assert lean() in BENCHMARKS, lean()
    rows = {row["name"]: row for row in read("lean.csv")}
    peaks = [float(row["lean_peak_bytes"]) / float(rows["softmax"]["peak_bytes"]) for row in rows.values()]
    low = sum(peak <= 1.6 for peak in peaks)
    assert f"It is at most 1.6 for {low} of the {len(rows)} (46 mechanisms and four controls)" in BENCHMARKS
    kept = [name for name, row in rows.items() if float(row["lean_peak_bytes"]) >= float(row["peak_bytes"])]
    assert sorted(kept) == ["convolution", "identity", "mean", "synthesizer"]  # docs/mechanisms.md names them
    times = sorted(float(row["time_ratio"]) for row in rows.values())
    assert f"{times[0]:.2f} to {times[-1]:.2f} times" in BENCHMARKS


def test_table_of_efficiency():
    assert efficiency() in BENCHMARKS, efficiency()
    (sentence,) = re.findall(r"do not sort and are below 0\.70 at 784 tokens: ([^.]*)\.", BENCHMARKS)
    assert {*re.findall(r"`(\w+)`", sentence)} == {row["name"] for row in slow() if row["searches"] == "False"}


def block() -> str:
    """Speed-ups of a layer of 512 channels over fused softmax attention, by the number of tokens; at the most tokens
    also the ratio of multiply-accumulates and the peak.
    """
    found = {(row["name"], row["tokens"]): row for row in read("block_eva.csv")}
    names, sizes = ([*dict.fromkeys(setting[place] for setting in found)] for place in range(2))
    lines = [["", *(f"{size} tokens" for size in sizes), "ratio of MACs", "peak"]]
    for name in names:
        rows = [found[name, size] for size in sizes]
        cells = [f"{'~' * (row['speedup_noisy'] == 'True')}{float(row['speedup']):.2f}" for row in rows]
        lines.append([f"`{name}`", *cells, *(f"{float(rows[-1][key]):.2f}" for key in ("macs_ratio", "peak_ratio"))])
    return markdown(lines)


def test_table_of_a_block_of_512_channels():
    assert block() in BENCHMARKS, block()
    section = " ".join(
        BENCHMARKS.partition("## Encoder benchmarks of the EVA and LARA papers\n")[2].partition("\n## ")[0].split()
    )
    speedups: dict[str, dict[str, float]] = {}
    for row in read("block_eva.csv"):
        speedups.setdefault(row["tokens"], {})[row["name"]] = float(row["speedup"])
    slower = {name for n in ("1024", "2048", "4096", "8192") for name, each in speedups[n].items() if each < 1}
    assert slower == {"softmax@plain"}  # "from 1,024 tokens on"
    assert f"EVA's is {speedups['8192']['eva']:.1f} times as fast at 8192" in section
    plain = [row for row in read("block_eva.csv") if row["name"] == "softmax@plain"][-1]
    assert f"takes {float(plain['peak_ratio']):.0f} times the memory" in section
    above = {
        row["name"]
        for row in read("block_eva.csv")
        if row["tokens"] == "8192" and float(row["speedup"]) > float(row["macs_ratio"])
    }
    (named,) = re.findall(r"Ratios above that of the multiply-accumulates \(([^)]*)\)", section)
    assert {*re.findall(r"`(\w+)`", named)} == above, above


def test_table_of_shares_of_time():
    assert spent() in BENCHMARKS, spent()


def test_accuracy_with_augmentation_in_batches():
    top1: dict[str, dict[int, dict[str, float]]] = {}
    for row in read("batched.csv"):
        top1.setdefault(row["augment.batched"], {})[int(row["train.seed"])] = {"top1": float(row["top1"])}
    without, batched = measure([top1["false"], top1["true"]], "top1")
    assert batched.difference.is_noise
    means = [plus_minus(spread, ".2f") for spread in (batched.spread, without.spread)]
    found = "{} % with `batched` and {} % without (three seeds; paired difference {})".format(
        *means, plus_minus(batched.difference, "+.2f")
    )
    assert found in " ".join((DOCS / "data.md").read_text().split()), found


def test_what_the_data_can_decide():
    section = RESULTS.partition("## What these data can decide\n")[2].partition("\n## ")[0]
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for row in read("fashion_mnist.csv"):
        runs.setdefault(row["attention"], {})[int(row["train.seed"])] = {"top1": float(row["top1"])}
    scratch = dict(zip(runs, measure(list(runs.values()), "top1"), strict=True))
    for differences in ([top1.difference for top1 in list(scratch.values())[1:]], BEHIND.values()):
        widths = sorted(difference.half_width for difference in differences)
        assert f"{widths[0]:.1f} to {widths[-1]:.1f} points" in section
        assert f"(median {median(widths):.1f})" in section
    for control in ("identity", "convolution"):
        assert f"{scratch[f'{{name: {control}}}'].spread.mean:.1f} %" in section


def test_table_from_scratch():
    assert over_seeds("fashion_mnist.csv") in RESULTS
    assert len(read("fashion_mnist.csv")) == 3 * 14


def test_table_of_sparse_and_low_rank():
    assert over_seeds("scatterbrain.csv") in RESULTS
    assert len(read("scatterbrain.csv")) == 3 * 10
    section = " ".join(RESULTS.partition("### Sparse, low rank, and both\n")[2].partition("\n### ")[0].split())
    smyrf, performer = "{name: smyrf, cluster_size: 24}", "{name: performer, num_samples: 24}"
    both, windows = "{name: scatterbrain_lsh, cluster_size: 12, num_samples: 12", "{name: scatterbrain, window_size: 5"
    none = ", leave_one_out: none}"
    pairs = {
        (performer, smyrf): "+4.49",
        (both + none, smyrf): "+4.43",
        (smyrf, both + "}"): "-3.76 (noise)",
        (performer, both + "}"): "+0.73 (noise)",
        (both + none, both + "}"): "+0.67 (noise)",
        (both + none, both + ", leave_one_out: average}"): "+0.20 (noise)",
        (windows + ", num_samples: 12" + none, windows + ", num_samples: 12}"): "-0.52 (noise)",
        (both + "}", "{name: scatterbrain_lsh, cluster_size: 8, features: elu}"): "+5.01 (noise)",
    }
    assert {pair: difference_of("scatterbrain.csv", *pair) for pair in pairs} == pairs
    for figure in ("4.5 points", "4.4 points", "3.8 points (noise)", "0.7 (noise)", "5.0 points (noise)"):
        assert figure in section, figure


def test_tables_at_equal_macs():
    for table in equal_tables():
        assert table in RESULTS, table
    assert Counter(row["tokens"] for row in EQUAL) == {"196": 48, "784": 48}
    machines: dict[tuple[str, str], set[str]] = {}
    for row in EQUAL:
        machines.setdefault((row["tokens"], row["seed"]), set()).add(row["processor"])
    assert machines.pop(("784", "1")) == {"h200"}
    assert [*machines.values()] == [{"xeon"}] * 5
    every = [row for row in read("equal_macs.csv") if row["tokens"] == "196"]
    top1 = {(row["processor"], row["name"], row["seed"]): float(row["top1"]) for row in every}
    repeated = [abs(value - top1["xeon", *run]) for (processor, *run), value in top1.items() if processor == "epyc"]
    found = f"{len(repeated)} runs at 196 tokens, repeated with the same seeds on another processor, differ by"
    found += f" {mean(repeated):.1f} points in the mean, and by up to {max(repeated):.1f}"
    assert found in " ".join(RESULTS.split()), found


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_findings_at_equal_macs():
    section = " ".join(RESULTS.partition("### At equal multiply-accumulates\n")[2].partition("\n### ")[0].split())
    rows, rows_784 = map(cells_of, equal_tables())
    sides = []
    for table in (rows, rows_784):
        beyond = {row[0]: float(row[4].split()[0]) for row in table if row[4] and "noise" not in row[4]}
        sides += [{name for name, mean in beyond.items() if sign * mean > 0} for sign in (1, -1)]
        assert f"{beyond['linformer']:.1f} points" in section
    ahead, behind, ahead_784, behind_784 = sides
    assert ahead == {"linformer", "longformer", "sparse_transformer", "transformer_ls", "eva", "agent"}
    assert behind == {"abc", "lara", "performer", "rfa"}
    assert ahead_784 == ahead | {"nystrom"}
    assert behind_784 == behind - {"lara"} | {"orthoformer", "scatterbrain"}
    found = {row[0]: float(row[4].split()[0]) for row in rows_784 if row[4]}
    much, little = {"linformer", "sparse_transformer", "longformer", "nystrom"}, {"agent", "eva", "transformer_ls"}
    for names, sign in ((much, 1), (little, 1), (behind_784, -1)):
        least, most = (bound(abs(found[name]) for name in names) for bound in (min, max))
        assert min(sign * found[name] for name in names) > 0
        assert f"by {least:.1f} to {most:.1f}" in section
    assert much | little == ahead_784
    assert f"LARA's {-found['lara']:.1f} points are noise" in section
    at_196, at_784 = (dict(sorted((row[0], float(row[3].split()[0])) for row in table)) for table in (rows, rows_784))
    correlation = rank_correlation([*at_196.values()], [*at_784.values()])
    assert f"rank correlation of {correlation:.2f}" in section
    moves = sorted(at_784[name] - at_196[name] for name in at_196)
    assert f"{-moves[0]:.1f} points less to {moves[-1]:.1f} more" in section, moves
    shares = []
    for side, others in ((14, 107_890), (28, 136_114)):  # parameters of the models with softmax attention
        options = {"dim": 48, "num_heads": 3, "grid": (side, side)}
        layers = create_attention("softmax", **options), create_attention("linformer", num_landmarks=50, **options)
        softmax, linformer = (sum(p.numel() for p in layer.parameters()) for layer in layers)
        more = 3 * (linformer - softmax)
        shares.append(f"{others + more:,} parameters, {more / others:.0%} more")
    assert f"{shares[0]} (at 784 tokens {shares[1]})".replace("%", " %") in section, shares
    both = {row[0]: [float(cell.split()[0]) for cell in (row[3], row[5])] for row in rows if row[5]}
    lower = {name: own - other for name, (own, other) in both.items()}
    assert f"LARA is {-lower.pop('lara'):.1f} points lower" in section
    del both["softmax"], lower["softmax"]
    assert f"four of them changed by at most {max(map(abs, lower.values())):.1f} points" in section
    orders = [sorted(both, key=lambda name, n=n: -both[name][n]) for n in (0, 1)]
    assert orders[0] == orders[1] == ["nystrom", "transformer_ls", "eva", "lara", "performer"]


def test_table_of_the_local_term():
    titles = ["without (%)", "with the local term (%)", "difference"]
    assert without_and_with("local_term.csv", "local", titles) in RESULTS
    rows = read("local_term.csv")
    assert len(rows) == 3 * (2 * 17 + 2 + 4)
    top1 = {(row["attention"], row["train.seed"], row["local"]): float(row["top1"]) for row in rows}
    gains = [with_it - top1[name, seed, "false"] for (name, seed, local), with_it in top1.items() if local == "true"]
    assert f"{sum(gain > 0 for gain in gains)} of the {len(gains)} pairs" in RESULTS


def test_tables_of_pathfinder():
    curve = [[row["epoch"], f"{float(row['train_loss']):.3f}", row["top1"]] for row in read("pathfinder.csv")]
    titles = ["epoch", "training loss", "top-1 (%)"]
    assert markdown([titles, *curve]) in RESULTS
    scenes = [[row["scenes"], row["side"], row["separation"], row["top1"]] for row in read("pathfinder_scenes.csv")]
    titles = ["scenes along a side", "side of a scene (patches)", "ends apart (patches)", "top-1 (%)"]
    assert markdown([titles, *scenes]) in RESULTS
    assert over_seeds("pathfinder_ablation.csv", {"training loss": lambda row: float(row["train_loss"])}) in RESULTS
    assert len(read("pathfinder_ablation.csv")) == 3 * 7
