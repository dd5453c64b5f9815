"""Tables of a sweep's finished runs: a row for each setting, a row for each run, and the notes below them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ablation.names import short_names
from ablation.runs import Case, Setting, changed_options, find_crowded, in_order, replicate_of
from engine.checkpoints.progress import is_score
from engine.reporting.tables import Spread, holm, plus_minus, spread, verdict

Table = dict[str, list[str]]
"""Title of a column -> texts of its rows; empty for values that are not known yet."""

MEASURED_COSTS = {"step_seconds": "step time (s)", "memory_mb": "peak memory (MB)"}
"""Costs that runs measure: key in their final records -> label of an axis."""

ONE_RUN = "One run per row: how far other seeds would end is not known, and rows that are near cannot be ranked."

REPLICATES = (
    "Statistics: ± is the standard deviation over {0}s. Differences are to the first row, between runs of the same {0},"
    " and noise unless Student's t over them is significant at 5 % after Holm's correction for the rows: at most one in"
    " 20 columns without an effect shows one. Their standard deviation is taken as at least one image, because"
    " accuracies are multiples of one image."
)

FOLDS = (
    "Runs of different folds share training images, so that the standard deviation over folds is too small (Bengio and"
    " Grandvalet: No unbiased estimator of the variance of k-fold cross-validation, JMLR 2004)."
)


def tabulate(settings: Sequence[Setting], for_readers: bool = False) -> Table:
    """Returns a row for each setting. Accuracies of several runs are those of `mean_and_verdict` for readers, and of
    `single_numbers` for programs.

    Accuracies are from the last epoch: "top-1" of the plain weights and, if any run keeps them, "EMA top-1" of averaged
    weights. Step time and memory are means over runs, without `find_crowded`'s; memory is measured on a GPU only.
    """
    results, crowded = [setting.results() for setting in settings], find_crowded(settings)
    alone = [setting.results(crowded) for setting in settings]
    options = {
        **tabulate_options(settings),
        **tabulate_match(settings),
        "parameters (M)": [f"{setting.costs.parameters / 1e6:#.4g}" for setting in settings],
        **if_any("paper: parameters (M)", paper_cells(settings, "parameters", ".1f")),
        "MACs (G)": [f"{setting.costs.macs / 1e9:#.4g}" for setting in settings],
        **if_any("paper: MACs (G)", paper_cells(settings, "macs", ".1f")),
        **if_any("step (s)", mean_cells(measure(alone, "step_seconds"), ".3f")),
        **if_any("paper: step (ms)", paper_cells(settings, "step_ms", "g")),
        **if_any("peak memory (MB)", mean_cells(measure(results, "memory_mb"), ".0f")),
        **if_any("paper: memory (GB)", paper_cells(settings, "memory_gb", "g")),
    }
    if several := len(settings[0].cases) > 1:
        options[f"{replicate_of(settings)}s"] = [str(len(runs)) for runs in results]
    write = mean_and_verdict if for_readers else single_numbers
    for name, own in ((name, measure(results, key)) for name, key in accuracies(settings).items()):
        options |= write(name, own) if several else {f"{name} (%)": mean_cells(own, ".2f")}
    return options | if_any("paper (%)", paper_cells(settings, "top1", ".2f"))


def list_runs(settings: Sequence[Setting]) -> Table:
    """Returns a row for each run, in the order of training."""
    runs = [(case, case.result() or {}) for case in in_order(settings)]
    columns = {f"{name} (%)": key for name, key in accuracies(settings).items()}
    columns |= {"top-5 (%)": "top5", "loss": "loss", "epochs": "epoch", "step (s)": "step_seconds"}
    elapsed = [result.get("elapsed_seconds") for _, result in runs]  # without pauses
    hours = [format_number(seconds and seconds / 3600, ".4g") for seconds in elapsed]
    folds = [str(case.run.data.fold) for case, _ in runs] if replicate_of(settings) == "fold" else []
    return {
        "directory": [case.directory.name for case, _ in runs],
        **{option: texts * len(settings[0].cases) for option, texts in tabulate_options(settings).items()},
        "train.seed": [str(case.run.train.seed) for case, _ in runs],
        **if_any("data.fold", folds),
        **{title: [format_number(result.get(key), ".6g") for _, result in runs] for title, key in columns.items()},
        **if_any("hours", hours),
        **if_any("peak memory (MB)", [format_number(result.get("memory_mb"), ".6g") for _, result in runs]),
        **if_any("changed", ["; ".join(case.changes()) for case, _ in runs]),
    }


@dataclass(frozen=True)
class Measured:
    """One measurement of the finished runs of a setting.

    Attributes:
        values: seed -> value. spread: spread of the values; None if there are none yet. difference: spread of the
            differences to the first setting with the same seeds; None if there are none, and for the first setting.
    """

    values: dict[int, float]
    spread: Spread | None
    difference: Spread | None


def measure(results: Sequence[Mapping[int, Mapping[str, Any]]], name: str) -> list[Measured]:
    """Returns the measurement `name` of every setting, whose `results` are seed -> final record of train.py.

    A record may lack it: the run keeps no averaged weights, or was resumed after its last step and has timed none. A
    value that is no score, see `is_score`, counts as lacking. Steps of an accuracy (`top1` and its
    kin, in percent) are those of one of the evaluated `images`.
    """
    values = [{seed: record[name] for seed, record in runs.items() if is_score(record.get(name))} for runs in results]
    images = [record.get("images", math.inf) for runs in results for record in runs.values() if name.endswith("top1")]
    first, step = values[0], 100 / min(images, default=math.inf)
    pairs = [[own[seed] - first[seed] for seed in own if seed in first] for own in values[1:]]
    differences = holm({y: spread(found, step) for y, found in enumerate(pairs, 1)})
    return [Measured(own, spread(own.values()), differences.get(y)) for y, own in enumerate(values)]


def accuracies(settings: Sequence[Setting]) -> dict[str, str]:
    """Returns name -> key in the final record, for plain weights and, if any run keeps them, averaged weights."""
    averages = any(setting.run.train.ema_decay for setting in settings)
    return {"top-1": "top1"} | ({"EMA top-1": "ema_top1"} if averages else {})


def list_best(settings: Sequence[Setting]) -> dict[str, list[bool]]:
    """Returns column of an accuracy -> whether each row has the highest mean, or differs from that by noise.

    Single runs have no rank, and no such columns.
    """
    results, best = [setting.results() for setting in settings], {}
    for name, key in accuracies(settings).items() if len(settings[0].cases) > 1 else ():
        means = [own.spread.mean if own.spread else -math.inf for own in measure(results, key)]
        top = means.index(max(means))
        others = measure([results[top], *results[:top], *results[top + 1 :]], key)[1:]
        noise = [bool(own.spread) and (own.difference is None or own.difference.is_noise) for own in others]
        best[f"{name} (%)"] = [*noise[:top], means[top] > -math.inf, *noise[top:]]
    return best


def tabulate_options(settings: Sequence[Setting]) -> Table:
    """Returns option, or base, that any setting changes -> YAML texts of the values that hold; empty without one."""
    return {option: [setting.text_of(option) for setting in settings] for option in changed_options(settings)}


def tabulate_match(settings: Sequence[Setting]) -> Table:
    """Returns the solved size of each setting, the target, and the cost that is reached; no columns without a target.

    They are empty for a setting that keeps the size that it has.
    """
    found = [setting.matched for setting in settings]
    if not any(found):
        return {}
    return {
        "size": [f"{own.option}={own.value}" if own else "" for own in found],
        "token_macs: target": [format_number(own and own.target, ".0f") for own in found],
        "token_macs: reached": [format_number(own and own.reached, ".0f") for own in found],
        "off target (%)": [format_number(own and 100 * own.deviation, "+.1f") for own in found],
    }


def paper_cells(settings: Sequence[Setting], field: str, form: str) -> list[str]:
    """Formats a field of the papers' rows, a cell for each setting."""
    return [format_number(setting.paper and getattr(setting.paper, field), form) for setting in settings]


def single_numbers(name: str, measured: Sequence[Measured]) -> Table:
    """Returns one number per column. The interval is the difference minus and plus the half width."""
    spreads, differences = [own.spread for own in measured], [own.difference for own in measured]
    return {
        f"{name} (%)": [format_number(spread and spread.mean, ".2f") for spread in spreads],
        f"{name} std": [format_number(spread and spread.std, ".2f") for spread in spreads],
        f"{name} difference": [format_number(difference and difference.mean, "+.2f") for difference in differences],
        f"{name} difference std": [format_number(difference and difference.std, ".2f") for difference in differences],
        f"{name} difference 95 % half width": [format_number(d and d.half_width, ".2f") for d in differences],
    }


def mean_and_verdict(name: str, measured: Sequence[Measured]) -> Table:
    """Returns mean ± standard deviation in one column, and the difference with a verdict in another."""
    return {
        f"{name} (%)": [plus_minus(own.spread, ".2f") for own in measured],
        f"{name} difference": [plus_minus(d := own.difference, "+.2f") + verdict(d) for own in measured],
    }


def mean_cells(measured: Sequence[Measured], form: str) -> list[str]:
    """Formats the means of a measurement, a cell for each setting."""
    return [format_number(own.spread and own.spread.mean, form) for own in measured]


def if_any(title: str, texts: list[str]) -> Table:
    """Returns a column, or none if it has no values."""
    return {title: texts} if any(texts) else {}


def format_number(number: float | None, form: str) -> str:
    """Formats a number; empty for None, NaN and infinity."""
    return f"{number:{form}}" if number is not None and math.isfinite(number) else ""


def list_notes(settings: Sequence[Setting], table: Table, left_out: Sequence[str]) -> list[str]:
    """Returns the notes below a table: the reliability of its numbers, and exceptions in single rows."""
    replicate, num_runs = replicate_of(settings), len(settings[0].cases)
    notes = [REPLICATES.format(replicate) if len(settings[0].cases) > 1 else ONE_RUN] + [FOLDS] * (replicate == "fold")
    counts = set(map(int, table.get(f"{replicate}s", [])))
    ended = [[bool(case.result() or case.has_failed()) for case in setting.cases] for setting in settings]
    if len(counts) == 1 and 0 < max(counts) < num_runs and not all(map(all, ended)):
        notes.append(f"Not finished: every row has {max(counts)} of its {num_runs} runs.")
    for name, setting in zip(short_names(settings), settings, strict=True):
        if count := sum(map(Case.has_failed, setting.cases)):
            notes.append(f"{name}: {count} of {num_runs} runs failed or diverged, and take no part.")
        if setting.paper and setting.paper.note:
            notes.append(f"{name}, not as the paper prints it: {setting.paper.note}.")
    if "step (s)" in table and (crowded := find_crowded(settings)):
        notes.append(f"step (s) leaves out {len(crowded)} runs, which shared the CPUs of a machine with other runs.")
    for case in in_order(settings):
        if changes := case.changes():
            notes.append(f"{case.directory.name} changed options during training: {'; '.join(changes)}.")
    return notes + [f"Left out: {line}." for line in left_out]
