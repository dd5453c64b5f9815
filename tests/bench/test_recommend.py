"""Recommendations: predicted costs recover a known cost model, budgets and quality rank, extrapolation is named.

No layer is timed: a cost model that the tests know stands for the device.
"""

import csv
import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import benchmark
from attention import ATTENTION, OptionError
from bench import quality, recommend
from bench.agreement import rank_correlation
from bench.calibration import SCALES, Calibration, Point, calibrated_shapes
from bench.candidates import Candidate, Shape, sizes_of
from bench.choices import BUDGETS, RECOMMENDATION_FILE, Request, choices, parse_budgets
from bench.cost_model import CostModel, features, fit_nonnegative
from bench.quality import MEASURED, MEASURES, STORED, Quality, default_measure, derive, find_quality, read_quality
from bench.recommend import Verification, first_choice, indistinct, rows_of
from engine.runtime.errors import UserError

ASKED = Shape((20, 28), 24, 2)
NAMES = ("softmax", "eva", "local", "neighborhood", "xca", "sra")
SECONDS, BYTES = np.zeros(8), np.zeros(8)
"""Cost model of a device: a weight for each of the features."""
SECONDS[:5], BYTES[:5] = (1e-4, 2e-10, 0, 3e-9, 5e-10), (5e3, 0, 0, 16, 4)


def families(*names: str) -> list[Candidate]:
    return [Candidate(name, {}) for name in names or NAMES]


def factor(candidate: Candidate) -> float:
    """Mechanisms of the device differ in speed."""
    return 1 + list(ATTENTION).index(candidate.name) % 7


def point(candidate: Candidate, shape: Shape) -> Point:
    row = np.array(features(candidate, shape))
    return Point(candidate, shape, factor(candidate) * float(row @ SECONDS), int(row @ BYTES))


def measure(candidates, shape) -> list[Point]:
    return [point(candidate, shape) for candidate in candidates]


@cache
def calibrate(*names: str, limit: float = 1e9) -> Calibration:
    return Calibration.run(families(*names), ASKED, measure, limit, itertools.count().__next__)


def request(budgets=None, stored=(), names=NAMES, shape=ASKED) -> Request:
    return Request(shape, families(*names), budgets or {}, "replaced_loss", stored, [])


def stored(mechanism: str, options: str, value: float, tokens: int = 196, std: float | None = 0.0) -> Quality:
    return Quality(mechanism, options, tokens, "replaced_loss", value, std, 3, "a file: a command")


STORED_HERE = [
    stored("softmax", "", 0.0),
    stored("eva", "window_size=7,num_landmarks=49", 5.0, tokens=560),
    stored("local", "window_size=7", 9.0),
    stored("xca", "", 30.0, std=None),
]


def test_nonnegative_least_squares():
    rows = np.array([[1.0, 2], [1, 5], [1, 9], [1, 40]])
    assert fit_nonnegative(rows, rows @ [3.0, 0.5]) == pytest.approx([3, 0.5])
    falling = fit_nonnegative(rows, [10.0, 9, 8, 1])  # the slope would be negative
    assert falling[1] == 0
    values = np.array([10.0, 9, 8, 1])
    assert falling[0] == pytest.approx((1 / values).sum() / np.square(1 / values).sum())  # of relative errors


def test_the_calibration_recovers_a_known_cost_model():
    predict = calibrate().predict
    for shape in (ASKED, Shape((9, 31), 24, 2), Shape((40, 35), 48, 4, batch=3)):
        for candidate in (size for family in families() for size in sizes_of(family, shape)):
            seconds, peak_bytes = predict(candidate, shape)
            truth = point(candidate, shape)
            assert seconds.value == pytest.approx(truth.seconds, rel=1e-3), candidate.entry
            assert peak_bytes.value == pytest.approx(truth.peak_bytes, rel=1e-2)
            assert seconds.low <= seconds.value <= seconds.high
            assert seconds.low <= 1.001 * truth.seconds
            assert truth.seconds <= 1.001 * seconds.high
            assert seconds.high < 1.1 * seconds.low * seconds.beyond


def test_the_interval_is_of_errors_of_points_that_the_fit_has_not_seen():
    rows = [[1.0, x] for x in (1, 2, 3, 4, 5, 6)]
    values = np.array([2.0, 3, 4, 5, 6, 14])  # 1 + x, but for the last
    seen = CostModel.of(rows[:5], values[:5])
    assert seen.error == pytest.approx(1)
    assert CostModel.of(rows, values).error > 1.3


def test_the_interval_widens_by_the_factor_of_extrapolation():
    """Launches hide what a quantity costs in the calibrated range; far outside of it, it may be all of the time."""
    model = CostModel.of([[1.0, x] for x in (10, 20, 40)], [3.0, 3, 3])
    for x, low, high in ((10, 3, 3), (40, 3, 3), (80, 3, 6), (3000, 3, 225), (2, 0.6, 3)):
        assert model.predict([1.0, x])[:3] == pytest.approx((3, low, high))
    assert [model.predict([1.0, x]).counted for x in (40, 3000, 2)] == pytest.approx([3, 225, 3])


def test_an_extrapolated_candidate_counts_with_the_upper_end_of_its_interval():
    asked = request(stored=STORED_HERE, names=["local"])
    ranked = choices(asked, ASKED, calibrate("local"))
    far = next(choice for choice in ranked if choice.seconds.beyond > 1)
    assert far.candidate.entry == "local:window_size=28"
    cheap = replace(far, seconds=far.seconds._replace(value=1e-9))  # as if launches hid its work
    others = [choice for choice in ranked if choice is not far]
    everything = sorted([cheap, *others], key=lambda choice: choice.order)
    rows = rows_of(everything, asked)
    assert [row["options"] for row in rows if row["rank"]] == [f"window_size={size}" for size in (7, 14, 28)]
    limit = 1e3 * float(np.sqrt(cheap.seconds.value * cheap.seconds.high))
    assert not rows_of([cheap], request({"ms": limit}, STORED_HERE))[0]["meets_budgets"]
    tight = request({"ms": limit}, STORED_HERE)
    assert "(ms " in recommend.sentence(rows_of([cheap], tight), tight)
    assert ", extrapolated by a factor of 2.67); raise" in recommend.sentence(rows_of([cheap], tight), tight)
    text = recommend.sentence(rows_of([cheap], asked), asked)
    assert "window_size=28, predicted 1e-06 ms, extrapolated by a factor of 2.67 to at most" in text
    assert "extrapolated" not in recommend.sentence(rows, asked)
    large = replace(far, peak_bytes=far.peak_bytes._replace(value=1.0))
    assert not rows_of([large], request({"memory": 1e-3}, STORED_HERE))[0]["meets_budgets"]
    points = [point(choice.candidate, ASKED) for choice in everything]
    assert "First choice: local:window_size=7" in first_choice(list(zip(everything, points, strict=True)), {})


def test_what_lies_outside_of_the_calibrated_range_is_said():
    model = CostModel.of([[1.0, x] for x in (10, 20, 40)], [11.0, 21, 41])
    assert [round(model.predict([1.0, x]).beyond, 3) for x in (10, 30, 40, 100, 2)] == [1, 1, 1, 2.5, 5]
    calibration = calibrate(limit=0)
    assert len(calibration.shapes) == 4
    assert {*calibration.shapes, *calibration.skipped} == {*calibrated_shapes(ASKED)}
    assert max(shape.num_tokens for shape in calibration.shapes) < ASKED.num_tokens
    (choice,) = choices(request(names=["softmax"]), ASKED, calibration)
    assert "time extrapolated: 1" in choice.remarks({})  # (560 / 140)^2 times the MACs of its weights
    (choice,) = choices(request(names=["softmax"]), ASKED, calibrate())
    assert "time" not in choice.remarks({})


@pytest.mark.parametrize("side", [10, 14, 16])
def test_shapes_that_accept_no_candidate_are_left_out(side):
    def measure_some(candidates, shape):
        assert candidates
        return measure(candidates, shape)

    asked = Shape((side, side), 48, 3)
    assert any(not sizes_of(Candidate("eva", {}), shape) for shape in calibrated_shapes(asked))
    found = Calibration.run(families("eva"), asked, measure_some, 1e9, itertools.count().__next__)
    assert found.predict(Candidate("eva", {}), asked)
    assert all(sizes_of(Candidate("eva", {}), shape) for shape in found.shapes + found.skipped)


@pytest.mark.parametrize(("grid", "names"), [((1, 1), ["softmax", "sra"]), ((7, 7), ["eva"])])
def test_refuses_what_no_time_could_calibrate(grid, names):
    with pytest.raises(OptionError, match=f"--tokens: {grid[0]}x{grid[1]}: .* accept {', '.join(names)}; give more"):
        Calibration.run(families(*names), Shape(grid, 48, 3), measure, 1, itertools.count().__next__)


def test_the_asked_grid_is_held_out():
    for asked in (ASKED, Shape((1, 1), 24, 2), Shape((64, 64), 384, 6), Shape((14, 14), 15, 5)):
        shapes = calibrated_shapes(asked)
        assert asked.grid not in [shape.grid for shape in shapes]
        assert all(shape.dim % shape.num_heads == 0 for shape in shapes)
        assert len(shapes) <= len(SCALES)
    assert {(shape.dim, shape.num_heads) for shape in calibrated_shapes(ASKED)} == {(24, 2), (12, 2), (24, 4), (12, 4)}


def test_sizes_are_those_that_a_layer_accepts():
    def entries(name: str, grid=(20, 28)) -> list[str]:
        return [each.options_text for each in sizes_of(Candidate(name, {}), Shape(grid, 24, 2))]

    assert entries("softmax") == [""]
    assert entries("eva") == [f"num_landmarks={size}" for size in (12, 24, 49, 98, 196)]
    assert entries("eva", (7, 9)) == [f"num_landmarks={size}" for size in (12, 24, 49)]
    assert entries("neighborhood") == [f"kernel_size={size}" for size in (3, 5, 7, 15)]
    assert all(sizes_of(Candidate(name, {}), ASKED) for name in ATTENTION)


def test_ranks_by_quality_then_by_time():
    rows = rows_of(choices(request(stored=STORED_HERE), ASKED, calibrate()), request(stored=STORED_HERE))
    ranked = [row for row in rows if row["rank"]]
    assert [row["rank"] for row in ranked] == list(range(1, len(ranked) + 1))
    best = list(dict.fromkeys(row["mechanism"] for row in ranked))
    assert best == ["softmax", "eva", "local", "xca"]
    eva = [row["options"] for row in ranked if row["mechanism"] == "eva"]
    assert eva == ["num_landmarks=49", "num_landmarks=98", "num_landmarks=196"]  # smaller ones have no known quality
    unranked = rows[len(ranked) :]
    assert {"neighborhood", "sra", "eva", "local"} == {row["mechanism"] for row in unranked}
    assert all("no stored quality" in row["remarks"] and row["quality"] is None for row in unranked)
    assert [row["seconds"] for row in unranked] == sorted(row["seconds"] for row in unranked)


def test_quality_of_other_sizes_and_tokens_is_called_extrapolated():
    def remarks(candidate: Candidate, shape: Shape = ASKED) -> str:
        return find_quality(candidate, shape, STORED_HERE).extrapolated

    assert remarks(Candidate("eva", {})) == ""
    wider = remarks(Candidate("eva", {"num_landmarks": 98}), Shape((30, 28), 24, 2))
    assert "measured with window_size=7,num_landmarks=49, asked num_landmarks=98" in wider
    assert "measured at 560 tokens, asked 840" in wider
    assert find_quality(Candidate("eva", {"num_landmarks": 24}), ASKED, STORED_HERE) is None
    assert find_quality(Candidate("eva", {"window_size": 4}), ASKED, STORED_HERE) is None
    both = [stored("local", "window_size=4", 20.0), *STORED_HERE]
    assert find_quality(Candidate("local", {"window_size": 5}), ASKED, both).quality.value == 20
    assert find_quality(Candidate("local", {"window_size": 14}), ASKED, both).quality.value == 9


@pytest.mark.parametrize("key", BUDGETS)
def test_budgets_hold(key):
    everything = choices(request(stored=STORED_HERE), ASKED, calibrate())
    cost = {"ms": lambda c: 1e3 * c.seconds.value, "memory": lambda c: c.peak_bytes.value / 2**20}.get(
        key, lambda c: c.macs_ratio
    )
    limit = float(np.median([cost(choice) for choice in everything]))
    rows = rows_of(everything, request({key: limit}, STORED_HERE))
    entries = {choice.candidate.entry for choice in everything if cost(choice) <= limit}
    assert 0 < len(entries) < len(rows) == len(everything)
    assert {row["entry"] for row in rows if row["meets_budgets"]} == entries
    assert not any(row["rank"] for row in rows if not row["meets_budgets"])


def test_the_nearest_candidate_if_none_meets_the_budgets():
    asked = request({"ms": 1e-3, "memory": 1e6}, STORED_HERE)
    everything = choices(asked, ASKED, calibrate())
    rows = rows_of(everything, asked)
    text = recommend.sentence(rows, asked)
    nearest = min(everything, key=lambda choice: choice.seconds.value)
    assert f"Nearest: {nearest.candidate.entry} (ms " in text
    assert "of 0.001, memory" in text


def test_what_two_standard_errors_do_not_tell_apart():
    rows = [
        {"rank": 1, "mechanism": "eva", "quality": 1.0, "quality_std": 0.3, "quality_n": 9},
        {"rank": 2, "mechanism": "eva", "quality": 1.0, "quality_std": 0.3, "quality_n": 9},
        {"rank": 3, "mechanism": "local", "quality": 1.2, "quality_std": None, "quality_n": 1},
        {"rank": 4, "mechanism": "xca", "quality": 1.21, "quality_std": 0.0, "quality_n": 9},
        {"rank": None, "mechanism": "sra", "quality": None, "quality_std": None, "quality_n": None},
    ]
    assert indistinct(rows) == ["local"]


def test_rank_correlation():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == 1
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(rank_correlation([1, 1], [1, 2]))


def test_verification():
    asked = request({"ms": 1e6}, STORED_HERE, names=["softmax", "local", "xca"])
    ranked = choices(asked, ASKED, calibrate("softmax", "local", "xca"))
    points = [point(choice.candidate, ASKED) for choice in ranked]
    found = Verification.of(ranked, points, ASKED, asked.budgets)
    assert found.seconds == (len(ranked), pytest.approx(1), pytest.approx(1, rel=1e-2))
    assert found.peak_bytes == (len(ranked), pytest.approx(1), pytest.approx(1, rel=1e-2))
    assert found.fastest == 1
    assert "First choice: softmax" in found.text
    assert "regret in quality 0, in time 0%" in found.text
    slow = min(ranked, key=lambda choice: choice.seconds.value).candidate.entry
    points = [p._replace(seconds=3 * p.seconds) if p.candidate.entry == slow else p for p in points]
    ranked = [replace(c, seconds=c.seconds._replace(low=c.seconds.value / 2, high=2 * c.seconds.value)) for c in ranked]
    found = Verification.of(ranked, points, ASKED, asked.budgets)
    fastest = min(p.seconds for p in points)
    assert found.fastest == pytest.approx(next(p.seconds for p in points if p.candidate.entry == slow) / fastest)
    assert 1 < found.fastest <= 3
    assert found.seconds.correlation < 1
    large = [p._replace(peak_bytes=3 * p.peak_bytes) for p in points]
    assert Verification.of(ranked, large, ASKED, asked.budgets).peak_bytes.error == pytest.approx(3, rel=1e-2)
    assert found.covered == pytest.approx(1 - 1 / len(ranked))


def test_regret_is_relative_to_candidates_that_truly_meet_the_budgets():
    names = ["softmax", "local", "xca"]
    ranked = choices(request(stored=STORED_HERE, names=names), ASKED, calibrate(*names))
    of_name = {choice.candidate.name: choice for choice in reversed(ranked) if choice.match}
    softmax, local, xca = ((of_name[name], point(of_name[name].candidate, ASKED)) for name in names)
    limit = 1e3 * local[1].seconds * 1.1
    budgets = {"ms": limit}
    assert softmax[0].excess(budgets) > 1 > local[0].excess(budgets)

    def measured(pair, milliseconds):
        return pair[0], pair[1]._replace(seconds=milliseconds / 1e3)

    text = first_choice([softmax, local, xca], budgets)
    assert "First choice: local" in text
    assert "regret in quality 0, in time 0%" in text
    text = first_choice([measured(softmax, limit / 2), measured(local, limit), xca], budgets)
    assert "1.00 of its tightest budget; regret in quality 9, in time 100%" in text
    text = first_choice([softmax, measured(local, 2 * limit), measured(xca, limit / 2)], budgets)
    assert "2.00 of its tightest budget; regret in quality -21, in time none to compare with" in text
    text = first_choice([measured(pair, 2 * limit) for pair in (softmax, local, xca)], budgets)
    assert text.endswith("measured 0.")


def test_the_stored_quality_is_derived_from_the_measurements():
    """After new measurements: python -m bench.quality."""
    assert read_quality() == derive()
    assert {each.measure for each in read_quality()} <= MEASURES.keys()
    for each in read_quality():
        assert each.candidate.is_valid(Shape((14, 14), 48, 3)), each
    with (MEASURED / "replace.csv").open() as file:
        clustered = next(row for row in csv.DictReader(file) if row["attention"] == "clustered")
    found = next(x for x in read_quality() if (x.mechanism, x.measure) == ("clustered", "replaced_loss"))
    assert (found.value, found.n) == (-float(clustered["change"]), int(clustered["draws"]))


def test_quality_after_alignment(tmp_path):
    titles = "attention,options,mode,seed,top1,error,output_error,aligned_top1,aligned_error,aligned_output_error"
    (tmp_path / "transfer.csv").write_text(
        f"{titles},aligned_seconds,tuned_top1,tuned_minutes\n"
        "softmax,,evaluation,0,90,0,0,,,,,91,1\n"
        "softmax,,evaluation,1,90,0,0,,,,,92,1\n"
        'eva,"window_size=7, num_landmarks=49",evaluation,0,60,0.5,0.4,88,0.2,0.1,30,90,1\n'
        'eva,"window_size=7, num_landmarks=49",evaluation,1,62,0.5,0.4,89,0.1,0.3,30,92,1\n'
        'eva,"window_size=7, num_landmarks=49",training,0,10,0.9,0.9,20,0.9,0.9,30,,\n'
        "xca,,evaluation,0,12,1,1,70,0.9,0.9,30,,\n"
    )
    found = {(each.mechanism, each.measure): each for each in derive(tmp_path)}
    eva = found["eva", "aligned_loss"]
    assert (eva.value, eva.std, eva.n, eva.options) == (1.5, round(0.5**0.5, 5), 2, "window_size=7,num_landmarks=49")
    assert "transfer.csv" in eva.source
    assert found["eva", "aligned_error"].value == pytest.approx(0.2)  # of outputs
    assert found["eva", "tuned_loss"].value == 0.5  # of the same seeds: 91 - 90, 92 - 92
    assert (found["xca", "aligned_loss"].value, found["xca", "aligned_loss"].std) == (20, None)
    assert ("xca", "tuned_loss") not in found
    assert found["softmax", "aligned_loss"].value == 0
    assert default_measure(list(found.values())) == "aligned_loss"


def test_a_broken_file_of_quality_is_named(tmp_path):
    text = STORED.read_text().splitlines()
    (tmp_path / "quality.csv").write_text("\n".join([*text[:2], text[2].replace(",196,", ",many,")]))
    with pytest.raises(UserError, match=r"quality.csv, line 3: .*python -m bench.quality"):
        read_quality(tmp_path / "quality.csv")
    with pytest.raises(UserError, match="cannot be read"):
        read_quality(tmp_path / "absent.csv")


ASK = ["--recommend", "--device", "cpu", "--threads", "1", "--dim", "24", "--num-heads", "2", "--tokens", "20x28"]


def ask(*arguments: str) -> None:
    benchmark.main([*ASK, "--attention", *NAMES, *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "mss=5"], "--budget: 'mss=5': unknown budget; did you mean 'ms'?; write ms=5"),
        (["--budget", "ms"], "--budget: 'ms': '' is not a number above 0; ms is milliseconds of a call"),
        (["--budget", "macs=-1"], "--budget: 'macs=-1': '-1' is not a number above 0"),
        (["--budget", "ms=5", "ms=6"], "--budget: 'ms=6': ms is given twice; give it once"),
        (["--attention", "eva:num_landmarks=16"], "--recommend chooses num_landmarks; leave it out"),
        (["--attention", "ewa"], "unknown mechanism 'ewa'; did you mean 'eva'?"),
        (["--num-heads", "5"], "num_heads = 5 does not divide dim = 24"),
        (["--verify", "10x14"], "--verify: 10x14 is calibrated, and would not be held out"),
        (["--measure", "tuned_loss"], "--measure: tuned_loss: no stored values"),
        (["--attention", "eva", "--verify", "2x3"], "--verify: 2x3: no size of eva fits; give a larger grid"),
        (["--image-sizes", "64"], "--image-sizes: not with --recommend; leave it out"),
        (["--on", "h100", "--rounds", "2"], "is not measured; leave out --rounds, --device, --threads"),
        (["--models", "deit_tiny_p16"], "--models: not with --recommend; leave it out"),
        (["--modes", "train", "inference"], "--modes: --recommend takes one value, got 2; give one"),
        (["--execution", "compiled"], "--recommend times eager layers; leave it out"),
    ],
)
def test_refusals_before_any_work(arguments, message, monkeypatch, capsys):
    def work(*_):
        raise AssertionError("work has started")

    monkeypatch.setattr(benchmark, "recommend", work)
    monkeypatch.setattr(quality, "read_quality", lambda: STORED_HERE)
    monkeypatch.setattr("bench.choices.read_quality", lambda: STORED_HERE)
    base = [x for x in ASK if not ("--num-heads" in arguments and x in ("--num-heads", "2"))]
    with pytest.raises(SystemExit):
        benchmark.main([*base, *arguments])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("option", [["--budget", "ms=5"], ["--verify"], ["--calibrate", "5"]])
def test_options_of_a_recommendation_alone(option, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--attention", "eva", *option])
    assert "give --recommend" in capsys.readouterr().err


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "stopwatch", lambda *_: measure)
    monkeypatch.setattr("bench.choices.read_quality", lambda: STORED_HERE)
    ask("--budget", "ms=100", "macs=0.99", "--verify", "20x28", "9x31", "--output", str(tmp_path))
    out = capsys.readouterr().out
    assert "First choice: eva:num_landmarks=49, predicted" in out
    assert "measured at 196 tokens, asked 560" in out
    assert out.count("times: rank correlation 1.000") == 2
    assert out.count("Peak memory: rank correlation ") == 2
    with (tmp_path / RECOMMENDATION_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == recommend.COLUMNS
    assert (rows[0]["rank"], rows[0]["mechanism"], rows[0]["source"]) == ("1", "eva", "a file: a command")
    assert {row["meets_budgets"] for row in rows} == {"True", "False"}


def test_a_device_that_is_not_here(capsys):
    """Nothing is measured, and the peak memory is that of the path of its tensors."""
    elsewhere = [*ASK[:1], *ASK[5:], "--on", "h100"]
    benchmark.main([*elsewhere, "--attention", "softmax", "local", "--budget", "ms=1"])
    out = capsys.readouterr().out
    assert "Predicted for h100, not measured: 3350 GB/s" in out
    assert "Calibrated" not in out
    assert "| 0.015 (0.0135–inf) |" in out  # three launches of 5 microseconds
    with pytest.raises(SystemExit):
        benchmark.main([*elsewhere, "--verify", "--processor-time", "--modes", "train"])
    error = capsys.readouterr().err
    assert "--on: a device that is not here is not measured; leave out --verify, --processor-time, --modes tr" in error


def test_a_held_out_grid_without_predictions(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "stopwatch", lambda *_: lambda *_: [])
    ask("--verify")
    out = capsys.readouterr().out
    assert "No candidate was calibrated: give --calibrate more seconds" in out
    assert "20x28 tokens, 24 channels, 2 heads: no candidate was both predicted and measured." in out


def test_a_real_calibration_in_small(capsys):
    """Layers are measured, and no time is looked at."""
    small = ["--tokens", "6x8", "--attention", "softmax", "xca", "--rounds", "2", "--calibrate", "1", "--verify"]
    benchmark.main([*ASK[:-2], *small])
    out = capsys.readouterr().out
    assert "First choice: softmax" in out
    assert "6x8 tokens, 24 channels, 2 heads: 2 candidates. Predicted and measured times: rank correlation" in out


def test_the_installed_package_has_the_file():
    assert Path(quality.__file__).with_name("quality.csv") == STORED
    assert STORED.exists()


def test_a_wrong_budget_is_an_option_error():
    with pytest.raises(OptionError) as caught:
        parse_budgets(["time=4"])
    assert caught.value.key == "--budget"
