"""Style of figures: colours, markers and lines; and the content of their files."""

import io
import warnings

from matplotlib.figure import Figure

COLORS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c8c8c")
"""Palette of Okabe and Ito, which colour-blind people can tell apart, with grey in place of yellow."""

STYLES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))
"""Markers and lines of the first eight mechanisms, of the next eight, and so on."""


def marker_style(number: int) -> dict[str, str]:
    """Returns colour and marker of the mechanism with this number, as keywords of matplotlib."""
    return {"color": COLORS[number % len(COLORS)], "marker": STYLES[number // len(COLORS) % len(STYLES)][0]}


def line_style(number: int) -> dict[str, str]:
    """Returns colour, marker and line of the mechanism with this number."""
    return marker_style(number) | {"linestyle": STYLES[number // len(COLORS) % len(STYLES)][1]}


def encode(figure: Figure, suffix: str = ".png") -> bytes:
    """Returns the content of a figure's file."""
    content = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # the font may lack glyphs of class names
        figure.savefig(content, format=suffix[1:], dpi=100)
    return content.getvalue()
