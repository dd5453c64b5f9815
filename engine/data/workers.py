"""Loader whose workers ignore stop signals, and end the program in a line if they are killed or stuck."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from engine.runtime.errors import UserError
from engine.runtime.signals import SIGNALS
from engine.runtime.text import describe_error

REMEDY = "lower data.workers if memory ran out, or check the storage of data.root and train.timeout_minutes"
"""Remedy of workers that were killed or are stuck."""


class WorkersFailed(UserError):
    """Loader workers were killed, have sent no batch for too long, or have no shared memory."""


def workers_of_rank(workers: int) -> int:
    """Returns the loader processes of this rank: `data.workers`, but no more than its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(workers, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


class WorkerLoader(DataLoader):
    """DataLoader whose workers live from pass to pass, so that only one pass can run at a time.

    Args:
        patience: time (s) within which the workers must send a batch.
    Raises:
        WorkersFailed: while it is iterated.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, num_workers: int = 0, patience: float = 300.0, **options: Any
    ):
        if num_workers:
            options |= {"timeout": patience, "persistent_workers": True}
            if sys.platform == "linux":  # forked workers import nothing
                options["multiprocessing_context"] = "fork"
        super().__init__(dataset, batch_size, num_workers=num_workers, worker_init_fn=shield_worker, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own iterators
        try:
            yield from super().__iter__()
        except (RuntimeError, OSError, EOFError) as error:  # of torch; those of the data set begin with "Caught "
            if not self.num_workers:
                raise
            self._forget_workers()
            if "shared memory" in str(error):
                raise WorkersFailed(
                    "/dev/shm, through which loader workers send images, is full; enlarge it (docker run"
                    f" --shm-size=8g), lower data.workers = {self.num_workers}, or set data.workers=0"
                ) from None
            if str(error).startswith("Caught "):
                raise
            raise WorkersFailed(f"a loader worker was killed or is stuck ({describe_error(error)}); {REMEDY}") from None

    def _forget_workers(self) -> None:
        """Keeps torch's handler of SIGCHLD from raising again for workers that are dead, at any time."""
        iterator: Any = self._iterator
        if iterator is not None and iterator._worker_pids_set:
            signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False


def shield_worker(worker: int) -> None:
    """Keeps stop signals, which reach all processes of a job, from ending a worker that the run needs for its step.

    SIGTERM still ends the worker, as torch requires. The worker ends with its parent, however the parent ends.
    """
    os.setsid()
    for number in set(SIGNALS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
