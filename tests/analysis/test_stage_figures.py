"""The figure of a trained model with other attention shows its rows."""

import math

import pytest

from analysis.draws import Draw, Row, Stage, Tuned
from analysis.stage_figures import draw
from engine.reporting.tables import Spread


def points(axes) -> dict[str, list[list[float]]]:
    """Returns the points of the errorbars of a panel by their label."""
    found: dict[str, list[list[float]]] = {}
    for container in axes.containers:
        found.setdefault(container.get_label(), []).extend(container.lines[0].get_xydata().tolist())
    return found


def test_figure_of_stages_shows_the_rows():
    """Errors are those of outputs if layers were aligned; the best of the last stage stands first."""
    better = Draw(Stage(20.0, 0.0, 9.0, 1.5), Stage(80.0, 0.0, 9.0, 0.5), 3.0, tuned=Tuned(89.0, 4.0))
    worse = Draw(Stage(60.0, 0.0, 9.0, 1.0), Stage(85.0, 0.0, 9.0, 0.25), 3.0, tuned=Tuned(88.0, 4.0))
    rows = [Row(name, "", draws=(draw,)) for name, draw in (("worse", worse), ("better", better))]
    differences = {rows[0]: Spread(-1.0, None, 1), rows[1]: None}
    accuracy, error, difference = draw("", rows, 90.0, differences).axes
    assert [label.get_text() for label in accuracy.get_yticklabels()] == ["better", "worse"]
    assert [x for _, x in sorted(points(accuracy).items())] == [
        [[80, 0], [85, 1]],
        [[89, 0], [88, 1]],
        [[20, 0], [60, 1]],
    ]
    assert [x for _, x in sorted(points(error).items())] == [[[0.5, 0], [0.25, 1]], [[1.5, 0], [1.0, 1]]]
    assert [*points(difference).values()] == [[[-1, 1]]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_that_is_not_finite_is_drawn_nowhere(bad: float):
    rows = [Row(name, "", draws=(Draw(Stage(80.0, 0.0, x, 0.0)),)) for name, x in (("bad", bad), ("good", 0.5))]
    _, error = draw("", rows, 90.0, {}).axes
    assert error.get_xlim() == (-0.001, 1.0)
