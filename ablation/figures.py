"""Figures of a sweep: finished runs, and validation loss over time of all runs."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ablation.front import front_probabilities, non_dominated
from ablation.replicates import Measured, measure
from ablation.settings import Setting, has_replicates, short_names, varied_options
from engine.reporting.metrics import find_records
from engine.reporting.plots import COLORS, line_style
from engine.reporting.tables import plus_minus

ORANGE, BLUE, GREY = COLORS[4], COLORS[5], COLORS[7]


def draw_results(caption: str, settings: Sequence[Setting]) -> Figure:
    """Draws top-1 of every setting and, for several seeds, the differences to the first setting with intervals."""
    measured = measure([setting.results() for setting in settings], "top1")
    panels = 1 + has_replicates(settings)
    figure = Figure(figsize=(4 + 5 * panels, 1.8 + 0.35 * len(settings)), layout="constrained")
    figure.suptitle(caption, parse_math=False)
    axes, *more = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    draw_top1(axes, settings, measured)
    if more:
        draw_differences(*more, measured)
    axes.set_yticks(range(len(settings)), short_names(settings), parse_math=False)
    axes.set_ylim(len(settings) - 0.5, -0.5)
    return figure


def draw_top1(axes: Axes, settings: Sequence[Setting], measured: Sequence[Measured]) -> None:
    """Draws means with standard deviations as bars, single seeds as small points, and a paper's figures."""
    axes.set_xlabel("top-1 (%)")
    axes.grid(axis="x")
    means = {y: own.spread for y, own in enumerate(measured) if own.spread}
    papers = {y: setting.paper.top1 for y, setting in enumerate(settings) if setting.paper and setting.paper.top1}
    if means:
        x = [spread.mean for spread in means.values()]
        if has_replicates(settings):
            seeds = [(value, y + 0.2) for y, own in enumerate(measured) for value in own.values.values()]
            axes.scatter(*zip(*seeds, strict=True), s=8, color=GREY, label="single seeds")
            bars = [spread.std or 0 for spread in means.values()]
            axes.errorbar(x, list(means), xerr=bars, fmt="o", color=BLUE, capsize=3, label="mean ± standard deviation")
        else:
            axes.scatter(x, list(means), marker="o", color=BLUE, label="measured")
    if papers:
        axes.scatter(list(papers.values()), list(papers), marker="x", color=ORANGE, label="paper")
    if means or papers:
        axes.legend(fontsize=8)


def draw_differences(axes: Axes, measured: Sequence[Measured]) -> None:
    """Draws mean differences to the first setting with 95 % intervals; markers are filled if 0 is outside."""
    axes.set_xlabel("difference of top-1 to the first row\n(percentage points, same seeds)")
    axes.grid(axis="x")
    axes.axvline(0, color="black", linewidth=1)
    differences = {y: own.difference for y, own in enumerate(measured) if own.difference}
    kinds = (
        ("95 % interval without 0", {"fmt": "o", "color": BLUE}, lambda d: not d.is_noise),
        ("noise: 95 % interval with 0", {"fmt": "o", "color": GREY, "mfc": "white"}, lambda d: d.is_noise and d.n > 1),
        ("one seed", {"fmt": ".", "color": GREY}, lambda d: d.n == 1),
    )
    for label, style, belongs in kinds:
        points = {y: difference for y, difference in differences.items() if belongs(difference)}
        bars = [difference.half_width if difference.n > 1 else 0 for difference in points.values()]
        if points:
            x = [difference.mean for difference in points.values()]
            axes.errorbar(x, list(points), xerr=bars, capsize=3, label=label, **style)
    if differences:
        axes.legend(fontsize=8)


def draw_heat_map(caption: str, settings: Sequence[Setting]) -> Figure | None:
    """Draws mean top-1 over two varying options; None unless exactly two vary, over all combinations of numbers."""
    found = numeric_axes(settings)
    if found is None:
        return None
    (down, rows), (right, columns) = found
    means, texts = [[math.nan] * len(columns) for _ in rows], [[""] * len(columns) for _ in rows]
    for setting, own in zip(settings, measure([setting.results() for setting in settings], "top1"), strict=True):
        if own.spread:
            y, x = rows.index(float(setting.changes[down])), columns.index(float(setting.changes[right]))
            means[y][x], texts[y][x] = own.spread.mean, plus_minus(own.spread, ".2f")
    figure = Figure(figsize=(3 + 1.3 * len(columns), 2 + 0.7 * len(rows)), layout="constrained")
    figure.suptitle(caption, parse_math=False)
    axes = figure.add_subplot(xlabel=right, ylabel=down)
    image = axes.imshow(means, origin="lower", aspect="auto")
    axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    for y, x in itertools.product(range(len(rows)), range(len(columns))):
        if texts[y][x]:
            is_dark = image.norm(means[y][x]) < 0.6
            axes.text(x, y, texts[y][x], ha="center", va="center", color="white" if is_dark else "black")
    figure.colorbar(image, label="top-1 (%)")
    return figure


def numeric_axes(settings: Sequence[Setting]) -> list[tuple[str, list[float]]] | None:
    """Returns the two varying options and their ascending values, or None, see `draw_heat_map`."""
    options = varied_options(settings)
    try:
        places = [tuple(float(setting.changes[option]) for option in options) for setting in settings]
    except (KeyError, ValueError):
        return None
    values = [sorted(set(axis)) for axis in zip(*places, strict=True)]
    is_whole = len(values) == 2 and len(set(places)) == len(settings) == len(values[0]) * len(values[1])
    return list(zip(options, values, strict=True)) if is_whole else None


def list_costs(settings: Sequence[Setting]) -> dict[str, list[float | None]]:
    """Returns the costs of the settings: MACs, step time and, of a GPU, memory; None where one is not measured yet."""
    results = [setting.results() for setting in settings]
    costs: dict[str, list[float | None]] = {"MACs (G)": [setting.costs.macs / 1e9 for setting in settings]}
    for title, key in ("step (s)", "step_seconds"), ("peak memory (MB)", "memory_mb"):
        costs[title] = [own.spread and own.spread.mean for own in measure(results, key)]
    if not any(costs["peak memory (MB)"]):
        del costs["peak memory (MB)"]
    return costs


def draw_pareto(caption: str, settings: Sequence[Setting]) -> Figure:
    """Draws mean top-1 against MACs, step time and (of a GPU) memory; names settings that no other beats in both.

    With several seeds, names have the probability of `front_probabilities`.
    """
    measured = measure([setting.results() for setting in settings], "top1")
    accuracy, costs = [own.spread for own in measured], list_costs(settings)
    figure = Figure(figsize=(5 * len(costs), 5), layout="constrained")
    figure.suptitle(f"{caption}\nnamed: no other is cheaper and better (of means)", parse_math=False)
    for axes, (label, values) in zip(figure.subplots(1, len(costs), sharey=True), costs.items(), strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.margins(x=0.15)
        sure = front_probabilities(values, [[*own.values.values()] for own in measured])
        names = [n + ("" if p is None else f" ({p:.0%})") for n, p in zip(short_names(settings), sure, strict=True)]
        found = [row for row in zip(values, accuracy, names, strict=True) if row[1] and row[0] is not None]
        best = non_dominated([(cost, top1.mean) for cost, top1, _ in found])
        front = sorted((cost, top1.mean, name) for cost, top1, name in itertools.compress(found, best))
        for is_best, (cost, top1, _) in zip(best, found, strict=True):
            color = BLUE if is_best else GREY
            axes.errorbar(cost, top1.mean, top1.std or 0, fmt="o", color=color, capsize=2, markersize=5)
        left, right = axes.get_xlim()
        for cost, mean, name in front:
            shift, side = ((4, 4), "left") if cost < (left + right) / 2 else ((-4, 4), "right")  # into the axes
            style = {"textcoords": "offset points", "ha": side, "fontsize": 7, "parse_math": False}
            axes.annotate(name, (cost, mean), shift, in_layout=False, **style)
        if front:
            axes.step(*list(zip(*front, strict=True))[:2], where="post", color=BLUE, linewidth=1, alpha=0.5)
    figure.axes[0].set_ylabel("top-1 (%)")
    return figure


def read_curve(directory: Path) -> list[tuple[int, float, float]]:
    """Returns epoch, hours and loss of every evaluation of a run.

    Hours are running time without pauses. They count training steps alone if records have no time.
    """
    evaluations, seconds, step = [], 0.0, 0
    for record in find_records(directory):
        if record["kind"] == "train":
            seconds += (record.get("step_seconds") or 0) * (record["step"] - step)
            step = record["step"]
        if record["kind"] == "eval" and record.get("loss") is not None:
            hours = record.get("elapsed_seconds", seconds) / 3600
            evaluations.append((record["epoch"], hours, record["loss"]))
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
