"""Validation loss over time of all runs of a sweep, finished or not."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ablation.sweep import Setting, short_names
from engine.reporting.metrics import find_records
from engine.reporting.plots import line_style


class Evaluation(NamedTuple):
    """Evaluation of a run; `hours`: running time of the run until then, without pauses."""

    epoch: int
    hours: float
    loss: float


def read_curve(directory: Path) -> list[Evaluation]:
    """Returns the evaluations of a run. Hours count training steps alone if records have no time."""
    evaluations, seconds, step = [], 0.0, 0
    for record in find_records(directory):
        if record["kind"] == "train":
            seconds += (record.get("step_seconds") or 0) * (record["step"] - step)
            step = record["step"]
        if record["kind"] == "eval" and record.get("loss") is not None:
            hours = record.get("elapsed_seconds", seconds) / 3600
            evaluations.append(Evaluation(record["epoch"], hours, record["loss"]))
    return evaluations


def draw_curves(caption: str, settings: Sequence[Setting]) -> Figure:
    """Draws validation loss against epochs and hours, with a line for each run in the style of its setting."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(caption, parse_math=False)
    by_epoch, by_hours = figure.subplots(1, 2, sharey=True)
    by_epoch.set(xlabel="epoch", ylabel="validation loss", yscale="log")
    by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_hours.set(xlabel="hours")
    for number, (name, setting) in enumerate(zip(short_names(settings), settings, strict=True)):
        style = line_style(number) | {"linewidth": 1, "markersize": 3}
        for case in setting.cases:
            if curve := read_curve(case.directory):
                epochs, hours, losses = zip(*curve, strict=True)
                by_epoch.plot(epochs, losses, label=name, **style)
                by_hours.plot(hours, losses, **style)
                name = "_"  # in the legend once
    for axes in (by_epoch, by_hours):
        axes.grid(alpha=0.3)
    if by_epoch.lines:
        lines = by_epoch.get_legend_handles_labels()
        legend = by_hours.legend(*lines, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)  # below the caption
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure
