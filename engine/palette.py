"""Colours, markers and lines of figures."""

COLORS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c8c8c")
"""Okabe and Ito's, which colour-blind people tell apart, with grey in the place of yellow."""
STYLES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))
"""Markers and lines of the first eight of them, the next eight, ..."""


def marker_style(number: int) -> dict[str, str]:
    """Colour and marker of the mechanism with this number, as matplotlib's keywords."""
    return {"color": COLORS[number % len(COLORS)], "marker": STYLES[number // len(COLORS) % len(STYLES)][0]}


def line_style(number: int) -> dict[str, str]:
    """Colour, marker and line of the mechanism with this number."""
    return marker_style(number) | {"linestyle": STYLES[number // len(COLORS) % len(STYLES)][1]}
