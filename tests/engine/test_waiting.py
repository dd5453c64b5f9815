"""The time spent waiting for data, by a clock that the test moves."""

import json
import time

import pytest
import torch

from engine.checkpoints.progress import Progress
from engine.config.schema import Data, Run
from engine.reporting.recorder import Recorder
from engine.reporting.speed import DataWait
from engine.runtime.distributed import World

CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock.perf_counter)
    return clock


def deliver(clock: Clock, seconds: list[float]):
    """Batches that take the given seconds each."""
    for i, delay in enumerate(seconds):
        clock.now += delay
        yield i


def test_only_the_wait_counts(clock):
    wait = DataWait(CPU)
    batches = wait.watch(deliver(clock, [3.0, 1.0, 0.5]))
    for expected in (0, 1):
        assert next(batches) == expected
        clock.now += 10  # the step
    assert wait.seconds() == 4.0
    assert list(batches) == [2]
    assert wait.seconds() == 0.5
    assert wait.seconds() == 0.0


@pytest.mark.parametrize("share", [5, 40])
def test_the_log_shows_the_share(clock, tmp_path, capsys, share):
    run = Run(model={"name": "deit_tiny_p16"}, attention="softmax", data=Data(dataset="digits", workers=3))
    recorder = Recorder(tmp_path, run, Progress(), 6, World(CPU))
    recorder.begin_epoch(1)
    printed = []
    for _ in recorder.speed.wait.watch(deliver(clock, [share / 100] * 6)):
        clock.now += 1 - share / 100
        recorder.end_step()
        if recorder.step % 2 == 0:
            recorder.train(1, loss=1.0)
            printed.append(capsys.readouterr().out)
    recorder.bar.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["data_wait"] for record in records] == pytest.approx([share] * 3)
    assert all(f"{share} % waiting for data" in text for text in printed)


@pytest.mark.gpu
def test_on_cuda_work_that_is_queued_is_no_wait():
    """The device is busy for longer than the first batch takes, and idle for the second."""

    def deliver():
        time.sleep(0.1)
        yield
        torch.cuda.synchronize()
        time.sleep(0.3)
        yield

    wait = DataWait(torch.device("cuda"))
    batches = wait.watch(deliver())
    torch.cuda._sleep(10**9)  # cycles, about half a second
    next(batches)
    assert wait.seconds() < 0.02
    next(batches)
    assert 0.2 < wait.seconds() < 0.6
