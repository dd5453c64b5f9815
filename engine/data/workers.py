"""Loader whose workers ignore stop signals, restart once if killed, and time out if stuck."""

import copy
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from engine.runtime.errors import UserError
from engine.runtime.signals import SIGNALS

NUM_RESTARTS = 1
"""Number of times in a pass that new workers replace the old ones after one was killed."""

STOP_AFTER = 10.0
"""Time (s) that a stopped run waits for the batch of its last update; torchrun kills its ranks after 30 s."""

POLL = 0.5
"""Time (s) between looks at the clock and for a stop signal, while this process waits for its workers."""


class WorkersLost(RuntimeError):
    """Loader workers were killed more often than `NUM_RESTARTS` allows."""


class WorkersStuck(UserError):
    """Loader workers have sent no batch for too long, or (`stopped`) a stop signal came while this process waited."""

    def __init__(self, message: str, stopped: bool):
        super().__init__(message)
        self.stopped = stopped


class Overdue(BaseException):
    """The end of a wait, which no handler of damaged images must take for one: so it is no `Exception`."""


class RestartingLoader(DataLoader):
    """DataLoader that continues when a worker is killed, as the kernel does when memory runs out.

    New workers continue from the next batch, `NUM_RESTARTS` times in a pass. After that this process reads the rest, so
    that a run can finish its step and save. A batch must not depend on the process that makes it. Workers live from
    pass to pass, so that only one pass can run at a time.

    Args:
        patience: time (s) within which the workers must send a batch.
    Attributes:
        num_deaths: number of times that workers were killed in the current pass, or else in the last one.
        stop_requested: called during a wait for a batch; once it is true, the wait ends after `STOP_AFTER` seconds.
    Raises:
        WorkersStuck: no batch came in time. The workers are killed.
    """

    batch_sampler: Iterable[list[Any]]

    def __init__(self, dataset: Dataset[Any], batch_size: int, patience: float = 300.0, **options: Any):
        super().__init__(dataset, batch_size, worker_init_fn=shield_worker, **options)
        self.patience = patience
        self.stop_requested: Callable[[], bool] | None = None
        self.remaining = Remaining(self.batch_sampler)
        self.reader: DataLoader | None = None
        self.num_deaths = 0

    @property
    def has_lost_workers(self) -> bool:
        """Whether this process reads in place of the workers."""
        return self.num_deaths > NUM_RESTARTS

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterators
        if self.has_lost_workers:
            self.reader = None
        self.num_deaths = num_read = 0
        while True:
            try:
                with self._watch():
                    batches = self._read_from(num_read)
                while True:
                    with self._watch():
                        batch = next(batches, END)
                    if batch is END:
                        return
                    num_read += 1
                    yield batch
            except (RuntimeError, OSError, EOFError) as error:
                # From torch: a lost connection or a failed start. From the data set: torch puts "Caught " in front.
                if self.num_workers and "shared memory" in str(error):
                    raise UserError(
                        "/dev/shm, through which loader workers send images, is full; enlarge it (docker run"
                        f" --shm-size=8g), lower data.workers = {self.num_workers}, or set data.workers=0"
                    ) from None
                if not self.num_workers or self.has_lost_workers or str(error).startswith("Caught "):
                    raise
                self.reader = None
                self.num_deaths += 1
                reader = "this process reads the rest" if self.has_lost_workers else "new ones go on"
                tqdm.write(f"a loader worker was killed (out of memory?): {error!r}; {reader}", file=sys.stderr)

    @contextmanager
    def _watch(self) -> Iterator[None]:
        """Context of a wait for a batch, which ends if it is too long: of workers, or after a stop signal.

        A worker that hangs may have sent half of a batch, so that a timeout of torch's queue would not be enough.
        """
        has_workers, stop_requested = self.num_workers and not self.has_lost_workers, self.stop_requested
        if not (has_workers or stop_requested) or threading.current_thread() is not threading.main_thread():
            yield
            return
        began, limit = time.monotonic(), self.patience if has_workers else math.inf

        def check(number: int, frame: FrameType | None) -> None:
            waited = time.monotonic() - began
            if waited > limit or (stop_requested and waited > STOP_AFTER and stop_requested()):
                raise Overdue

        before = signal.signal(signal.SIGALRM, check)
        signal.setitimer(signal.ITIMER_REAL, POLL, POLL)
        try:
            yield
        except (Overdue, KeyboardInterrupt) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            # At its end, this process would wait for the workers again.
            for worker in getattr(getattr(self.reader, "_iterator", None), "_workers", []):
                worker.kill()
            if isinstance(error, KeyboardInterrupt):
                raise
            waited = time.monotonic() - began
            reason = f"the limit is {limit:g} s" if waited > limit else "a stop signal ended the wait"
            who = "loader workers sent" if has_workers else "this process has read"
            raise WorkersStuck(f"{who} no batch for {waited:.0f} s; {reason}", waited <= limit) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _read_from(self, start: int) -> Iterator[Any]:
        """Returns an iterator over the batches from number `start` on."""
        self.remaining.start = start
        if self.reader is None:
            workers = 0 if self.has_lost_workers else self.num_workers
            self.reader = DataLoader(
                self.dataset,
                batch_sampler=self.remaining,
                collate_fn=self.collate_fn,
                num_workers=workers,
                worker_init_fn=self.worker_init_fn,
                multiprocessing_context=with_flags() if workers else None,
                pin_memory=self.pin_memory,
                persistent_workers=workers > 0,
            )
        batches = iter(self.reader)
        if self.reader.num_workers:  # torch's handler would raise the death of a worker in the middle of anything
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return batches


END = object()
"""Stands for the end of a pass."""


class Remaining(Iterable[list[Any]]):
    """The batches of `batches` from number `start` on."""

    def __init__(self, batches: Iterable[list[Any]]):
        self.batches, self.start = batches, 0

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(self.batches, self.start, None)


class Flag:
    """The methods of an event that torch calls, without a lock: a killed worker would hold the lock forever."""

    def __init__(self) -> None:
        self.value = multiprocessing.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self.value.value)

    def set(self) -> None:
        self.value.value = 1


def with_flags() -> Any:
    """Returns a multiprocessing context whose events are flags. On Linux it forks, so that workers import nothing."""
    context: Any = copy.copy(multiprocessing.get_context("fork" if sys.platform == "linux" else None))
    context.Event = Flag
    return context


def shield_worker(worker: int) -> None:
    """Keeps stop signals, which reach all processes of a job, from ending a worker that the run needs for its step.

    SIGTERM still ends the worker, as torch requires. The worker ends with its parent, however the parent ends.
    """
    os.setsid()
    for number in set(SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
