"""Pictures of what came out of a sweep, as far as its runs are finished."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ablation.replicates import Measured, measure
from ablation.sweep import Setting, has_replicates, short_names


def draw_results(caption: str, settings: Sequence[Setting]) -> Figure:
    """Top-1 of every setting; of several seeds also the differences to the first setting, with their intervals."""
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
    """Means with standard deviations as bars, single seeds as small points, and a paper's figures."""
    axes.set_xlabel("top-1 (%)")
    axes.grid(axis="x")
    means = {y: own.spread for y, own in enumerate(measured) if own.spread}
    papers = {y: setting.paper for y, setting in enumerate(settings) if setting.paper is not None}
    if means:
        x = [spread.mean for spread in means.values()]
        if has_replicates(settings):
            seeds = [(value, y + 0.2) for y, own in enumerate(measured) for value in own.values.values()]
            axes.scatter(*zip(*seeds, strict=True), s=8, color="grey", label="single seeds")
            bars = [spread.std if spread.n > 1 else 0 for spread in means.values()]
            axes.errorbar(x, list(means), xerr=bars, fmt="o", capsize=3, label="mean ± standard deviation")
        else:
            axes.scatter(x, list(means), marker="o", label="measured")
    if papers:
        axes.scatter(list(papers.values()), list(papers), marker="x", color="C1", label="paper")
    if means or papers:
        axes.legend(fontsize=8)


def draw_differences(axes: Axes, measured: Sequence[Measured]) -> None:
    """Mean differences to the first setting with their 95 % intervals: filled where 0 is outside."""
    axes.set_xlabel("difference of top-1 to the first row, same seeds (percentage points)")
    axes.grid(axis="x")
    axes.axvline(0, color="black", linewidth=1)
    differences = {y: own.difference for y, own in enumerate(measured) if own.difference}
    kinds = (
        ("95 % interval without 0", {"color": "C0"}, lambda d: not d.is_noise),
        ("noise: 95 % interval with 0", {"color": "grey", "mfc": "white"}, lambda d: d.is_noise and d.n > 1),
        ("one seed", {"color": "grey", "marker": "."}, lambda d: d.n == 1),
    )
    for label, style, belongs in kinds:
        points = {y: difference for y, difference in differences.items() if belongs(difference)}
        bars = [difference.half_width if difference.n > 1 else 0 for difference in points.values()]
        if points:
            x = [difference.mean for difference in points.values()]
            axes.errorbar(
                x, list(points), xerr=bars, capsize=3, linestyle="none", label=label, **{"marker": "o"} | style
            )
    if differences:
        axes.legend(fontsize=8)
