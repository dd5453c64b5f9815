"""The benchmark's figures show the numbers of its rows, in the units of their axes."""

import itertools
from typing import Any

from matplotlib.axes import Axes

from bench.figures import FIGURES, draw, draw_figures
from bench.results import COLUMNS
from engine.reporting.plots import COLORS, LINES, encode, line_style
from engine.runtime.ownership import make_output


def row(name: str, size: str, seconds: float | None, mode: str = "forward", kind: str = "attention") -> dict[str, Any]:
    """A row of results.csv for a batch of two with a peak of 1 MiB."""
    setting = {"mode": mode, "dtype": "fp32", "execution": "eager", "batch": 2}
    found = dict.fromkeys(COLUMNS) | {"kind": kind, "name": name, "size": size} | setting
    if seconds is None:
        return found
    quartiles = {"seconds": seconds, "seconds_q1": 0.9 * seconds, "seconds_q3": 1.2 * seconds, "seconds_noisy": False}
    return found | quartiles | {"peak_bytes": 2**20}


def lines(axes: Axes) -> dict[str, list[list[float]]]:
    """Name in the legend -> the points of its line."""
    handles, labels = axes.get_legend_handles_labels()
    data = [getattr(handle, "lines", [handle])[0] for handle in handles]
    return {label: line.get_xydata().round(6).tolist() for label, line in zip(labels, data, strict=True)}


def test_layers_are_drawn_per_token_and_models_per_image():
    figure = draw([row("eva", "16", 1e-3), row("eva", "4x16", 8e-3), row("lara", "16", 2e-3)])
    time, memory = figure.axes
    assert lines(time) == {"eva": [[16, 31.25], [64, 62.5]], "lara": [[16, 62.5]]}  # microseconds
    assert lines(memory) == {"eva": [[16, 32], [64, 8]], "lara": [[16, 32]]}  # KiB
    (bars,) = time.containers[0].lines[2]
    assert bars.get_segments()[1].round(6).tolist() == [[64, 0.9 * 62.5], [64, 1.2 * 62.5]]
    assert (time.get_ylabel(), memory.get_ylabel()) == ("time (µs per token)", "peak memory (KiB per token)")
    assert {axes.get_xscale() + axes.get_yscale() for axes in figure.axes} == {"loglog"}

    time, memory = draw([row("a", size, 1e-3, kind="model") for size in ("224", "112x448")] * 2).axes
    assert lines(time)["a"] == lines(memory)["a"] == [[224, 0.5]] * 4
    assert (time.get_ylabel(), memory.get_ylabel()) == ("time (ms per image)", "peak memory (MiB per image)")


def test_lines_go_from_left_to_right_and_sizes_of_one_place_are_all_named():
    """In the order of the command line, they would go back and forth."""
    time, memory = draw([row("eva", size, 1e-3) for size in ("28x28", "196", "14x56", "3136")]).axes
    for axes in (time, memory):
        assert [x for x, _ in lines(axes)["eva"]] == [196, 784, 784, 3136]
    labels = {label.get_position()[0]: label.get_text() for label in memory.get_xticklabels()}
    assert labels == {196: "196", 784: "28x28\n14x56", 3136: "3136"}


def test_what_was_not_measured_is_left_out():
    """Memory of exported models, which torch does not allocate."""
    rows = [row("deit", size, 1e-3, kind="model") for size in ("32", "64")]
    exported = [each | {"execution": "onnx", "peak_bytes": None} for each in rows]
    figure = draw([*rows, *exported])
    assert [len(lines(axes)["deit"]) for axes in figure.axes] == [2, 2, 2, 0]
    only_times = draw(exported)
    assert [len(lines(axes)["deit"]) for axes in only_times.axes] == [2]
    assert only_times.axes[0].get_xlabel()
    assert all(encode(each) for each in (figure, only_times))


def test_a_figure_that_a_benchmark_has_no_longer_is_removed(tmp_path):
    layers = [row("eva", size, 1e-3) for size in ("16", "64")]
    make_output(tmp_path, FIGURES)
    draw_figures(layers, tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["attention.png"]
    draw_figures([each | {"kind": "core"} for each in layers], tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["core.png"]


def test_every_setting_has_panels_and_every_name_its_style_in_all_of_them():
    names = [f"m{number}" for number in range(13)]
    cases = itertools.product(("forward", "train"), names, ("16", "64"))
    rows = [row(name, size, None if name == "m3" else 1.0, mode) for mode, name, size in cases]
    figure = draw(rows)
    assert [axes.get_title() for axes in figure.axes] == ["forward, fp32, eager", "train, fp32, eager", "", ""]
    assert all(len(drawn) == 2 * (name != "m3") for axes in figure.axes for name, drawn in lines(axes).items())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    styles = [tuple(line_style(number).values()) for number in range(len(COLORS) * len(LINES))]
    assert len({style[1] for style in styles[:8]}) == len({style[0] for style in styles[:8]}) == 8  # legible in grey
    assert len(set(styles)) == len(styles)


def test_what_did_not_fit_and_what_is_noisy_is_said():
    rows = [row("softmax", "16", 1.0), row("softmax", "64", None), row("eva", "16", 1.0), row("eva", "64", 1.0)]
    figure = draw(rows)
    assert figure.legends[0].get_title().get_text() == "bars: quartiles; out of memory: softmax at 64 (forward)"
    assert list(lines(figure.axes[0])) == ["softmax", "eva"]
    rows[-1]["seconds_noisy"] = True
    figure = draw(rows)
    assert "white: too noisy to quote" in figure.legends[0].get_title().get_text()
    white = [line.get_xdata() for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert list(map(list, white)) == [[], [64]]
