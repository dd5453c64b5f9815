"""The benchmark's figures show the numbers of its rows, in the units of their axes."""

import itertools
from typing import Any

from bench.figures import FIGURES, draw, draw_figures
from bench.results import COLUMNS
from engine.reporting.plots import COLORS, LINES, line_style
from engine.runtime.ownership import make_output


def row(name: str, size: str, seconds: float | None, mode: str = "forward", kind: str = "attention") -> dict[str, Any]:
    """A row of results.csv for a batch of two with a peak of 1 MiB."""
    setting = {"mode": mode, "dtype": "fp32", "execution": "eager", "batch": 2}
    found = dict.fromkeys(COLUMNS) | {"kind": kind, "name": name, "size": size} | setting
    return found | ({"seconds": seconds, "peak_bytes": 2**20} if seconds else {})


def test_points_ascend_and_every_setting_has_panels_of_time_and_memory():
    names, sizes = [f"m{number}" for number in range(13)], ("28x28", "196", "14x28")
    figure = draw([row(*each[1:], 0.01, each[0]) for each in itertools.product(("forward", "train"), names, sizes)])
    assert [axes.get_title() for axes in figure.axes] == ["forward, fp32, eager", "train, fp32, eager", "", ""]
    for axes, y in zip(figure.axes, (5, 5, 0.5, 0.5), strict=True):  # milliseconds and MiB of an image
        assert [line.get_label() for line in axes.lines] == names
        assert axes.lines[0].get_xydata().round(6).tolist() == [[196, y], [392, y], [784, y]]
        assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert draw([row("a", "224", 1.0, kind="model")]).axes[0].lines[0].get_xdata().tolist() == [224**2]
    styles = [tuple(line_style(number).values()) for number in range(len(COLORS) * len(LINES))]
    assert len({style[1] for style in styles[:8]}) == len({style[0] for style in styles[:8]}) == 8  # legible in grey
    assert len(set(styles)) == len(styles)


def test_a_figure_that_a_benchmark_has_no_longer_is_removed(tmp_path):
    layers = [row("eva", "16", 1.0), row("eva", "64", 1.0), row("eva", "256", None)]
    make_output(tmp_path, FIGURES)
    draw_figures(layers, tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["attention.png"]
    draw_figures([each | {"kind": "model"} for each in layers], tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["model.png"]
