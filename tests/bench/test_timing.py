"""Times of calls: rounds interleave, ratios come from one round, noise is called noise."""

import time

import pytest
import torch

from bench.timing import Quartiles, Times, capturing, time_rounds

CPU = torch.device("cpu")


def test_rounds_interleave_and_turn_round():
    log = []
    calls = {name: lambda name=name: log.append(name) for name in "ABC"}
    times = time_rounds(calls, 3, CPU, sample_seconds=0)
    assert "".join(log) == "ABC" + "CBA" + "ABC" + "CBA" + "ABC"  # lengths of calls, the dropped round, three rounds
    assert [len(samples) for samples in times.seconds.values()] == [3, 3, 3]


class Clock:
    """A clock that calls advance."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def set_forward(self, seconds: float) -> None:
        self.now += seconds


def test_short_calls_are_repeated():
    lengths, log, clock = {"short": 0.004, "long": 0.1}, [], Clock()
    calls = {name: lambda name=name: log.append(name) or clock.set_forward(lengths[name]) for name in lengths}
    times = time_rounds(calls, 2, CPU, 0.018, clock=clock)
    assert log[:8] == ["short", "long", "long", *["short"] * 5]  # once each, then the dropped round
    assert {name: pytest.approx(seconds) for name, seconds in times.seconds.items()} == {
        name: [seconds] * 2 for name, seconds in lengths.items()
    }


def test_the_share_of_time_for_which_the_thread_waits(monkeypatch):
    clock, thread = Clock(), Clock()
    monkeypatch.setattr(time, "thread_time", thread)

    def call() -> None:
        clock.set_forward(0.010)
        thread.set_forward(0.006)

    assert time_rounds({"A": call, "B": call}, 2, CPU, 0.018, clock=clock).waited == pytest.approx(0.4)


def test_processor_time_leaves_out_what_the_process_waits_for():
    times = time_rounds({"call": lambda: time.sleep(0.05)}, 2, CPU, 0, clock=time.process_time)
    assert max(times.seconds["call"]) < 0.02


@pytest.mark.parametrize(
    ("values", "expected"), [([1.0, 2, 3, 4, 5], (3, 2, 4, 0.93 * 2 / 5**0.5 / 3)), ([2.0, 2], (2, 2, 2, 0))]
)
def test_quartiles(values, expected):
    found = Quartiles.of(values)
    assert (found.median, found.low, found.high, found.error) == pytest.approx(expected)


def test_speedup_is_of_times_of_the_same_round():
    times = Times({"softmax": [1.0, 4.0, 10.0], "eva": [2.0, 4.0, 1.0]}, waited=0)
    speedup = times.speedup("eva", "softmax")
    assert (speedup.low, speedup.median, speedup.high) == (0.75, 1.0, 5.5)  # of the ratios 0.5, 1, 10


def test_noise():
    steady, jumpy = Quartiles.of([1.0, 1.01, 0.99, 1.0]), Quartiles.of([1.0, 2.0, 1.0, 2.0])
    assert not Times({}, waited=0.01).noisy(steady)
    assert Times({}, waited=0.01).noisy(jumpy)
    assert Times({}, waited=0.3).noisy(steady)
    kept_waiting = time_rounds({"call": lambda: time.sleep(0.01)}, 2, CPU, sample_seconds=0)
    assert kept_waiting.waited > 0.5


def test_nothing_to_time():
    times = time_rounds({}, 2, CPU)
    assert (times.seconds, times.waited) == ({}, 0)


@pytest.mark.gpu
def test_times_on_a_gpu():
    device = torch.device("cuda")
    x = torch.randn(2**20, device=device)
    times = time_rounds({"call": x.sin}, 2, device)
    assert min(times.seconds["call"]) > 0
    assert times.waited == 0


@pytest.mark.gpu
def test_a_captured_call_on_a_gpu():
    device = torch.device("cuda")
    weight = torch.ones(3, device=device, requires_grad=True)
    total = torch.zeros(3, device=device)

    def call():
        (2 * weight).sum().backward()
        total.add_(weight.grad)
        weight.grad = None

    with capturing() as captured:
        call()
        replay = captured(call)
    torch.testing.assert_close(total, torch.full_like(total, 2))
    for _ in range(3):
        replay()
    torch.testing.assert_close(total, torch.full_like(total, 8))
