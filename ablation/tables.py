"""Tables of a sweep's finished runs: a row for each setting, and for each run."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ablation.cases import Case
from ablation.figures import draw_curves, draw_heat_map, draw_pareto, draw_results
from ablation.front import RESAMPLES, front_probabilities
from ablation.latex import latex_table
from ablation.match import BATCH_SIZE, TOLERANCE
from ablation.replicates import Measured, measure, tells_apart
from ablation.settings import (
    Setting,
    accuracies,
    changed_options,
    has_replicates,
    held_options,
    in_order,
    replicate_of,
    short_names,
)
from ablation.tuning import Tuning
from attention.options import to_yaml
from engine.reporting.plots import encode
from engine.reporting.tables import markdown_table, plus_minus, verdict
from engine.runtime.files import to_csv, write_file
from engine.runtime.locks import hold_lock

ONE_RUN = (
    "One run per row: how far other seeds would end from it is not known, and rows that are near cannot be ranked."
)
REPLICATES = (
    "± is the standard deviation over {0}s. Differences are to the first row, between runs of the same {0}, and noise"
    " where the 95 % interval of Student's t over them contains 0; their standard deviation counts as one image at"
    " least, as accuracies are rounded to images (row by row: of 20 rows without an effect, one will seem to have one)."
)

FOLDS = (
    "Each fold is another part of the training images, which its run validates on. Runs of different folds share"
    " training images, so that the standard deviation over folds is too small (Bengio and Grandvalet: No unbiased"
    " estimator of the variance of k-fold cross-validation, JMLR 2004)."
)

WITHIN = f"within {100 * TOLERANCE:.0f} %"
"""Title of the column that says whether the target of `match` is reached."""

ON_FRONT = (
    "On front: probability that no other row has at least as good a mean top-1 at no more cost, and one of them better."
    f" It is the share of {RESAMPLES:,} bootstrap resamples of the runs of every row that has two or more; few"
    " runs make it rough. A measured cost in which rows differ no more than {0}s has no such column."
)

ELAPSED = "elapsed_seconds"
"""Field of records: running time without pauses."""

Table = dict[str, list[str]]
"""Title of a column -> texts of its rows; empty for values that are not known yet."""


class Tables(NamedTuple):
    """A table with the accuracies of several runs as `for_readers` has them, and as `for_programs` has them."""

    readers: Table
    programs: Table


def tabulate(settings: Sequence[Setting]) -> Tables:
    """Returns a row for each setting.

    Accuracies are from the last epoch: "top-1" of the plain weights and, if any run keeps them, "EMA top-1" of averaged
    weights. Step time and memory are means over runs; memory is measured on a GPU only.
    """
    results = [setting.results() for setting in settings]
    options = {
        **held_options(settings),
        **tabulate_match(settings),
        **tabulate_rates(settings),
        "parameters (M)": [f"{setting.costs.parameters / 1e6:#.4g}" for setting in settings],
        "paper: parameters (M)": printed(settings, "parameters", ".1f"),
        "MACs (G)": [f"{setting.costs.macs / 1e9:#.4g}" for setting in settings],
        "paper: MACs (G)": printed(settings, "macs", ".1f"),
        "step (s)": means(measure(results, "step_seconds"), ".3f"),
        **if_any("paper: step (ms)", printed(settings, "step_ms", "g")),
        **if_any("peak memory (MB)", means(measure(results, "memory_mb"), ".0f")),
        **if_any("paper: memory (GB)", printed(settings, "memory_gb", "g")),
    }
    if several := has_replicates(settings):
        options[f"{replicate_of(settings)}s"] = [str(len(runs)) for runs in results]
    measured = {name: measure(results, key) for name, key in accuracies(settings).items()}
    fronts = tabulate_fronts(settings, results) if several else {}

    def join(write: Callable[[str, Sequence[Measured]], Table]) -> Table:
        table = {**options}
        for name, own in measured.items():
            table |= write(name, own) if several else {f"{name} (%)": means(own, ".2f")}
        return table | fronts | {"paper (%)": printed(settings, "top1", ".2f")}

    return Tables(join(for_readers), join(for_programs))


def tabulate_fronts(settings: Sequence[Setting], results: Sequence[Mapping[int, Mapping[str, Any]]]) -> Table:
    """Returns a column of `front_probabilities` for each cost in which settings differ more than their runs."""
    top1 = [[*own.values.values()] for own in measure(results, "top1")]
    costs: dict[str, list[float | None]] = {"MACs": [setting.costs.macs for setting in settings]}
    for cost, key in ("step", "step_seconds"), ("peak memory", "memory_mb"):
        if tells_apart(measured := measure(results, key)):
            costs[cost] = [own.spread and own.spread.mean for own in measured]
    fronts: Table = {}
    for cost, values in costs.items():
        sure = [text(probability, ".2f") for probability in front_probabilities(values, top1)]
        fronts |= if_any(f"on front: {cost}", sure)
    return fronts


def tabulate_match(settings: Sequence[Setting]) -> Table:
    """Returns the solved size of each setting, the target, and the cost that is reached; no columns without a target.

    They are empty for a setting that keeps the size that it has.
    """
    found = [setting.matched for setting in settings]
    if not (match := next((own.match for own in found if own), None)):
        return {}
    title, form = match.kind + (f" ({match.unit.strip()})" if match.unit else ""), ".4g" if match.is_measured else ".0f"
    return {
        "size": [f"{own.option}={own.value}" if own else "" for own in found],
        f"{title}: target": [text(own and match.target, form) for own in found],
        f"{title}: reached": [text(own and own.reached, form) for own in found],
        "off target (%)": [text(own and 100 * own.deviation, "+.1f") for own in found],
        WITHIN: [("yes" if own.is_equal else "no") if own else "" for own in found],
    }


def describe_match(settings: Sequence[Setting]) -> list[str]:
    """Returns the note on costs that were measured; none if they were counted."""
    measured = [setting.matched for setting in settings if setting.matched and setting.matched.machine]
    if not measured:
        return []
    match, machines = measured[0].match, ", ".join(dict.fromkeys(own.machine for own in measured))
    pass_of = f"forward and backward pass of an attention layer, images: {match.batch_size or BATCH_SIZE}"
    noise = f"; standard error of the medians up to {100 * max(own.error for own in measured):.1f} %"
    return [f"{match.kind}: {pass_of}, measured once on {machines}{noise if match.kind == 'time' else ''}."]


def tabulate_rates(settings: Sequence[Setting]) -> Table:
    """Returns the chosen learning rate of each setting and its top-1 on the held-out images; no columns without one.

    The edge is "lowest" or "highest" if the choice ends there: a better learning rate may lie beyond it.
    """
    rates = [(tuning := setting.tuning) and (tuning.choose(), tuning.edge(), tuning.results()) for setting in settings]
    if not all(rates):
        return {}
    return {
        "lr": ["" if lr is None else to_yaml(lr) for lr, _, _ in rates],
        "edge of lr": [edge for _, edge, _ in rates],
        "held-out top-1 (%)": [text(found.get(lr, {}).get("top1"), ".2f") for lr, _, found in rates],
    }


def printed(settings: Sequence[Setting], figure: str, form: str) -> list[str]:
    """Formats a figure of a paper's table."""
    return [text(setting.paper and getattr(setting.paper, figure), form) for setting in settings]


def for_programs(name: str, measured: Sequence[Measured]) -> Table:
    """Returns one number per column. The interval is the difference minus and plus the half width."""
    spreads, differences = [own.spread for own in measured], [own.difference for own in measured]
    return {
        f"{name} (%)": [text(spread and spread.mean, ".2f") for spread in spreads],
        f"{name} std": [text(spread and spread.std, ".2f") for spread in spreads],
        f"{name} difference": [text(difference and difference.mean, "+.2f") for difference in differences],
        f"{name} difference std": [text(difference and difference.std, ".2f") for difference in differences],
        f"{name} difference 95 % half width": [text(d and d.half_width, ".2f") for d in differences],
    }


def for_readers(name: str, measured: Sequence[Measured]) -> Table:
    """Returns mean ± standard deviation in one column, and the difference with a verdict in another."""
    return {
        f"{name} (%)": [plus_minus(own.spread, ".2f") for own in measured],
        f"{name} difference": [plus_minus(d := own.difference, "+.2f") + verdict(d) for own in measured],
    }


def means(measured: Sequence[Measured], form: str) -> list[str]:
    return [text(own.spread and own.spread.mean, form) for own in measured]


def if_any(title: str, texts: list[str]) -> Table:
    """Returns a column, or none if it has no values."""
    return {title: texts} if any(texts) else {}


def text(number: float | None, form: str) -> str:
    """Formats a number; empty for None, NaN and infinity."""
    return f"{number:{form}}" if number is not None and math.isfinite(number) else ""


class Report(NamedTuple):
    """A table for readers.

    Attributes:
        table: its columns, without those of given values that all rows share. stated: a text of those values.
        notes: see `list_notes`.
    """

    table: Table
    stated: str
    notes: list[str]


def make_report(settings: Sequence[Setting], table: Table, left_out: Sequence[str] = ()) -> Report:
    """Returns the report on the `table` for readers; for `left_out` see `report_sweep`."""
    papers = [title for title in table if title.startswith("paper")]
    given = (
        *changed_options(settings),
        *tabulate_match(settings),
        "lr",
        "edge of lr",
        "parameters (M)",
        "MACs (G)",
        "seeds",
        "folds",
        *papers,
    )
    constant = [title for title in table if title in given and len(set(table[title])) == 1]
    same = {title: table[title][0] for title in constant if len(settings) > 1 or not table[title][0]}
    stated = ", ".join(f"{title} = {text}" for title, text in same.items() if text)
    shown = {title: texts for title, texts in table.items() if title not in same}
    return Report(shown, stated, list_notes(settings, table, left_out))


def report_sweep(caption: str, settings: Sequence[Setting], left_out: Sequence[str] = ()) -> str:
    """Formats a sweep for readers, see `to_markdown`.

    Args:
        left_out: lines that name the settings without runs.
    """
    return to_markdown(caption, make_report(settings, tabulate(settings).readers, left_out))


def to_markdown(caption: str, report: Report) -> str:
    """Formats a report in Markdown: caption, values that all rows share, the table, and its notes."""
    table, stated, notes = report
    rows = markdown_table(list(table), zip(*table.values(), strict=True)) + "\n"
    return f"{caption}\n\n" + f"All rows: {stated}.\n\n" * bool(stated) + rows + "".join(f"\n{n}\n" for n in notes)


def to_latex(caption: str, report: Report) -> str:
    """Formats a report as `to_markdown` does, as a LaTeX table with booktabs; notes are comments below it."""
    table, stated, notes = report
    caption = " ".join(filter(None, [f"{caption}." * bool(caption), f"All rows: {stated}." * bool(stated)]))
    text = latex_table(caption, list(table), list(zip(*table.values(), strict=True)))
    return text + "".join(f"% {note}\n" for note in notes)


def list_notes(settings: Sequence[Setting], table: Table, left_out: Sequence[str]) -> list[str]:
    """Returns the notes below a table: how reliable its numbers are, and what is not as its row says."""
    replicate, num_runs = replicate_of(settings), settings[0].num_runs
    notes = [REPLICATES.format(replicate) if has_replicates(settings) else ONE_RUN] + [FOLDS] * (replicate == "fold")
    counts = set(map(int, table.get(f"{replicate}s", [])))
    if len(counts) == 1 and 0 < max(counts) < num_runs and not all(map(Case.outcome, in_order(settings))):
        notes.append(f"Not finished: every row has {max(counts)} of its {num_runs} runs.")
    if any(title.startswith("on front") for title in table):
        notes.append(ON_FRONT.format(replicate))
    notes += describe_match(settings)
    if tuned := [setting.tuning for setting in settings if setting.tuning]:
        notes.append(describe_choice(tuned[0]))
    for name, setting in zip(short_names(settings), settings, strict=True):
        for lr in setting.tuning.diverged() if setting.tuning else ():
            notes.append(f"{name}: training has diverged with optim.lr = {to_yaml(lr)}, which was not chosen.")
        notes += [f"{name}: {line}." for line in describe_lost(setting)]
        if setting.paper and setting.paper.note:
            notes.append(f"{name}, not as the paper prints it: {setting.paper.note}.")
    for case in in_order(settings):
        if changes := case.changes():
            notes.append(f"{case.directory.name} is not all of its setting: {'; '.join(changes)}.")
    return notes + [f"Left out: {line}." for line in left_out]


def describe_lost(setting: Setting) -> list[str]:
    """Returns a text for the runs of a setting that have diverged, and one for those that have failed otherwise."""
    outcomes, lines = Counter(map(Case.outcome, setting.cases)), []
    for outcome in ("diverged", "failed"):
        if count := outcomes[outcome]:
            has, takes = ("has", "takes") if count == 1 else ("have", "take")
            lines.append(f"{count} of {setting.num_runs} runs {has} {outcome} and {takes} no part")
    return lines


def describe_choice(tuning: Tuning) -> str:
    """Returns the note on the rule by which learning rates are chosen."""
    rates, (case, *_) = [*tuning.cases], tuning.cases.values()
    return (
        f"lr was chosen of {to_yaml(rates)} for every row by the best top-1 of one run each on held-out training images"
        f" ({case.run.data.held_out_by}). The seeds are trained on all training images. At an edge of lr, a better one"
        " may lie beyond it."
    )


def list_runs(settings: Sequence[Setting]) -> Table:
    """Returns a row for each run, in the order of training, without those that choose learning rates."""
    row_of = {case.directory: i for i, setting in enumerate(settings) for case in setting.cases}
    runs = [(case, case.result() or {}) for case in in_order(settings)]
    columns = {f"{name} (%)": key for name, key in accuracies(settings).items()}
    columns |= {"top-5 (%)": "top5", "loss": "loss", "epochs": "epoch", "step (s)": "step_seconds"}
    memory = [text(result.get("memory_mb"), ".6g") for _, result in runs]
    hours = [text(seconds and seconds / 3600, ".4g") for _, result in runs for seconds in [result.get(ELAPSED)]]
    changes = ["; ".join(case.changes()) for case, _ in runs]
    options = held_options(settings).items()
    replicate = {"train.seed": [str(case.run.train.seed) for case, _ in runs]}
    if replicate_of(settings) == "fold":
        replicate["data.fold"] = [str(case.run.data.fold) for case, _ in runs]
    is_tuned = any(setting.tuning for setting in settings)
    return {
        "directory": [case.directory.name for case, _ in runs],
        **{option: [texts[row_of[case.directory]] for case, _ in runs] for option, texts in options},
        **({"lr": [to_yaml(case.run.optim.lr) for case, _ in runs]} if is_tuned else {}),
        **replicate,
        **{title: [text(result.get(key), ".6g") for _, result in runs] for title, key in columns.items()},
        **if_any("hours", hours),
        **if_any("peak memory (MB)", memory),
        **({"changed": changes} if any(changes) else {}),
    }


def to_json(caption: str, settings: Sequence[Setting], left_out: Sequence[str] = ()) -> bytes:
    """Encodes the settings and their finished runs: the final records of train.py by seed or fold."""
    rows = [
        {
            "name": name,
            "changes": {option: yaml.safe_load(text) for option, text in setting.changes.items()},
            **setting.costs._asdict(),
            **({"tuning": setting.tuning.results()} if setting.tuning else {}),
            **({"matched": dataclasses.asdict(setting.matched)} if setting.matched else {}),
            "paper": setting.paper and dataclasses.asdict(setting.paper),
            "runs": setting.results(),
        }
        for name, setting in zip(short_names(settings), settings, strict=True)
    ]
    return json.dumps({"caption": caption, "rows": rows, "left_out": [*left_out]}, indent=1).encode()


TABLES = ("table.md", "table.tex", "table.json", "table.csv", "runs.csv")
"""Files that `write_tables` writes."""

FIGURES = ("table.png", "heat_map.png", "pareto.png", "curves.png")
"""Files that `write_figures` writes."""


def write_tables(caption: str, settings: Sequence[Setting], output: Path, left_out: Sequence[str] = ()) -> None:
    """Writes `TABLES` into `output`; for `left_out` see `report_sweep`."""
    readers, programs = tabulate(settings)
    report = make_report(settings, readers, left_out)
    with hold_lock(output / "lock", wait=True):
        write_file(output / "table.md", to_markdown(caption, report).encode())
        write_file(output / "table.tex", to_latex(caption, report).encode())
        write_file(output / "table.json", to_json(caption, settings, left_out))
        for name, table in ("table.csv", programs), ("runs.csv", list_runs(settings)):
            write_file(output / name, to_csv(list(table), zip(*table.values(), strict=True)))


def write_figures(caption: str, settings: Sequence[Setting], output: Path) -> None:
    """Writes table.png, pareto.png, curves.png and, for two options of numbers, heat_map.png into `output`.

    Removes an earlier figure that the sweep has no longer.
    """
    drawings = [draw(caption, settings) for draw in (draw_results, draw_heat_map, draw_pareto, draw_curves)]
    with hold_lock(output / "lock", wait=True):
        for name, figure in zip(FIGURES, drawings, strict=True):
            if figure is not None:
                write_file(output / name, encode(figure))
            else:
                (output / name).unlink(missing_ok=True)
