"""Loader workers: they outlast a run's stop signals, and those that are killed are replaced."""

import copy
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from engine.signals import SIGNALS

NUM_RESTARTS = 1
"""How often in a pass new workers replace those of which one was killed."""


class WorkersLost(RuntimeError):
    """Loader workers were killed more often than they are replaced."""


class RestartingLoader(DataLoader):
    """A DataLoader that goes on when a worker is killed, as by the kernel when memory runs out.

    New workers go on from the batch that was reached, `NUM_RESTARTS` times in a pass. After that this process does: it
    is slow, but lets a run finish its step and save. A batch must not depend on the process that makes it.
    Workers live on from pass to pass, so that there is one pass at a time.

    Attributes:
        num_deaths: how often workers of the current pass, or the last one, were killed.
    """

    batch_sampler: Iterable[list[Any]]

    def __init__(self, dataset: Dataset[Any], batch_size: int, **options: Any):
        super().__init__(dataset, batch_size, worker_init_fn=shield_worker, **options)
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
                for batch in self._read_from(num_read):
                    num_read += 1
                    yield batch
                return
            except (RuntimeError, OSError, EOFError) as error:
                # Either torch's, of the connection to a worker or of starting one, or the data set's, marked by torch.
                if not self.num_workers or self.has_lost_workers or str(error).startswith("Caught "):
                    raise
                self.reader = None
                self.num_deaths += 1
                reader = "this process reads the rest" if self.has_lost_workers else "new ones go on"
                tqdm.write(f"a loader worker was killed (out of memory?): {error!r}; {reader}", file=sys.stderr)

    def _read_from(self, start: int) -> Iterator[Any]:
        """The batches from number `start` on."""
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


class Remaining(Iterable[list[Any]]):
    """The batches of `batches` from number `start` on."""

    def __init__(self, batches: Iterable[list[Any]]):
        self.batches, self.start = batches, 0

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(self.batches, self.start, None)


class Flag:
    """What torch asks of an event, without its lock: a worker that is killed as it looks would hold that for ever."""

    def __init__(self) -> None:
        self.value = multiprocessing.RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self.value.value)

    def set(self) -> None:
        self.value.value = 1


def with_flags() -> Any:
    """The context of new processes, whose events are flags."""
    context: Any = copy.copy(multiprocessing.get_context())
    context.Event = Flag
    return context


def shield_worker(worker: int) -> None:
    """Keeps stop signals from ending a worker: the step that the run still finishes needs its images.

    torchrun and terminals send them to the process group, SLURM to every process of a job. SIGTERM still ends the
    worker, as torch needs it. The worker ends with its parent, however that ends.
    """
    os.setsid()
    for number in set(SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
