"""analyze.py search: what it measures on known landscapes, the front, and the files that it leaves."""

import itertools
import math
import operator
from pathlib import Path

import pytest
import yaml

import analyze
from analysis import assignments, laboratory, search
from analysis.assignments import Candidate, Point, choose, is_best, predict
from analysis.costs import Prices
from analysis.draws import Score
from analysis.hybrids import OWN
from engine.run.load import load_run
from engine.runtime.arguments import MOST
from engine.runtime.ownership import claim
from tests.analysis.models import load_model, read_rows, refusal

OWN_MACS = 100
RISES = {(0, "a"): 0.5, (0, "b"): 0.1, (1, "a"): 0.3, (1, "b"): 0.4, (2, "a"): 0.02, (2, "b"): 0.01}
OF_OWN = {(layer, OWN): 0 for layer in range(3)}
ADDED = {(0, "a"): -20, (0, "b"): -10, (1, "a"): -20, (1, "b"): -10, (2, "a"): -20, (2, "b"): 5}
PRICES = Prices(OWN_MACS, OF_OWN | ADDED, operator.add)
OWN3 = (OWN,) * 3


def macs_of(choices: tuple[str, ...]) -> int:
    return OWN_MACS + sum(ADDED.get(pair, 0) for pair in enumerate(choices))


def landscape(interaction: float = 0.0):
    """Losses that are sums over layers, and more where the last two layers are both replaced."""

    def evaluate(choices: tuple[str, ...]) -> tuple[Score, float]:
        loss = 1 + sum(RISES.get(pair, 0) for pair in enumerate(choices))
        loss += interaction * (OWN not in choices[1:])
        return Score(100 - loss, loss, 0), macs_of(choices)

    return evaluate


ALL = list(itertools.product((OWN, "a", "b"), repeat=3))


@pytest.mark.parametrize("budget", [40, 55, 60, 75, 80, 99, 100, 105])
def test_where_losses_add_up_the_first_measurement_is_the_best(budget):
    """After the seven with at most one replaced layer, one measurement for the budget."""
    evaluate = landscape()
    points = assignments.search(OWN3, PRICES, [budget], 8, evaluate)
    best = min((evaluate(choices)[0].loss, macs_of(choices)) for choices in ALL if macs_of(choices) <= budget)
    found = choose(points, budget)
    assert (found.score.loss, found.cost) == pytest.approx(best)
    for point in points:
        assert point.candidate.predicted == pytest.approx(point.score.loss)
        assert point.candidate.cost == point.cost == macs_of(point.candidate.choices)
    assert [point.number for point in points] == [*range(len(points))]


def test_where_layers_interact_more_measurements_find_the_best():
    evaluate, budget = landscape(interaction=0.5), 60
    best = min(evaluate(choices)[0].loss for choices in ALL if macs_of(choices) <= budget)
    losses = [choose(assignments.search(OWN3, PRICES, [budget], n, evaluate), budget).score.loss for n in (8, 10)]
    assert losses[0] > losses[1] == best


def test_budgets_take_turns_and_nothing_is_measured_twice():
    calls = []
    evaluate = landscape()
    points = assignments.search(OWN3, PRICES, [45, 65], 12, lambda choices: calls.append(choices) or evaluate(choices))
    assert len(calls) == len({*calls}) == len(points) == 12
    turns = [point.cost <= 45 for point in points[7:]]
    assert turns[:2] == [True, False]
    assert {point.candidate.choices for point in points} == {*calls}
    every = assignments.search(OWN3, PRICES, [200], 99, evaluate)
    assert {point.candidate.choices for point in every} == {*ALL}


def test_the_beam_keeps_the_best_of_every_cost(monkeypatch):
    """A beam that is narrower than the 27 assignments keeps the lowest prediction within each budget."""
    exact = predict(1.0, OF_OWN | RISES, PRICES)
    assert len(exact) == 27
    monkeypatch.setattr(assignments, "MOST_CANDIDATES", 5)
    monkeypatch.setattr(assignments, "WIDTH", 12)
    monkeypatch.setattr(assignments, "SLICES", 6)
    beam = predict(1.0, OF_OWN | RISES, PRICES)
    assert len(beam) <= 12
    for budget in (45, 60, 80, 100):
        losses = [min(x.predicted for x in found if x.cost <= budget) for found in (exact, beam)]
        assert losses[0] == pytest.approx(losses[1])


def test_the_front_has_no_point_that_another_beats():
    given = [(1.0, 5), (0.5, 7), (0.5, 7), (0.5, 8), (0.9, 6), (1.0, 4), (2.0, 9), (math.inf, 3)]
    points = [Point(i, Candidate((), 0.0, macs), Score(0.0, loss, 0), macs) for i, (loss, macs) in enumerate(given)]
    assert [point.number for point in points if is_best(point, points)] == [1, 4, 5]
    assert choose(points, 6).number == 4
    assert choose(points, 99).number == 1


def test_the_cheapest_is_measured_where_its_prediction_is_above_the_budget():
    def evaluate(choices: tuple[str, ...]) -> tuple[Score, float]:
        return landscape()(choices)[0], macs_of(choices) - 10 * (choices == ("a", "a", "a"))

    assert choose(assignments.search(OWN3, PRICES, [35], 12, evaluate), 35).cost == 30


def test_an_assignment_above_the_budget_as_measured_is_no_answer():
    """The prediction of the cost falls short where the last two layers are both replaced."""
    known, budget = landscape(), 65

    def evaluate(choices: tuple[str, ...]) -> tuple[Score, float]:
        return known(choices)[0], macs_of(choices) + 10 * (OWN not in choices[1:])

    found = choose(assignments.search(OWN3, PRICES, [budget], 12, evaluate), budget)
    best = min(evaluate(choices)[0].loss for choices in ALL if evaluate(choices)[1] <= budget)
    assert found.score.loss == best > min(known(choices)[0].loss for choices in ALL if macs_of(choices) <= budget)
    assert found.cost <= budget


LINEAR = "--attention", "linear", "--budget", "macs=1"


def arguments_of(checkpoint: Path, output: Path, *arguments: str, images: int = 20, steps: int = 2) -> list[str]:
    options = ["--images", str(images), "--align", str(steps), "--output", str(output)]
    return ["search", str(checkpoint), *options, *arguments]


def searched(checkpoint: Path, output: Path, *arguments: str, **sizes: int) -> list[dict[str, str]]:
    analyze.main(arguments_of(checkpoint, output, *arguments, **sizes))
    return read_rows(output / "search.csv")


@pytest.mark.complete
def test_files_of_the_front_are_runs_of_train(checkpoint, tmp_path, monkeypatch, capsys):
    """Each YAML has the attention by block, and weights that give the stated top-1."""
    claim(tmp_path / "front", ["77.yaml"])
    (tmp_path / "front/77.yaml").touch()
    eva = "{name: eva, window_size: 2, num_landmarks: 4}"
    options = "--attention", "linear", eva, "--budget", "macs=0.97", "macs=1"
    measured = searched(checkpoint, tmp_path, *options, images=60, steps=3)
    front = read_rows(tmp_path / "front.csv")
    assert len(measured) == 9
    assert {row["number"] for row in front} <= {row["number"] for row in measured}
    assert sorted(path.name for path in (tmp_path / "front").glob("*.yaml")) == [
        f"{number:02}.yaml" for number in range(len(front))
    ]
    own = next(row for row in measured if row["layer 0"] == row["layer 1"] == OWN)
    assert float(own["macs_share"]) == 1
    for row in front:
        path = tmp_path / f"{row['front']}.yaml"
        run = load_run(path, [])
        assert (run.schedule.epochs, run.schedule.warmup_epochs) == (1, 0)  # of quickstart's 12
        assert run.optim.lr == load_model(checkpoint).run.optim.lr / 4
        names = [row["layer 0"], row["layer 1"]]
        entries = run.attention if isinstance(run.attention, list) else [{**run.attention, "blocks": "0-1"}]
        expected = {name: {OWN: "softmax", eva: "eva"}.get(name, name) for name in names}
        assert {entry["name"] for entry in entries} == {*expected.values()}
        model = load_model(Path(run.init.weights))
        sample = search.read_sample(load_model(checkpoint), 60)
        assert laboratory.measure_own(model, sample).score.top1 == pytest.approx(float(row["top1"]), abs=1e-3)
        assert yaml.safe_load(path.read_text())["init"]["weights"] == str(path.with_suffix(".safetensors"))
    out = capsys.readouterr().out
    assert "9 assignments measured, aligned in 3 steps, seed 0; the front:" in out
    assert "--budget macs=0.97: " in out


def test_assignments_whose_loss_is_not_finite_are_said_and_not_on_the_front(checkpoint, tmp_path, monkeypatch, capsys):
    """All but the model's own."""

    def score(hybrids, choices):
        return Score(50.0, math.inf if "linear" in choices else 1.0, 0)

    monkeypatch.setattr(search.Hybrids, "score", score)
    searched(checkpoint, tmp_path, *LINEAR)
    assert "warning: the loss of 3 of 4 assignments is not finite; they are not" in capsys.readouterr().out
    assert [(row["layer 0"], row["layer 1"]) for row in read_rows(tmp_path / "front.csv")] == [(OWN, OWN)]


@pytest.mark.parametrize(
    ("error", "top1", "remark"),
    [
        (0.01, 49.0, "higher by 0.0020 ± 0.0100 (standard error): within noise"),
        (1e-5, 50.0, "higher by 0.0020 ± 0.0000 (standard error): beyond noise, though its top-1 is no lower"),
        (1e-5, 49.0, ""),
    ],
)
def test_cheaper_points_within_noise_and_slow_points_are_named(
    checkpoint, tmp_path, monkeypatch, capsys, error, top1, remark
):
    """The model's own attention has the lowest loss, and linear attention in any layer takes twice its time."""

    def score(hybrids, choices):
        number = choices.count("linear")
        return Score(top1, 1 + 0.001 * number, 0, error) if number else Score(50.0, 1.0, 0)

    monkeypatch.setattr(search.Hybrids, "score", score)
    monkeypatch.setattr(search.Time, "measure", lambda time, choices: 0.005 * (1 + ("linear" in choices)))
    searched(checkpoint, tmp_path, *LINEAR)
    front, out = read_rows(tmp_path / "front.csv"), capsys.readouterr().out
    assert [float(row["ms"]) for row in front] == [10, 10, 5][-len(front) :]
    assert ("is cheaper" in out) == bool(remark)
    assert remark in out
    assert "warning: slower than the model on this device: front/00, front/01\n" in out


def test_the_first_table_has_each_layer_alone(checkpoint, tmp_path, monkeypatch, capsys):
    """Softmax in the place of softmax changes nothing."""
    options = "--attention", "softmax", "linear", "--budget", "macs=1"
    rows = searched(checkpoint, tmp_path, *options, images=60, steps=3)
    measured = {(row["layer 0"], row["layer 1"]): row for row in rows}
    title, _, head, _, *rows = capsys.readouterr().out.splitlines()[:6]
    assert title == "One layer alone with another mechanism: rise of the loss (top-1 in %)"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows)]
    own, alone = measured[OWN, OWN], [measured["linear", OWN], measured[OWN, "linear"]]
    assert cells[:2] == [["attention", "layer 0", "layer 1"], ["softmax", *[f"+0.0000 ({float(own['top1']):.2f})"] * 2]]
    assert cells[2][0] == "linear"
    for cell, row in zip(cells[2][1:], alone, strict=True):
        rise, top1 = cell.split()
        assert float(rise) == pytest.approx(float(row["loss"]) - float(own["loss"]), abs=7e-5)
        assert top1 == f"({float(row['top1']):.2f})"
    assert cells[2][1] != cells[2][2]


def test_a_budget_within_which_nothing_was_measured_is_named(checkpoint, tmp_path, monkeypatch, capsys):
    """As where times are longer than predicted. Other files in front/ stay."""
    (tmp_path / "front").mkdir()
    (tmp_path / "front/2026.txt").touch()
    monkeypatch.setattr(search, "check_reachable", lambda *given: None)
    searched(checkpoint, tmp_path, *LINEAR, "macs=0.1")
    assert "--budget macs=0.1: nothing within it was measured; raise --evaluations" in capsys.readouterr().out
    assert (tmp_path / "front/2026.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--budget macs=x", "'macs=x': 'x' is not a number above 0; macs is multiply-accumulates, as a share"),
        ("--budget macs=0.7 macs=7", "--budget: 'macs=7': more than the model's own attention takes; macs is a share"),
        ("--budget macs=0", "--budget: 'macs=0': '0' is not a number above 0"),
        ("--budget ms=inf", "--budget: 'ms=inf': 'inf' is not a number above 0; ms is milliseconds"),
        ("--budget mac=0.9", "--budget: 'mac=0.9': unknown budget; did you mean 'macs'?"),
        (f"--budget ms=9 --batch-size {MOST}", f"out of memory; lower --batch-size {MOST}"),
        ("--budget speed", "--budget: 'speed': unknown budget; known: macs, memory, ms"),
        ("--budget macs=1 ms=5", "--budget macs=1 ms=5: macs and ms are of several kinds; run the command once"),
        ("--budget ms=0.0001", "--budget ms=0.0001: the cheapest assignment of these mechanisms takes ms="),
        ("--budget memory=1e-4", "--budget memory=1e-4: the cheapest assignment of these mechanisms takes memory="),
        ("--budget macs=0.1", "--budget macs=0.1: the cheapest assignment of these mechanisms takes macs=0.9"),
        ("--budget macs=1 --evaluations 2", "--evaluations 2: the layers alone with each mechanism"),
        ("", "the following arguments are required: --budget"),
    ],
)
def test_refusals(checkpoint, tmp_path, monkeypatch, capsys, arguments, expected):
    given = arguments_of(checkpoint, tmp_path, "--attention", "linear", *arguments.split())
    assert expected in refusal(capsys, *given)
    assert not (tmp_path / "front").exists()


@pytest.mark.parametrize("name", ["front", "aligned"])
def test_files_in_the_place_of_directories_are_refused_first(checkpoint, tmp_path, capsys, name):
    (tmp_path / name).touch()
    assert f"--output {tmp_path / name}" in refusal(capsys, *arguments_of(checkpoint, tmp_path, *LINEAR))
    assert not (tmp_path / laboratory.MEASUREMENTS_FILE).exists()


def diverge(*given: object) -> None:
    raise FloatingPointError("a gradient is not finite in step 2 of --align")


@pytest.mark.parametrize(
    ("module", "name", "value", "expected"),
    [
        (laboratory, "align_by_seed", diverge, "linear: a gradient is not finite in step 2 of --align; leave the m"),
        (
            laboratory.Laboratory,
            "score",
            lambda *given: Score(0.0, math.nan, 0),
            "no measured assignment has a finite loss",
        ),
    ],
    ids=["diverging", "without a finite loss"],
)
def test_a_search_without_a_result_ends_in_a_line(
    checkpoint, tmp_path, monkeypatch, capsys, module, name, value, expected
):
    monkeypatch.setattr(module, name, value)
    assert expected in refusal(capsys, *arguments_of(checkpoint, tmp_path, *LINEAR))


@pytest.mark.complete
def test_layers_that_depend_on_those_before_are_refused(checkpoint, tmp_path, monkeypatch, capsys):
    """Windows of the second of two layers are shifted, and those of the first and of a single one are not. The second
    of two Linformers may take the projection of the first.
    """
    shared = "{name: linformer, sharing: layers, num_landmarks: 4}"
    windows, still = "{name: shifted_window, window_size: 2}", "{name: shifted_window, window_size: 2, shift: false}"
    options = "--budget", "macs=1", "--attention"
    for dependent in windows, shared:
        error = refusal(capsys, *arguments_of(checkpoint, tmp_path, *options, dependent))
        assert "layer 1 depends on the other layers with it" in error
    assert len(searched(checkpoint, tmp_path, *options, still)) == 4


@pytest.mark.complete
def test_without_a_choice_impossible_mechanisms_are_left_out(checkpoint, tmp_path, monkeypatch, capsys):
    known = {"linear": {"name": "linear"}, "wide": {"name": "shifted_window", "window_size": 2}}
    monkeypatch.setattr(search, "read_mechanisms", lambda texts: known)
    assert len(searched(checkpoint, tmp_path, "--budget", "macs=1")) == 4
    assert "left out: --attention wide: layer 1" in capsys.readouterr().err


def test_the_files_of_the_front_have_the_data_of_the_search(checkpoint, tmp_path):
    searched(checkpoint, tmp_path, "data.train_split=val", "data.val_fraction=0.5", *LINEAR, images=60)
    runs = [load_run(path, []) for path in (tmp_path / "front").glob("*.yaml")]
    assert {(run.data.train_split, run.data.val_fraction) for run in runs} == {("val", 0.5)}


@pytest.mark.parametrize("question", ["replace", "search", "error", "oracle", "convert"])
def test_a_refused_question_leaves_nothing(question, tmp_path, capsys):
    more = ["--budget", "macs=0.5"] if question in ("search", "convert") else []
    assert "absent" in refusal(capsys, question, tmp_path / "absent", *more, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
