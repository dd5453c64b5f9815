"""Speed of training: time of an update, images, arithmetic, memory, and the wait for data."""

import math
import statistics
import time
from array import array

import torch

from engine.config.schema import Run
from engine.reporting.waiting import DataWait
from engine.runtime.distributed import World
from engine.runtime.peaks import peak_tflops
from engine.runtime.provenance import device_name


class StepSpeed:
    """Measures the updates of `run` since it was started or resumed.

    Attributes:
        wait: measures the wait for the batches of this rank.
    """

    def __init__(self, run: Run, world: World):
        self.options, self.world, self.device = run.train, world, world.device
        self.wait = DataWait(world.device)
        self.step_seconds = array("d")
        self.num_recorded = 0
        self.tflop = 0.0  # of an image
        self.peak: float | None = None  # TFLOP/s of all GPUs

    def set_macs(self, macs: int, processes: int) -> None:
        """Prepares FLOP/s and MFU: a backward pass takes twice the arithmetic of a forward pass, `macs` of an image.

        That is not so where parameters are frozen, and then neither is measured.
        """
        options = self.options
        if macs and options.freeze is None:
            self.tflop = 3 * 2 * macs / 1e12
            peak = peak_tflops(device_name(self.device), options.amp or ("tf32" if options.tf32 else "fp32"))
            self.peak = peak and processes * peak

    def begin_step(self) -> None:
        """Starts the clock of the next update; what came before is no part of it."""
        self.began = time.perf_counter()

    def end_step(self) -> None:
        """Counts an update and its time, and starts the clock of the next."""
        now = time.perf_counter()
        self.step_seconds.append(now - self.began)
        self.began = now

    def since_last(self) -> dict[str, float]:
        """Returns the mean speed of the updates since the last call, and the percentage of time spent waiting for data:
        the first rank's and, of several, that of the slowest. A collective.
        """
        step_seconds = statistics.fmean(self.step_seconds[self.num_recorded :])
        num_steps = len(self.step_seconds) - self.num_recorded
        self.num_recorded += num_steps
        own_wait = 100 * self.wait.seconds() / (num_steps * step_seconds)
        waits = [wait for (wait,) in self.world.gather([own_wait])]
        longest = max(waits)
        slowest = {"slowest_rank": waits.index(longest), "slowest_data_wait": longest} if len(waits) > 1 else {}
        return {**slowest, **self._describe(step_seconds), "data_wait": waits[0]}

    def median(self) -> dict[str, float]:
        """Returns the median speed of all updates. A collective."""
        seconds = self.step_seconds or [math.nan]  # a run that was stopped after its last update has none
        return self._describe(statistics.median(seconds))

    def _describe(self, step_seconds: float) -> dict[str, float]:
        """Returns speed, and on GPUs the peak memory of the rank that has the highest: a collective, at log time."""
        images_per_second = self.options.total_batch_size / step_seconds
        speed = {"images_per_second": images_per_second, "step_seconds": step_seconds}
        if self.tflop:
            speed["tflops"] = self.tflop * images_per_second
        if self.tflop and self.peak:
            speed["mfu"] = 100 * speed["tflops"] / self.peak
        if self.device.type == "cuda":  # on a CPU, the memory of the process is hardly that of the model
            peaks = [torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)]
            allocated, reserved = map(max, zip(*self.world.gather(peaks), strict=True))
            speed |= {"memory_mb": allocated / 2**20, "memory_reserved_mb": reserved / 2**20}
        return speed
