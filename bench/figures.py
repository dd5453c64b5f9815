"""Figures of a benchmark: time and memory against size."""

import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.results import SETTINGS
from engine.reporting.plots import PAGE, encode, in_style, line_style, new_figure
from engine.runtime.files import write_file
from engine.runtime.ownership import remove_owned

KINDS = {"attention": "tokens", "model": "pixels"}
"""Kind of subjects -> unit of their sizes."""

FIGURES = tuple(f"{kind}.png" for kind in KINDS)
"""Files that `draw_figures` writes."""

QUANTITIES = {"seconds": ("ms", 1e-3), "peak_bytes": ("MiB at the peak", 2**20)}
"""Column -> its label, and unit."""


def draw_figures(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Writes attention.png (layers) and model.png into the directory `output`.

    Subjects that were measured at a single size get no figure; that of an earlier benchmark is removed.
    """
    for kind, file in zip(KINDS, FIGURES, strict=True):
        measured = [row for row in rows if row["kind"] == kind and row["seconds"]]
        if len({row["size"] for row in measured}) > 1:
            write_file(output / file, encode(draw(measured)))
        else:
            remove_owned(output, [file])


@in_style
def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draws time and peak memory of an image against size: panels for every setting, a line for every name."""
    setting_of = itemgetter(*SETTINGS[2:])
    settings, names = (list(dict.fromkeys(map(key, rows))) for key in (setting_of, itemgetter("name")))
    sizes = {extent(row["size"], row["kind"]): row["size"] for row in rows}
    figure = new_figure("Time and memory of an image", 4.6 + 0.1 * len(names), max(PAGE, 1 + 2.5 * len(settings)))
    panels = figure.subplots(2, len(settings), sharex=True, sharey="row", squeeze=False)
    for column, setting in zip(panels.T, settings, strict=True):
        column[0].set_title(", ".join(setting))
        column[1].set_xlabel(KINDS[rows[0]["kind"]])
        for axes, (quantity, (_, unit)) in zip(column, QUANTITIES.items(), strict=True):
            for number, name in enumerate(names):
                here = [row for row in rows if (row["name"], setting_of(row)) == (name, setting)]
                points = sorted((extent(row["size"], row["kind"]), row[quantity] / unit / row["batch"]) for row in here)
                axes.plot(*zip(*points, strict=True), label=name, **line_style(number))
            axes.set(xscale="log", yscale="log")
            axes.set_xticks([*sizes], [*sizes.values()])
            axes.minorticks_off()
            axes.grid()
    for axes, (label, _) in zip(panels[:, 0], QUANTITIES.values(), strict=True):
        axes.set_ylabel(label)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def extent(size: str, kind: str) -> int:
    """Returns the tokens of a layer, ``"784"`` or ``"14x56"``, or the pixels of a model's image, ``"224"``."""
    sides = [int(side) for side in size.split("x")]
    return math.prod(sides) ** (2 if kind == "model" and len(sides) == 1 else 1)
