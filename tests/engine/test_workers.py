"""Loader workers that get signals, are killed or hang."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import Dataset

from engine.data.sampler import EpochSampler, SeededDataset
from engine.data.workers import WorkerLoader, WorkersFailed, workers_of_rank
from engine.runtime.distributed import World

CPU = World(torch.device("cpu"))


class Noise(Dataset):
    """Items that depend on the random state, which `SeededDataset` sets; `strike` is called at index 4 in a worker."""

    def __init__(self, strike: Callable[[], object] = lambda: None):
        self.strike = strike

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index < 0:
            raise KeyError(index)
        if index == 4 and torch.utils.data.get_worker_info():
            self.strike()
        return index, torch.rand(3)


def train_loader(workers: int) -> WorkerLoader:
    sampler = EpochSampler(80, 4, CPU, seed=0)
    sampler.set_epoch(1, start=8)
    return WorkerLoader(SeededDataset(Noise(), 0), 4, sampler=sampler, num_workers=workers)


@pytest.fixture
def workers() -> Iterator[Callable[[], set]]:
    """Function that returns the workers that are alive; those of an earlier test may end meanwhile."""
    others = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - others


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
def test_workers_are_forked_whatever_python_prefers():
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # the default of Python 3.14
    try:
        assert train_loader(1).multiprocessing_context.get_start_method() == "fork"
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_batches_do_not_depend_on_workers_that_live_on_from_pass_to_pass(workers: Callable[[], set]):
    """Also after a pass that was not finished."""
    expected, loader = list(train_loader(0)), train_loader(2)
    first = list(loader)
    alive = workers()
    next(iter(loader))
    again = list(loader)
    assert len(alive) == 2
    assert workers() == alive
    for batches in (first, again):
        assert len(batches) == len(expected) == 18
        for batch, twin in zip(batches, expected, strict=True):
            assert all(torch.equal(value, other) for value, other in zip(batch, twin, strict=True))


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_the_data_set_passes(number: int):
    with pytest.raises(KeyError, match="-1"):
        list(WorkerLoader(Noise(), 2, sampler=[1, 2, 3, -1], num_workers=number))


def test_only_torch_ends_a_worker_by_a_signal(workers: Callable[[], set]):
    """SLURM sends a warning to every process of a job."""
    batches = iter(train_loader(1))
    next(batches)
    (worker,) = workers()
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(worker.pid, number)
    assert len(list(batches)) == 17
    assert worker.exitcode in (None, 0)


def fill_shared_memory() -> None:
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


@pytest.mark.parametrize(
    ("strike", "problem"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            r"^a loader worker was killed or is stuck \(.*\); lower data\.workers if memory",
        ),
        (lambda: time.sleep(60), r"killed or is stuck \(RuntimeError: DataLoader timed out after 1.0 seconds\)"),
        (fill_shared_memory, r"/dev/shm, .*, is full; enlarge it .*, lower data\.workers = 1, or set"),
    ],
    ids=["killed", "stuck", "no shared memory"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's signal may meet a finaliser
def test_workers_that_fail_end_the_pass_in_a_line(strike: Callable, problem: str):
    loader = WorkerLoader(Noise(strike), 2, sampler=range(8), num_workers=1, patience=1.0)
    with pytest.raises(WorkersFailed, match=problem) as caught:
        list(loader)
    assert "\n" not in str(caught.value)
    os.kill(os.getpid(), signal.SIGCHLD)  # as when another process ends: torch does not raise again


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(16, "2", 8), (16, "8", 2), (2, "", 2), (1, "8", 1), (64, "1", 9)]
)
def test_a_rank_has_no_more_workers_than_its_share_of_the_cores(cores, ranks, workers, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert workers_of_rank(9) == workers
    assert workers_of_rank(0) == 0
