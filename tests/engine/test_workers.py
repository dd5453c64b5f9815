"""Loader workers that are killed, as by the kernel when memory runs out."""

import errno
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import engine.data.workers
from engine.data.loaders import check_workers
from engine.data.sampler import EpochSampler, SeededDataset
from engine.data.workers import RestartingLoader, WorkersLost, WorkersStuck, with_flags
from engine.runtime.distributed import World
from engine.runtime.errors import UserError

CPU = World(torch.device("cpu"))


class Noise(torch.utils.data.Dataset):
    """Items that depend on the random state, which `SeededDataset` sets."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index < 0:
            raise KeyError(index)
        return index, torch.rand(3)


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch):
    """Makes torch check often whether its workers are alive; its interval is 5 s."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


def train_loader(workers: int) -> RestartingLoader:
    sampler = EpochSampler(80, 4, CPU, seed=0)
    sampler.set_epoch(1, start=8)
    return RestartingLoader(SeededDataset(Noise(), 0), 4, sampler=sampler, num_workers=workers)


def read(loader: RestartingLoader, deaths: set[int] = frozenset()) -> Iterator[list[torch.Tensor]]:
    """All batches; a worker is killed after each of those in `deaths`."""
    others = set(multiprocessing.active_children())
    for number, batch in enumerate(loader):
        yield batch
        if number in deaths:
            (set(multiprocessing.active_children()) - others).pop().kill()


def begin() -> tuple[Iterator[list[torch.Tensor]], multiprocessing.Process]:
    """A pass of 18 batches after its first batch, and its worker."""
    others = set(multiprocessing.active_children())
    batches = read(train_loader(1))
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    return batches, worker


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
def test_workers_are_forked_whatever_python_prefers():
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # the default of Python 3.14
    try:
        assert with_flags().get_start_method() == "fork"
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("deaths", [{2}, {2, 9}])
def test_the_batches_are_the_same_whatever_happens_to_the_workers(deaths: set[int], capfd: pytest.CaptureFixture):
    expected = list(read(train_loader(0)))
    loader = train_loader(2)
    batches = list(read(loader, deaths))
    assert len(batches) == len(expected) == 18
    for batch, twin in zip(batches, expected, strict=True):
        assert all(torch.equal(value, other) for value, other in zip(batch, twin, strict=True))
    assert loader.num_deaths == len(deaths)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("a loader worker was killed")]
    assert [line.endswith("new ones go on") for line in lines] == [True, False][: len(deaths)]
    if len(deaths) == 1:
        check_workers(loader, CPU)
    else:
        assert lines[1].endswith("this process reads the rest")
        with pytest.raises(WorkersLost, match=r"rank 0 were killed .* lower data\.workers = 2"):
            check_workers(loader, CPU)
    assert len(list(read(loader))) == 18
    check_workers(loader, CPU)  # every pass begins with workers


def test_a_worker_that_dies_interrupts_nothing_else():
    """torch's handler of SIGCHLD would raise its error wherever the process happens to be."""
    batches, worker = begin()
    worker.kill()
    worker.join()
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    assert len(list(batches)) == 17


class Suicidal(Noise):
    """Items of a worker that takes the lock of torch's event before it is killed at the first item."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if torch.utils.data.get_worker_info():
            frame = sys._getframe()
            while "done_event" not in frame.f_locals:
                frame = frame.f_back
            if lock := getattr(frame.f_locals["done_event"], "_cond", None):
                lock.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def read_beside_death() -> None:
    assert len(list(RestartingLoader(Suicidal(), 2, sampler=range(6), num_workers=1))) == 3


def test_a_worker_that_dies_holds_no_lock():
    """A lock that stays held would block its process forever, so that it has one of its own."""
    process = multiprocessing.get_context("fork").Process(target=read_beside_death)
    process.start()
    process.join(30)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_without_memory_for_new_workers_this_process_reads(monkeypatch: pytest.MonkeyPatch):
    def fork() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "fork", fork)
    loader = train_loader(1)
    assert len(list(read(loader))) == 18
    assert loader.has_lost_workers


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_is_not_taken_for_a_death(workers: int):
    loader = RestartingLoader(Noise(), 2, sampler=[1, 2, 3, -1], num_workers=workers)
    with pytest.raises(KeyError, match="-1"):
        list(loader)
    assert not loader.num_deaths


def test_only_torch_ends_a_worker_by_a_signal():
    """SLURM sends a warning to every process of a job."""
    batches, worker = begin()
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(worker.pid, number)
    assert len(list(batches)) == 17
    assert worker.exitcode == 0


class Full(Dataset):
    """Images that a worker cannot send, because the shared memory is full."""

    def __getitem__(self, index: int) -> int:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


def test_full_shared_memory_is_named():
    with pytest.raises(UserError, match=r"/dev/shm, .*, is full; enlarge it .*, lower data\.workers = 1, or set"):
        list(RestartingLoader(Full(), 2, sampler=[1], num_workers=1))


@pytest.mark.complete
def test_workers_live_on_from_pass_to_pass():
    """Also after a pass that was not finished; one that dies in between is replaced."""
    loader = train_loader(2)
    others = set(multiprocessing.active_children())
    expected = list(read(loader))
    workers = set(multiprocessing.active_children()) - others
    next(iter(loader))
    again = list(read(loader))
    assert set(multiprocessing.active_children()) - others == workers
    workers.pop().kill()
    after_a_death = list(read(loader))
    assert loader.num_deaths == 1
    for batches in (again, after_a_death):
        for batch, twin in zip(batches, expected, strict=True):
            assert all(torch.equal(value, other) for value, other in zip(batch, twin, strict=True))
    del loader
    assert set(multiprocessing.active_children()) <= others  # those of an earlier test may end meanwhile


class Stuck(Noise):
    """Items of a worker that stops, as if its disk did not answer, at index 4."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


def test_a_worker_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.data.workers, "STOP_AFTER", 0.1)
    others = set(multiprocessing.active_children())
    for stopped in (False, True):
        loader = RestartingLoader(Stuck(), 2, sampler=range(8), num_workers=1)
        batches = iter(loader)
        assert next(batches)[0].tolist() == [0, 1]
        if stopped:
            loader.stop_requested = lambda: True
        else:
            loader.patience = 1.0
        with pytest.raises(WorkersStuck, match=r"sent no batch for \d+ s; (the limit is 1 s|a stop signal)") as caught:
            list(batches)
        assert caught.value.stopped == stopped
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        for worker in set(multiprocessing.active_children()) - others:
            worker.join()  # would not end if it only had a signal that a stopped process cannot hear


class Endless(Noise):
    """A data set with one item that waits forever, and that takes any error for a damaged file."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        while index == 4:
            with suppress(Exception):
                time.sleep(600)
        return super().__getitem__(index)


def test_a_stopped_run_without_workers_does_not_wait_for_its_own_reading(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.data.workers, "STOP_AFTER", 0.1)
    loader = RestartingLoader(Endless(), 2, sampler=range(8), num_workers=0)
    loader.stop_requested = lambda: True
    with pytest.raises(WorkersStuck, match=r"this process has read no batch for \d+ s; a stop signal") as caught:
        list(loader)
    assert caught.value.stopped
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_worker_that_stops_between_two_batches_is_not_waited_for():
    """Its batches are in the queue, but their tensors come from a thread of the worker."""
    others = set(multiprocessing.active_children())
    loader = RestartingLoader(Noise(), 2, sampler=range(40), num_workers=1)
    batches = iter(loader)
    next(batches)
    loader.patience = 1.0
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkersStuck):
        list(batches)
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
