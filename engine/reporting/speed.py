"""Speed of training: time of an update, images, memory, and the wait for data."""

import math
import statistics
import time
from array import array
from collections.abc import Iterator
from typing import TypeVar

import torch

from engine.config.schema import Run
from engine.runtime.distributed import World

Batch = TypeVar("Batch")


class StepSpeed:
    """Measures the updates of `run` since it was started or resumed.

    Attributes:
        wait: measures the wait for the batches of this rank.
    """

    def __init__(self, run: Run, world: World):
        self.batch_size, self.world, self.device = run.train.total_batch_size, world, world.device
        self.wait = DataWait(world.device)
        self.step_seconds = array("d")
        self.num_recorded = 0

    def begin_step(self) -> None:
        """Starts the clock of the next update; what came before is no part of it."""
        self.began = time.perf_counter()

    def end_step(self) -> None:
        """Counts an update and its time, and starts the clock of the next."""
        now = time.perf_counter()
        self.step_seconds.append(now - self.began)
        self.began = now

    def since_last(self) -> dict[str, float]:
        """Returns the mean speed of the updates since the last call, and the percentage of time that the slowest rank
        waits for data. A collective.
        """
        step_seconds = statistics.fmean(self.step_seconds[self.num_recorded :])
        num_steps = len(self.step_seconds) - self.num_recorded
        self.num_recorded += num_steps
        own_wait = 100 * self.wait.seconds() / (num_steps * step_seconds)
        return {**self._describe(step_seconds), "data_wait": max(wait for (wait,) in self.world.gather([own_wait]))}

    def median(self) -> dict[str, float]:
        """Returns the median speed of all updates. A collective."""
        seconds = self.step_seconds or [math.nan]  # a run that was stopped after its last update has none
        return self._describe(statistics.median(seconds))

    def _describe(self, step_seconds: float) -> dict[str, float]:
        """Returns speed, and on GPUs the peak memory of the rank that has the highest: a collective, at log time."""
        images_per_second = self.batch_size / step_seconds
        speed = {"images_per_second": images_per_second, "step_seconds": step_seconds}
        if self.device.type == "cuda":  # on a CPU, the memory of the process is hardly that of the model
            peaks = [torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)]
            allocated, reserved = map(max, zip(*self.world.gather(peaks), strict=True))
            speed |= {"memory_mb": allocated / 2**20, "memory_reserved_mb": reserved / 2**20}
        return speed


class DataWait:
    """Measures the wait for every batch that passes through `watch`: the device is idle because the batch is not there.

    On CUDA, where work is queued ahead, a wait begins when the device has finished all of it and ends when the batch is
    there. Events measure it on the device, and are read when `seconds` is called, not at every step.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.waits: list[tuple] = []

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields `batches` and measures the wait for each."""
        began = self._now()
        for batch in batches:
            self.waits.append((began, self._now()))
            yield batch
            began = self._now()

    def seconds(self) -> float:
        """Returns the seconds of waiting since the last call."""
        waits, self.waits = self.waits, []
        if self.device.type != "cuda":
            return sum(end - began for began, end in waits)
        if waits:
            waits[-1][1].synchronize()
        return sum(began.elapsed_time(end) for began, end in waits) / 1000

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
