"""Figures of what a benchmark has measured: time and memory against size."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.results import SETTINGS
from engine.files import write_file
from engine.outputs import encode
from engine.palette import line_style


class Scale(NamedTuple):
    """What the axes of a figure count in: labels, and the units of seconds and bytes."""

    x: str
    per: str
    time: tuple[str, float]
    memory: tuple[str, float]


TOKENS = Scale("tokens", "token", ("µs", 1e-6), ("KiB", 2**10))
"""Of layers: a line that is level is linear in the number of tokens."""
IMAGES = Scale("side of the image (pixels)", "image", ("ms", 1e-3), ("MiB", 2**20))
"""Of models."""


def draw_figures(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Writes attention.png, of layers, core.png and model.png into the directory `output`.

    What was measured at one size makes no figure.
    """
    for kind, same_kind in itertools.groupby(rows, key=itemgetter("kind")):
        same_kind = list(same_kind)
        if len({row["size"] for row in same_kind if row["seconds"]}) > 1:
            write_file(output / f"{kind}.png", encode(draw(same_kind)))


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Time and peak memory against size, on logarithmic axes: panels for every setting, and a line for every name.

    Bars are quartiles. What is too noisy has white markers, and what did not fit into memory is named below.
    """
    scale = IMAGES if rows[0]["kind"] == "model" else TOKENS
    setting_of = itemgetter(*SETTINGS[2:])
    settings, names = (list(dict.fromkeys(map(key, rows))) for key in (setting_of, itemgetter("name")))
    figure = Figure((2.6 + 3.7 * len(settings), 7.5), layout="constrained")
    panels = figure.subplots(2, len(settings), sharex=True, sharey="row", squeeze=False)
    for (of_time, of_memory), setting in zip(panels.T, settings, strict=True):
        of_time.set_title(", ".join(setting))
        for number, name in enumerate(names):
            here = [row for row in rows if (row["name"], setting_of(row)) == (name, setting) and row["seconds"]]
            style = line_style(number) | {"label": name, "markersize": 5}
            draw_times(of_time, here, scale, style)
            of_memory.plot(*points(here, "peak_bytes", scale, scale.memory[1]), **style)
    for axes, label, unit in zip(panels[:, 0], ("time", "peak memory"), (scale.time, scale.memory), strict=True):
        axes.set_ylabel(f"{label} ({unit[0]} per {scale.per})")
    sizes = {extent(row): row["size"] for row in rows}
    for axes in panels.flat:
        set_logarithmic(axes, sizes)
    figure.legend(*panels[1, 0].get_legend_handles_labels(), loc="outside right upper")
    figure.supxlabel("\n".join([scale.x, *textwrap.wrap(note(rows), 40 * (1 + len(settings)))]), fontsize="medium")
    return figure


def draw_times(axes: Axes, rows: Sequence[dict[str, Any]], scale: Scale, style: dict[str, Any]) -> None:
    """A line with quartiles, and white markers where it is too noisy."""
    (sizes, seconds), (_, low), (_, high) = (
        points(rows, name, scale, scale.time[1]) for name in ("seconds", "seconds_q1", "seconds_q3")
    )
    below = [y - end for y, end in zip(seconds, low, strict=True)]
    above = [end - y for y, end in zip(seconds, high, strict=True)]
    axes.errorbar(sizes, seconds, yerr=(below, above), capsize=2, **style)
    noisy = points([row for row in rows if row["seconds_noisy"]], "seconds", scale, scale.time[1])
    axes.plot(*noisy, **style | {"label": None, "linestyle": "none", "markerfacecolor": "white"}, zorder=3)


def points(rows: Sequence[dict[str, Any]], name: str, scale: Scale, unit: float) -> tuple[list[float], list[float]]:
    """Sizes, and the quantity `name` per token or image of the batch, in the unit of the axis."""
    counts = [row["batch"] * (extent(row) if scale is TOKENS else 1) for row in rows]
    return [extent(row) for row in rows], [row[name] / unit / n for row, n in zip(rows, counts, strict=True)]


def extent(row: dict[str, Any]) -> float:
    """Tokens of a layer; the side of a model's image in pixels, of a square of the same area."""
    sides = [int(side) for side in row["size"].split("x")]
    return math.prod(sides) ** (1 / len(sides)) if row["kind"] == "model" else math.prod(sides)


def set_logarithmic(axes: Axes, sizes: dict[float, str]) -> None:
    """Logarithmic axes with plain numbers, those of x where something was measured."""
    axes.set_xscale("log")
    axes.set_xticks(list(sizes), sizes.values())
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def note(rows: Sequence[dict[str, Any]]) -> str:
    """What the markers mean, and what did not fit into memory."""
    refused = [f"{row['name']} at {row['size']} ({row['mode']})" for row in rows if not row["seconds"]]
    meanings = ["bars: quartiles"]
    if any(row["seconds_noisy"] for row in rows):
        meanings.append("white: too noisy to quote")
    if refused:
        meanings.append("out of memory: " + ", ".join(dict.fromkeys(refused)))
    return "; ".join(meanings)
