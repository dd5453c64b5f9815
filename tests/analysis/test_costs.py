"""Costs that a budget of analyze.py search limits: what single layers predict, and what is measured and kept."""

import itertools
import operator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from analysis import costs
from analysis.costs import COSTS, Prices
from analysis.hybrids import OWN
from attention.ops import kernels
from bench.timing import Times, time_rounds
from tests.analysis.models import SMALL, ask, save_model

SECONDS = {(OWN, OWN): 4.0, ("a", OWN): 3.0, (OWN, "a"): 3.5, ("b", OWN): 6.0, ("a", "a"): 2.75}
LAYERS = {(layer, name): 10 * layer + ord(name[0]) % 7 for layer in range(3) for name in (OWN, "a", "b")}


class Fake:
    """Hybrids of two layers whose models are their own names; records what is measured."""

    own, pairs = (OWN, OWN), [(0, "a"), (1, "a"), (0, "b")]

    def __init__(self):
        images, device = torch.zeros(3, 1, 2, 2), torch.device("cpu")
        run = SimpleNamespace(train=SimpleNamespace(amp=None, kernels="auto"))
        trained = SimpleNamespace(device=device, run=run)
        self.laboratory = SimpleNamespace(sample=SimpleNamespace(images=images), trained=trained)
        self.kept = {}

    def single(self, layer, name):
        return tuple(name if number == layer else OWN for number in range(2))

    def build(self, choices, is_aligned):
        return lambda images: choices

    def once(self, choices, compute, **question):
        key = choices, *question.items()
        if key not in self.kept:
            self.kept[key] = compute()
        return self.kept[key]


def time_fake_rounds(calls, rounds, device, clock):
    """The machine becomes slower with every call, but not within the rounds of one."""
    time_fake_rounds.load += 1
    return Times({name: [time_fake_rounds.load * SECONDS[call()]] * rounds for name, call in calls.items()}, 0.0)


def test_times_add_up_over_single_layers(monkeypatch):
    """The load of the machine when a hybrid is timed does not matter; nothing is timed twice."""
    monkeypatch.setattr(costs, "time_rounds", time_fake_rounds)
    time_fake_rounds.load = 0
    cost = COSTS["ms"](hybrids := Fake(), 5)
    assert cost.images.shape == (5, 1, 2, 2)
    prices = cost.prices()
    for choices in SECONDS:
        assert cost.measure(choices) == pytest.approx(SECONDS[choices])
    for choices in [(OWN, OWN), *(hybrids.single(*pair) for pair in hybrids.pairs)]:
        assert prices.predict(choices) == pytest.approx(SECONDS[choices])
    assert prices.predict(("a", "a")) == pytest.approx(4 - 1 - 0.5)
    assert prices.predict(("b", "a")) == pytest.approx(4 + 2 - 0.5)
    assert prices.predict(prices.cheapest()) == pytest.approx(2.5)
    assert time_fake_rounds.load == len(SECONDS) == len(hybrids.kept)
    assert cost.text(0.0125) == "ms=12.5"


def test_a_measurement_belongs_to_a_device_its_threads_and_a_batch(monkeypatch):
    monkeypatch.setattr(costs, "time_rounds", time_fake_rounds)
    time_fake_rounds.load, hybrids = 0, Fake()
    for number, change in enumerate([("device_name", "one"), ("device_name", "another"), ("threads", 7), ("batch", 2)]):
        if change[0] == "device_name":
            monkeypatch.setattr(costs, "device_name", lambda device, name=change[1]: name)
        elif change[0] == "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
        for _ in range(2):
            COSTS["ms"](hybrids, 2 if change[0] == "batch" else 1).measure(hybrids.own)
        assert len(hybrids.kept) == number + 1


@pytest.mark.parametrize(("combine", "start"), [(operator.add, 3), (max, 0)])
def test_no_assignment_is_cheaper_than_the_least_cost(combine, start):
    prices = Prices(start, LAYERS, combine)
    every = [prices.predict(choices) for choices in itertools.product((OWN, "a", "b"), repeat=3)]
    assert prices.predict(prices.cheapest()) == min(every) < max(every)


def every_assignment(checkpoint: Path, directory: Path, *options: str) -> list[dict[str, str]]:
    """The rows of the assignments of softmax and the own attention to two layers: of all four within a wide budget."""
    common = "--images", "40", "--align", "2", "--evaluations", "4", "--attention", "softmax"
    rows = ask(checkpoint, directory, "search", *common, *options)
    return rows


def own_row(rows: list[dict[str, str]]) -> dict[str, str]:
    return next(row for row in rows if row["layer 0"] == row["layer 1"] == OWN)


@pytest.mark.complete
@pytest.mark.parametrize(("kind", "column", "replaced"), [("ms", "ms", 1), ("memory", "peak_mib", 2)])
def test_the_answer_is_within_the_budget_as_measured(tmp_path, monkeypatch, capsys, kind, column, replaced):
    """A second search in the directory measures nothing again. EVA, the own attention, costs more than softmax.

    Args:
        replaced: number of replaced layers up to which the prediction is the measurement.
    """
    monkeypatch.setattr(costs, "ROUNDS", 3)
    monkeypatch.setattr(costs, "time_rounds", partial(time_rounds, sample_seconds=0))
    own_attention = "attention={name: eva, window_size: 2, num_landmarks: 4}"
    checkpoint = save_model(tmp_path, [*SMALL, own_attention], scale=10)
    own = own_row(first := every_assignment(checkpoint, tmp_path, "--budget", f"{kind}=1e6", "--batch-size", "3"))
    assert len(first) == 4
    assert min(float(row[column]) for row in first) < float(own[column])
    printed = capsys.readouterr().out.partition(f": {kind}=")[2].partition(" in fp32, top-1")[0].partition(",")[0]
    assert float(printed) == pytest.approx(float(own[column]), rel=2e-3)
    monkeypatch.setattr(costs, "time_rounds", None)
    monkeypatch.setattr(costs, "peak_bytes", None)
    limit = float(own[column]) + 1e-4
    rows = every_assignment(checkpoint, tmp_path, "--budget", f"{kind}={limit}", "--batch-size", "3")
    within = [row for row in rows if float(row[column]) <= limit]
    answer = min(within, key=lambda row: (float(row["loss"]), float(row[column])))
    assert own_row(rows) == own_row(within)
    text = f"--budget {kind}={limit}: {tmp_path / answer['front']}.yaml, {kind}="
    assert text in capsys.readouterr().out
    assert f"# {kind}=" in (tmp_path / f"{answer['front']}.yaml").read_text()
    known = [row for row in rows if (row["layer 0"] != OWN) + (row["layer 1"] != OWN) <= replaced]
    measured = [float(row[column]) for row in known]
    assert len(known) >= 3
    assert len({*measured}) > 1
    assert [float(row[f"predicted_{column}"]) for row in known] == pytest.approx(measured, rel=0.01)


def test_time_and_memory_are_those_of_the_precision_and_the_fast_paths_of_the_run(monkeypatch):
    hybrids, seen = Fake(), []
    hybrids.build = lambda choices, is_aligned: lambda images: seen.append((images.mm(images).dtype, kernels.path()))
    options = hybrids.laboratory.trained.run.train
    options.amp, options.kernels = "bf16", "plain"
    cost = COSTS["memory"](hybrids, 1)
    cost.images = torch.ones(2, 2)
    cost.measure((OWN, OWN))
    assert set(seen) == {(torch.bfloat16, "plain")}
    options.amp = None
    cost.measure((OWN, OWN))
    assert len(hybrids.kept) == 2
    assert seen[-1] == (torch.float32, "plain")


def test_times_that_vary_too_much_are_noisy_when_they_are_read_again_too(monkeypatch):
    def vary(calls, rounds, device, clock):
        own = [1.0] * rounds
        return Times({name: own if name == OWN else [1.0, 9.0] * (rounds // 2) for name in calls}, 0.0)

    monkeypatch.setattr(costs, "time_rounds", vary)
    hybrids = Fake()
    for _ in range(2):
        cost = COSTS["ms"](hybrids, 1)
        assert cost.measure(("a", OWN)) == 5
        assert cost.noisy == {("a", OWN)}
        monkeypatch.setattr(costs, "time_rounds", None)


def test_a_budget_is_refused_by_the_lower_of_prediction_and_measurement():
    """Two layers of `a` are predicted at 8; measured they are cheaper, or dearer."""
    prices = Prices(10.0, {(layer, name): -(name == "a") for layer in range(2) for name in (OWN, "a")}, operator.add)
    cost = COSTS["ms"](Fake(), 1)
    for measured, least in ((7.0, 7.0), (9.0, 8.0)):
        cost.measure = {("a", "a"): measured}.get
        assert cost.cheapest(prices) == least
