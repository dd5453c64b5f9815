"""The figure of a trained model with other attention, from rows and from the CSV file of their draws."""

import math
from pathlib import Path

import pytest

from analysis.draws import Row, to_lines
from analysis.laboratory import Draw, Stage, Tuned
from analysis.stage_figures import draw, draw_again, main
from engine.reporting.tables import Spread
from engine.runtime.errors import UserError
from engine.runtime.files import dicts_to_csv


def points(axes) -> dict[str, list[list[float]]]:
    """Returns the points of the errorbars of a panel by their label."""
    found: dict[str, list[list[float]]] = {}
    for container in axes.containers:
        found.setdefault(container.get_label(), []).extend(container.lines[0].get_xydata().tolist())
    return found


def test_figure_of_replacement_shows_the_rows():
    eva = [Draw(Stage(top1, 0.0, error, 0.0), untrained=3) for top1, error in ((69.0, 0.375), (71.0, 0.625))]
    rows = [
        Row("eva", "", draws=tuple(eva)),
        Row("local", "", draws=(Draw(Stage(80.0, 0.0, 0.25, 0.0)),)),
        Row("lara", "", problem="no"),
    ]
    accuracy, error = draw("", rows, 90.0, {}).axes
    assert [label.get_text() for label in accuracy.get_yticklabels()] == ["local", "eva"]
    for axes, expected in ((accuracy, [[80, 0], [70, 1]]), (error, [[0.25, 0], [0.5, 1]])):
        assert [container.lines[0].get_xydata()[0].tolist() for container in axes.containers] == expected
    std = 0.25 / 2**0.5
    ends = error.containers[1].lines[2][0].get_segments()[0][:, 0].tolist()
    assert ends == pytest.approx([0.5 - std, 0.5 + std])
    assert accuracy.get_legend_handles_labels()[1][-1] == "replaced, with untrained parameters"


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


def write_draws(path: Path, rows: list[Row]) -> Path:
    lines = [line for row in rows for line in to_lines(row)]
    path.write_bytes(dicts_to_csv(lines))
    return path


def make_draw(error: float, aligned: float, tuned: float | None) -> Draw:
    stage = Stage(aligned, 0.5, error, error / 2)
    return Draw(Stage(60.0, 0.5, error, error), stage, 1.0, tuned=None if tuned is None else Tuned(tuned, 1.0))


def test_figure_is_drawn_again_from_the_file_of_draws(tmp_path):
    """Means over draws, and differences that are paired by seed; a mechanism that was not fine-tuned has none."""
    rows = [
        Row("softmax", "", draws=tuple(make_draw(0.0, 90.0, tuned) for tuned in (90.0, 92.0))),
        Row("eva", "window_size=7, layout=2d", draws=(make_draw(0.2, 80.0, 88.0), make_draw(0.4, 82.0, 91.0))),
        Row("mean", "", draws=(make_draw(1.0, 50.0, None),)),
    ]
    path = write_draws(tmp_path / "draws.csv", rows)
    figure = draw_again(path, 100)
    accuracy, error, difference = figure.axes
    assert [label.get_text() for label in accuracy.get_yticklabels()] == ["softmax", "eva", "mean"]
    assert points(accuracy)["aligned, without labels"] == [[90, 0], [81, 1], [50, 2]]
    assert points(accuracy)["fine-tuned with labels"] == [[91, 0], [89.5, 1]]
    assert points(error)["replaced"] == [[0, 0], [pytest.approx(0.3), 1], [1, 2]]
    assert [*points(difference).values()] == [[[-1.5, 1]]]
    assert "over draws: 2 (some mechanisms: fewer)" in " ".join(figure.get_suptitle().split())
    main([str(path), str(tmp_path / "x.png"), "--images", "100"])
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seed", "sed"), "no column 'seed'; expected those of replace_draws.csv"),
        ((",0,60.0,", ",1,60.0,"), r"softmax has the seeds \[1\]; expected one line for each seed, from 0 on"),
        (
            (",0.0,0.0,", ",0.1,0.1,"),
            "no mechanism has an output_error of 0 in all draws; add the model's own attention",
        ),
        ((",60.0,", ",,"), "no top1 in the line of softmax, seed 0"),
        ((",60.0,", ",x,"), "could not convert string to float: 'x'"),
    ],
)
def test_a_file_that_is_not_of_draws_is_refused(change, message, tmp_path):
    path = write_draws(tmp_path / "draws.csv", [Row("softmax", "", draws=(make_draw(0.0, 90.0, 90.0),))])
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(UserError, match=rf"draws\.csv: {message}"):
        draw_again(path, 100)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_that_is_not_finite_is_drawn_nowhere(bad: float):
    rows = [Row(name, "", draws=(Draw(Stage(80.0, 0.0, x, 0.0)),)) for name, x in (("bad", bad), ("good", 0.5))]
    _, error = draw("", rows, 90.0, {}).axes
    assert error.get_xlim() == (-0.001, 1.0)
