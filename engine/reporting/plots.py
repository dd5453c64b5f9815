"""Style of all figures: size of type, colours, markers and lines; labels beside what they name; content of files."""

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

PAGE = 7.0
"""Width of a page of two columns in inches, the width of most figures: they are printed at their own size."""

POINTS = 8
"""The one size of type, in points, for titles, labels, ticks and names."""

STYLE: dict[Any, Any] = {
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), POINTS),
    **dict.fromkeys(("legend.fontsize", "legend.title_fontsize", "figure.titlesize", "figure.labelsize"), POINTS),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "errorbar.capsize": 2,
    "image.cmap": "viridis",
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
}
"""Parameters of matplotlib."""

in_style = rc_context(STYLE)
"""Decorator of functions that draw: what they draw has the one `STYLE`."""

COLORS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c8c8c")
"""Palette of Okabe and Ito, which colour-blind people can tell apart, with grey in place of yellow."""

ORANGE, BLUE, GREY = COLORS[4], COLORS[5], COLORS[7]

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Markers of eight colours, so that figures can be read without colours."""

LINES = ("-", "--", ":", "-.")
"""Lines of the first eight subjects, of the next eight, and so on."""


def marker_style(number: int) -> dict[str, str]:
    """Returns colour and marker of the subject with this number, as keywords of matplotlib."""
    turn, color = divmod(number, len(COLORS))
    return {"color": COLORS[color], "marker": MARKERS[(color + turn) % len(MARKERS)]}


def line_style(number: int) -> dict[str, str]:
    """Returns colour, marker and line of the subject with this number."""
    return marker_style(number) | {"linestyle": LINES[number // len(COLORS) % len(LINES)]}


def new_figure(title: str, height: float, width: float = PAGE) -> Figure:
    """Returns an empty figure of a size in inches. Lines of the title are broken where they are too long."""
    figure = Figure((width, height), layout="constrained")
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, int(15 * width))]
    figure.suptitle("\n".join(lines), parse_math=False)
    return figure


def label_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    others: Sequence[tuple[float, float]] = (),
    lines: Sequence[Line2D] = (),
) -> None:
    """Writes names beside their points, off each other, off all points and `others`, and off `lines`.

    A line joins a name to its point where there is no room beside it. Call it when the limits of the axes are final.
    """
    if not points:
        return
    import textalloc  # only figures with names need it

    own, all_points = np.array(points), np.array([*points, *others])
    curves = [np.asarray(line.get_xydata()) for line in lines]
    avoided: dict[str, Any] = {"x_lines": [c[:, 0] for c in curves], "y_lines": [c[:, 1] for c in curves]}
    textalloc.allocate(
        axes,
        own[:, 0],
        own[:, 1],
        list(names),
        x_scatter=all_points[:, 0],
        y_scatter=all_points[:, 1],
        **(avoided if curves else {}),
        textsize=POINTS,
        linecolor=GREY,
        linewidth=0.6,
        max_distance=0.5,
        nbr_candidates=1000,
        avoid_label_lines_overlap=True,
        parse_math=False,
        in_layout=False,
    )


def name_lines(axes: Axes, lines: Mapping[str, Line2D]) -> None:
    """Names lines in a legend beside the axes, in the order of their right ends."""
    names = sorted(lines, key=lambda name: np.asarray(lines[name].get_ydata())[-1], reverse=True)
    place: Any = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
    axes.legend([lines[name] for name in names], names, labelspacing=0.25, frameon=False, **place)


def write_cell(image: AxesImage, x: float, y: float, value: float, text: str) -> None:
    """Writes into a cell of a heat map, in white or black, whichever is easier to read on the colour of `value`."""
    red, green, blue, _ = image.to_rgba(np.array(value))
    color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
    image.axes.text(x, y, text, ha="center", va="center", color=color)


@in_style
def encode(figure: Figure, form: Literal["png", "pdf"] = "png") -> bytes:
    """Returns the content of a figure's file. A PDF has its text as text, and no time."""
    content = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # the font may lack glyphs of class names
        figure.savefig(content, format=form, metadata={"CreationDate": None} if form == "pdf" else None)
    return content.getvalue()
