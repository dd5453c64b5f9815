"""Figure of a trained model with other attention: top-1 of each stage, errors, and differences after training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from analysis.draws import Row
from engine.reporting.plots import COLORS, GREY, ORANGE, in_style, new_figure
from engine.reporting.tables import Spread

STAGES = {
    "replaced": ("replaced", {"marker": "s", "color": ORANGE, "mfc": "white"}),
    "aligned": ("aligned, without labels", {"marker": "D", "color": COLORS[3]}),
    "tuned": ("fine-tuned with labels", {"marker": "o", "color": COLORS[0]}),
}


@in_style
def draw(title: str, rows: Sequence[Row], own: float, differences: Mapping[Row, Spread | None]) -> Figure:
    """Draws top-1 and error of every mechanism in every stage, best first, with standard deviations over draws.

    Args:
        rows: rows without draws are left out. own: top-1 of the trained model in percent.
        differences: row -> its tuned top-1 less the tuned top-1 of the trained model's own attention, in points.
    """
    stages = [stage for stage in STAGES if any(row.spread(stage, "top1") for row in rows)]
    rows = [row for row in rows if row.draws]
    rows.sort(key=lambda row: -next(x.mean for stage in reversed(stages) if (x := row.spread(stage, "top1"))))
    question = "How much of a trained model's accuracy is left with another attention?"
    figure = new_figure(f"{question}\n{title}", 1.7 + 0.16 * len(rows))
    accuracy, error, *rest = figure.subplots(1, 3 if differences else 2, sharey=True)
    is_aligned = "aligned" in stages
    _draw_stages(accuracy, rows, stages, "top1")
    _draw_stages(error, rows, [stage for stage in stages if stage != "tuned"], "outputs" if is_aligned else "attended")
    accuracy.set_xlabel("top-1 (%)")
    accuracy.axvline(own, color="black", linestyle="--", label=f"its own attention: {own:.2f} %")
    error.set_xlabel(f"normalised mean squared error\nof {'outputs of attention' if is_aligned else 'attended values'}")
    error.set_xscale("symlog", linthresh=0.01)  # softmax has an error of zero
    values = (value for line in error.lines for value in line.get_xdata() if math.isfinite(value))
    error.set_xlim(-0.001, 2 * max([0.01, *values]))
    for axes in rest:
        found = [(i, x) for i, row in enumerate(rows) if (x := differences.get(row)) is not None]
        for i, x in found:
            axes.errorbar(x.mean, i, xerr=x.std or 0, mfc="white" if x.is_noise else COLORS[0], **STAGES["tuned"][1])
        axes.axvline(0, color="black", linestyle="--")
        axes.set_xlabel("difference to its own attention,\nfine-tuned likewise (points);\nhollow: noise")
    for axes in (accuracy, error, *rest):
        axes.grid()
    accuracy.set_yticks(range(len(rows)), [row.name for row in rows], parse_math=False)
    accuracy.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _draw_stages(axes: Any, rows: Sequence[Row], stages: Sequence[str], name: str) -> None:
    """Draws a measurement of every stage, joined by a line for each row."""
    for i, row in enumerate(rows):
        means = [x.mean for stage in stages if (x := row.spread(stage, name))]
        axes.plot(means, [i] * len(means), color=GREY, linewidth=0.8, zorder=1)
    for stage in stages:
        label, style = STAGES[stage]
        y, means, deviations = zip(
            *((i, x.mean, x.std or 0) for i, row in enumerate(rows) if (x := row.spread(stage, name))), strict=True
        )
        axes.errorbar(means, y, xerr=deviations, label=label, linestyle="none", **style)
