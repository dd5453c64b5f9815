"""Figures of the error of mechanisms against softmax attention: by multiply-accumulates, memory, entropy and layer."""

from collections.abc import Sequence
from statistics import mean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.approximation import Row
from analysis.drop_in import CHUNK
from engine.reporting.plots import line_style

LARGEST = 10.0
"""Largest error that the figures resolve; zeros have an error of 1."""

Points = list[tuple[float, float, float | None]]
"""Place on the horizontal axis, mean and standard deviation of the error."""


AXES = {
    "macs": "multiply-accumulates (M) of the attention layers for an image\n"
    "(with projections; dashed: softmax attention)",
    "memory": f"peak memory of the first layer for {CHUNK} images (MiB)",
    "entropy": "entropy of softmax's weights (nats), at {temperatures}\nand a budget of {middle}",
    "layer": "layer, at a budget of {middle}",
}
"""Horizontal axis -> label."""


def points_on(against: str, rows: Sequence[Row], middle: int) -> Points:
    """Returns the points of a mechanism on one of `AXES`: of temperature 1, or of the `middle` budget, or of both.

    The middle budget is measured at every temperature. Rows without a budget count as of any.
    """
    at_middle = [row for row in rows if row.budget in (None, middle)]
    if against == "entropy":
        return [(mean(row.entropies), *row.spread()[:2]) for row in at_middle]
    if against == "layer":
        at_middle = [row for row in at_middle if row.temperature == 1]
        return [(layer + 1, *row.spread(layer)[:2]) for row in at_middle for layer in range(len(row.entropies))]
    at_one = [row for row in rows if row.temperature == 1]
    return sorted((row.macs / 1e6 if against == "macs" else row.peak / 2**20, *row.spread()[:2]) for row in at_one)


def draw(
    title: str, rows: Sequence[Row], against: str, modes: Sequence[str], budgets: Sequence[int], softmax_macs: int
) -> Figure:
    """Draws the error against one of `AXES`: a panel for each mode, a line for each mechanism."""
    names, middle = list(dict.fromkeys(row.name for row in rows if row.errors)), budgets[len(budgets) // 2]
    temperatures = ", ".join(f"{row:g}" for row in dict.fromkeys(row.temperature for row in rows))
    label = AXES[against].format(temperatures=f"temperatures {temperatures}", middle=middle)
    figure = Figure(figsize=(1.5 + 5.5 * len(modes), 5.5 + 0.07 * len(names)), layout="constrained")
    figure.suptitle(title, fontsize=9, wrap=True, parse_math=False)
    panels = figure.subplots(1, len(modes), sharex=True, sharey=True, squeeze=False)[0]
    shown = {}
    for axes, mode in zip(panels, modes, strict=True):
        for number, name in enumerate(names):
            here = [row for row in rows if row.name == name and row.errors and row.mode in (mode, "any")]
            if points := points_on(against, here, middle):
                x, means, deviations = zip(*points, strict=True)
                y = [min(value, LARGEST) for value in means]
                bars = [0 if value > LARGEST else d or 0 for value, d in zip(means, deviations, strict=True)]
                below = [min(bar, value) for bar, value in zip(bars, y, strict=True)]
                shown[name] = axes.errorbar(x, y, [below, bars], capsize=2, markersize=5, **line_style(number))
        axes.set_yscale("symlog", linthresh=1e-3)  # an error may be zero
        axes.set_ylim(-2e-4, 1.5 * LARGEST)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(f"{mode} mode", fontsize=10)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if against == "macs":
            axes.axvline(softmax_macs / 1e6, color="black", linewidth=0.8, linestyle="--")
    if against in ("macs", "memory"):
        panels[0].set_xscale("log", base=2)
        panels[0].xaxis.set_major_formatter("{x:g}")
    if against == "layer":
        panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    note = f"(those above {LARGEST:g} at {LARGEST:g}; dotted: of zeros)"
    panels[0].set_ylabel(f"normalised mean squared error of attended values\n{note}")
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=min(6, 3 * len(modes)))
    return figure
