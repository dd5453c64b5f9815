"""Figures have one style, and names in them do not overlap."""

import io
from itertools import combinations, pairwise

from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from engine.reporting.plots import PAGE, POINTS, encode, in_style, label_points, name_lines, new_figure


@in_style
def test_names_beside_points_do_not_overlap():
    figure = new_figure("", 3.0)
    axes = figure.add_subplot()
    points = [(1 + 0.001 * i, 1 + 0.001 * (i % 3)) for i in range(12)]
    axes.plot(*zip(*points, strict=True), "o")
    axes.set(xlim=(0, 2), ylim=(0, 2))
    label_points(axes, points, [f"E={i * i}, C={i}" for i in range(12)])
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 12
    assert not [pair for pair in combinations(boxes, 2) if Bbox.intersection(*pair)]
    assert all(axes.bbox.containsx(x) for box in boxes for x in (box.x0, box.x1))


@in_style
def test_names_beside_lines_are_in_the_order_of_the_ends():
    figure = new_figure("", 3.0)
    axes = figure.add_subplot()
    ends = [3.0, 1.0, 1.001, 1.002, 9.0]
    name_lines(axes, {str(end): axes.plot([0, 1], [5, end])[0] for end in ends})
    figure.draw_without_rendering()
    texts, frame = axes.get_legend().get_texts(), axes.bbox
    assert [text.get_text() for text in texts] == ["9.0", "3.0", "1.002", "1.001", "1.0"]
    boxes = [text.get_window_extent() for text in texts]
    assert all(above.y0 > below.y1 and above.x0 > frame.x1 for above, below in pairwise(boxes))


@in_style
def test_all_text_of_a_figure_has_one_size():
    figure = new_figure("A long title " * 20, 3.0)
    axes = figure.add_subplot(xlabel="x", ylabel="y", title="panel")
    axes.plot([1, 2], label="line")
    axes.legend(title="legend")
    figure.supxlabel("note")
    figure.draw_without_rendering()
    assert {text.get_size() for text in figure.findobj(Text)} == {POINTS}
    assert figure.get_suptitle().count("\n") >= 1
    assert Image.open(io.BytesIO(encode(figure))).width == 200 * PAGE
