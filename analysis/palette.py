"""Colours and markers of the figures."""

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c8c8c")
"""Okabe and Ito's, which colour-blind readers tell apart, with grey in the place of yellow."""

MARKERS = "osD^vX"


def style(index: int) -> dict[str, str]:
    """Colour and marker of the curve or group of points `index`; 24 follow before any comes again."""
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[(index + index // 24) % len(MARKERS)]}
