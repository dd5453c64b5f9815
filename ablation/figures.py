"""Figures of a sweep: accuracy, its differences, and its cost."""

import itertools
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ablation.names import name_change, short_names
from ablation.runs import Setting, find_crowded, replicate_of, varied_options
from ablation.tables import MEASURED_COSTS, Measured, measure
from engine.reporting.plots import BLUE, GREY, ORANGE, PAGE, in_style, label_points, new_figure, write_cell
from engine.reporting.tables import Spread, plus_minus

LABELS = {"E": "|E| (tokens)", "C": "C (landmarks)", "S": "S (samples)"}
"""Symbol in the names of settings -> label of an axis."""


@in_style
def draw_results(caption: str, settings: Sequence[Setting]) -> Figure:
    """Draws top-1 of every setting and, for several runs each, the differences to the first setting with intervals."""
    measured = measure([setting.results() for setting in settings], "top1")
    panels = 1 + (len(settings[0].cases) > 1)
    replicate = replicate_of(settings)
    question = f"Which settings differ from the first by more than {replicate}s do?" if panels > 1 else "Which is best?"
    figure = new_figure(f"{caption}\n{question}", 1.3 + 0.2 * len(settings))
    axes, *more = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    draw_top1(axes, settings, measured)
    if more:
        draw_differences(*more, measured, replicate)
    axes.set_yticks(range(len(settings)), short_names(settings), parse_math=False)
    axes.set_ylim(len(settings) - 0.5, -0.5)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def draw_top1(axes: Axes, settings: Sequence[Setting], measured: Sequence[Measured]) -> None:
    """Draws means with standard deviations as bars, single runs as small points, and a paper's figures."""
    axes.set_xlabel("top-1 (%)")
    axes.grid(axis="x")
    means = {y: own.spread for y, own in enumerate(measured) if own.spread}
    papers = {y: setting.paper.top1 for y, setting in enumerate(settings) if setting.paper and setting.paper.top1}
    if means:
        x = [spread.mean for spread in means.values()]
        if len(settings[0].cases) > 1:
            runs = [(value, y + 0.25) for y, own in enumerate(measured) for value in own.values.values()]
            axes.scatter(*zip(*runs, strict=True), s=5, color=GREY, label=f"single {replicate_of(settings)}s")
            bars = [spread.std or 0 for spread in means.values()]
            axes.errorbar(x, list(means), xerr=bars, fmt="o", color=BLUE, label="top-1: mean ± standard deviation")
        else:
            axes.scatter(x, list(means), marker="o", color=BLUE, label="measured")
    if papers:
        axes.scatter(list(papers.values()), list(papers), marker="x", color=ORANGE, label="paper")


def draw_differences(axes: Axes, measured: Sequence[Measured], replicate: str) -> None:
    """Draws mean differences to the first setting with 95 % intervals; markers of noise are hollow, see `holm`."""
    axes.set_xlabel("difference to the first (points)")
    axes.grid(axis="x")
    axes.axvline(0, color="black", linewidth=0.8)
    kinds = (
        ("difference", {"fmt": "o", "color": BLUE}, lambda d: not d.is_noise),
        ("noise (Holm's correction)", {"fmt": "o", "color": GREY, "mfc": "white"}, lambda d: d.is_noise and d.n > 1),
        (f"one {replicate}", {"fmt": ".", "color": GREY}, lambda d: d.n == 1),
    )
    for label, style, belongs in kinds:
        points = {y: d for y, own in enumerate(measured) if (d := own.difference) and belongs(d)}
        bars = [d.half_width if d.n > 1 else 0 for d in points.values()]
        if points:
            axes.errorbar([d.mean for d in points.values()], list(points), xerr=bars, label=label, **style)


@in_style
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
    (down, row_ticks), (right, column_ticks) = (axis_of(option, values, settings) for option, values in found)
    title = f"{caption}\nHow does top-1 depend on both?" + " Mean ± standard deviation." * (len(settings[0].cases) > 1)
    figure = new_figure(title, 1.2 + 0.4 * len(rows), min(PAGE, 1.6 + 0.95 * len(columns)))
    axes = figure.add_subplot()
    axes.set_xlabel(right, parse_math=False)
    axes.set_ylabel(down, parse_math=False)
    image = axes.imshow(means, origin="lower", aspect="auto")
    axes.set_xticks(range(len(columns)), column_ticks)
    axes.set_yticks(range(len(rows)), row_ticks)
    for y, x in itertools.product(range(len(rows)), range(len(columns))):
        if texts[y][x]:
            write_cell(image, x, y, means[y][x], texts[y][x])
    figure.colorbar(image, label="top-1 (%)")
    return figure


def axis_of(option: str, values: Sequence[float], settings: Sequence[Setting]) -> tuple[str, list[str]]:
    """Returns label and ticks of an axis, by the sweep's labels, or else `LABELS`."""
    names = {float(setting.changes[option]): name_change(setting, option) for setting in settings}
    symbols, _, ticks = zip(*(names[value].partition("=") for value in values), strict=True)
    return settings[0].labels.get(symbols[0], LABELS.get(symbols[0], option)), list(ticks)


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


@in_style
def draw_pareto(caption: str, settings: Sequence[Setting]) -> Figure:
    """Draws mean top-1 against MACs, step time and (of a GPU) memory, with standard deviations of what is measured;
    names settings that no other beats in both.
    """
    results = [setting.results() for setting in settings]
    accuracy = [own.spread for own in measure(results, "top1")]
    macs = [setting.costs.macs for setting in settings]
    unit, scale = ("G", 1e9) if max(macs) > 1e9 else ("M", 1e6)
    costs = {f"multiply-accumulates of an image ({unit})": [Spread(value / scale, None, 1) for value in macs]}
    crowded = find_crowded(settings)
    alone = [setting.results(crowded) for setting in settings]
    measured = {label: [own.spread for own in measure(alone, key)] for key, label in MEASURED_COSTS.items()}
    costs |= {label: spreads for label, spreads in measured.items() if any(spreads)}
    question = "Which settings are beaten by no other in both top-1 and cost? (named)"
    figure = new_figure(f"{caption}\n{question}", 3.4, PAGE if len(costs) > 1 else 0.7 * PAGE)
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    panels[0].set_ylabel("top-1 (%)")
    for axes, (label, values) in zip(panels, costs.items(), strict=True):
        axes.set_xlabel(label)
        axes.grid()
        axes.margins(0.12)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        found = zip(values, accuracy, short_names(settings), strict=True)
        found = [row for row in found if row[0] and row[1]]
        best = non_dominated([(cost.mean, top1.mean) for cost, top1, _ in found])
        for is_best, (cost, top1, _) in zip(best, found, strict=True):
            color = BLUE if is_best else GREY
            axes.errorbar(cost.mean, top1.mean, top1.std or 0, cost.std or 0, fmt="o", color=color)
        front = sorted((cost.mean, top1.mean, name) for cost, top1, name in itertools.compress(found, best))
        corners = [(front[i + j][0], front[i][1]) for i in range(len(front)) for j in (0, 1) if i + j < len(front)]
        (step,) = axes.plot(*zip(*corners, strict=True), color=BLUE, linewidth=0.8, alpha=0.5) if front else (None,)
        bars = [(cost.mean, top1.mean + sign * (top1.std or 0)) for cost, top1, _ in found for sign in (-1, 0, 1)]
        label_points(axes, [point[:2] for point in front], [name for _, _, name in front], bars, [step])
    return figure


def non_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Returns for each (cost, top-1) whether no other point is at least as good in both and better in one."""
    return [
        not any(cost <= own_cost and top1 >= own_top1 and (cost, top1) != (own_cost, own_top1) for cost, top1 in points)
        for own_cost, own_top1 in points
    ]
