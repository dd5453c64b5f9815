"""Time that training waits for data: the device is idle because the next batch is not there."""

import time
from collections.abc import Iterator
from typing import TypeVar

import torch

Batch = TypeVar("Batch")


class DataWait:
    """Measures the wait for every batch that passes through `watch`.

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
