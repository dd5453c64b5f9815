"""Figures of a benchmark: time and memory against size."""

import math
import textwrap
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.results import SETTINGS
from engine.reporting.plots import PAGE, encode, in_style, line_style, new_figure
from engine.runtime.files import write_file
from engine.runtime.ownership import remove_owned

FIGURES = ("attention.png", "core.png", "model.png")
"""Files that `draw_figures` writes."""


class Scale(NamedTuple):
    """Labels of the axes of a figure, and its units of seconds and bytes."""

    x: str
    per: str
    time: tuple[str, float]
    memory: tuple[str, float]


TOKENS = Scale("tokens", "token", ("µs", 1e-6), ("KiB", 2**10))
"""Scale for layers: a level line means a cost linear in the number of tokens."""
IMAGES = Scale("side of the image (pixels)", "image", ("ms", 1e-3), ("MiB", 2**20))
"""Scale for models."""


def draw_figures(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Writes attention.png (layers), core.png and model.png into the directory `output`.

    Subjects that were measured at a single size get no figure; that of an earlier benchmark is removed.
    """
    for kind in ("attention", "core", "model"):
        same_kind = [row for row in rows if row["kind"] == kind]
        if len({row["size"] for row in same_kind if row["seconds"]}) > 1:
            write_file(output / f"{kind}.png", encode(draw(same_kind)))
        else:
            remove_owned(output, [f"{kind}.png"])


@in_style
def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draws time and peak memory against size on logarithmic axes: panels for every setting, a line for every name.

    Bars are quartiles. Noisy values have white markers. A note names subjects that did not fit into memory. Memory that
    was not measured is left out.
    """
    scale = IMAGES if rows[0]["kind"] == "model" else TOKENS
    setting_of = itemgetter(*SETTINGS[2:])
    settings, names = (list(dict.fromkeys(map(key, rows))) for key in (setting_of, itemgetter("name")))
    unit = "the number of tokens" if scale is TOKENS else "the size of the image"
    width = max(PAGE, 1 + 2.5 * len(settings))
    columns = max(1, int(width / (0.6 + 0.065 * max(map(len, names)))))  # of the legend
    quantities = [("time", scale.time)]
    if any(row["peak_bytes"] is not None for row in rows):
        quantities.append(("peak memory", scale.memory))
    height = 2.3 * len(quantities) + 0.17 * math.ceil(len(names) / columns)
    grow = "do time and memory" if quantities[1:] else "does time"
    figure = new_figure(f"How {grow} grow with {unit}?", height, width)
    panels = figure.subplots(len(quantities), len(settings), sharex=True, sharey="row", squeeze=False)
    for (of_time, *of_memory), setting in zip(panels.T, settings, strict=True):
        of_time.set_title(", ".join(setting))
        for number, name in enumerate(names):
            here = [row for row in rows if (row["name"], setting_of(row)) == (name, setting) and row["seconds"]]
            here.sort(key=extent)
            style = line_style(number) | {"label": name}
            draw_times(of_time, here, scale, style)
            for axes in of_memory:
                axes.plot(*points(here, "peak_bytes", scale, scale.memory[1]), **style)
    for axes, (label, unit) in zip(panels[:, 0], quantities, strict=True):
        axes.set_ylabel(f"{label} ({unit[0]} per {scale.per})")
    for axes in panels.flat:
        set_logarithmic(axes, label_sizes(rows))
    for axes in panels[-1]:
        axes.set_xlabel(scale.x)
    handles, labels = panels[-1, 0].get_legend_handles_labels()
    notes = "\n".join(textwrap.wrap(note(rows), int(15 * width)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=notes)
    return figure


def draw_times(axes: Axes, rows: Sequence[dict[str, Any]], scale: Scale, style: dict[str, Any]) -> None:
    """Draws a line with quartiles, and white markers at noisy values."""
    names = "seconds", "seconds_q1", "seconds_q3"
    (sizes, seconds), (_, low), (_, high) = (points(rows, name, scale, scale.time[1]) for name in names)
    axes.errorbar(sizes, seconds, yerr=np.abs(np.subtract((low, high), seconds)), **style)
    noisy = points([row for row in rows if row["seconds_noisy"]], "seconds", scale, scale.time[1])
    axes.plot(*noisy, **style | {"label": None, "linestyle": "none", "markerfacecolor": "white"}, zorder=3)


def points(rows: Sequence[dict[str, Any]], name: str, scale: Scale, unit: float) -> tuple[list[float], list[float]]:
    """Returns sizes, and the quantity `name` per token or image of the batch in the unit of the axis.

    Rows without the quantity are left out.
    """
    rows = [row for row in rows if row[name] is not None]
    counts = [row["batch"] * (extent(row) if scale is TOKENS else 1) for row in rows]
    return [extent(row) for row in rows], [row[name] / unit / n for row, n in zip(rows, counts, strict=True)]


def extent(row: dict[str, Any]) -> float:
    """Returns the tokens of a layer, or the side in pixels of a square with the area of a model's image."""
    sides = [int(side) for side in row["size"].split("x")]
    return math.prod(sides) ** (1 / len(sides)) if row["kind"] == "model" else math.prod(sides)


def label_sizes(rows: Sequence[dict[str, Any]]) -> dict[float, str]:
    """Returns place on the axis -> the sizes there, one below the other: 28x28 and 14x56 have as many tokens."""
    sizes: dict[float, dict[str, None]] = {}
    for row in rows:
        sizes.setdefault(extent(row), {})[row["size"]] = None
    return {place: "\n".join(found) for place, found in sizes.items()}


def set_logarithmic(axes: Axes, sizes: dict[float, str]) -> None:
    """Sets logarithmic axes with plain numbers, and ticks of x at the measured sizes."""
    axes.set_xscale("log")
    axes.set_xticks(list(sizes), sizes.values())
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid()


def note(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the meaning of the markers, and the subjects that did not fit into memory."""
    refused = [f"{row['name']} at {row['size']} ({row['mode']})" for row in rows if not row["seconds"]]
    meanings = ["bars: quartiles"]
    if any(row["seconds_noisy"] for row in rows):
        meanings.append("white: too noisy to quote")
    if refused:
        meanings.append("out of memory: " + ", ".join(dict.fromkeys(refused)))
    return "; ".join(meanings)
