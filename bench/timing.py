"""Times of calls in interleaved rounds, and their capture in CUDA graphs."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Call = Callable[[], object]

MAX_ERROR = 0.03
"""Largest relative standard error of a median that does not count as noise."""
MAX_WAITED = 0.05
"""Largest share of the time on a CPU for which the measuring thread may have been kept from running."""


@dataclass(frozen=True)
class Quartiles:
    """Quartiles of repeated measurements of one quantity.

    Attributes:
        median, low, high: median, first and third quartile. error: relative standard error of the median, by the
            quartiles of a normal distribution: 0.93 (high - low) / sqrt(count) / median.
    """

    median: float
    low: float
    high: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Computes the quartiles of at least two values."""
        low, median, high = statistics.quantiles(values, method="inclusive")
        return cls(median, low, high, 0.93 * (high - low) / math.sqrt(len(values)) / median)


@dataclass(frozen=True)
class Times:
    """Times of several calls in the same rounds.

    Attributes:
        seconds: name of a call -> its seconds in every round.
        waited: share of that time in which other programs kept the calling thread from running; 0 on a GPU, where the
            thread may sleep.
    """

    seconds: dict[str, list[float]]
    waited: float

    def speedup(self, name: str, baseline: str) -> Quartiles:
        """Returns how many times faster than `baseline` the call `name` is, from ratios within a round."""
        pairs = zip(self.seconds[baseline], self.seconds[name], strict=True)
        return Quartiles.of([reference / seconds for reference, seconds in pairs])

    def noisy(self, found: Quartiles) -> bool:
        """Returns whether a median of these times, or of their ratios, is too uncertain to be quoted."""
        return found.error > MAX_ERROR or self.waited > MAX_WAITED


def time_rounds(
    calls: Mapping[str, Call],
    rounds: int,
    device: torch.device,
    sample_seconds: float = 0.02,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Times `calls` in turns: A B C, then C B A, and so on, so that drift affects all calls equally.

    A measurement repeats a short call until it lasts `sample_seconds`. A GPU is timed by CUDA events. An extra first
    round is dropped. Callers should warm the calls up.

    Args:
        clock: seconds on a CPU; `time.process_time` does not run while the process waits.
    """

    lengths = {name: elapsed(call, 1, device, clock)[0] for name, call in calls.items()}
    repeats = {name: max(1, math.ceil(sample_seconds / length)) for name, length in lengths.items()}
    seconds = {name: [] for name in calls}
    ran = total = 0.0
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            for name in calls if number % 2 else reversed(calls):
                measured, of_thread = elapsed(calls[name], repeats[name], device, clock)
                if number:
                    seconds[name].append(measured / repeats[name])
                    total += measured
                    ran += of_thread
    finally:
        gc.enable()
    return Times(seconds, 1 - ran / total if calls else 0.0)


def cpu_clock() -> Callable[[], float]:
    """Processor time if torch has one thread, else wall time."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def elapsed(call: Call, repeats: int, device: torch.device, clock: Callable[[], float]) -> tuple[float, float]:
    """Returns the seconds of `repeats` calls in a row, and the seconds for which this thread ran (on a GPU, all)."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return (start.elapsed_time(end) / 1000,) * 2
    start, ran = clock(), time.thread_time()
    for _ in range(repeats):
        call()
    ran = time.thread_time() - ran
    return clock() - start, ran


@contextmanager
def capturing() -> Iterator[Callable[[Call], Call]]:
    """Context of a function that captures the kernels that a call launches in a CUDA graph, and returns a call that
    launches them all at once, so that the host's time does not count. Captured calls share a pool of memory, and
    overwrite one another's results.

    The context has a stream of its own, since the default stream cannot be captured. Earlier calls of a network belong
    there too: autograd adds gradients up on the stream of the first forward pass.
    """
    pool = torch.cuda.graph_pool_handle()

    def captured(call: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, torch.cuda.current_stream()):
            call()
        return lambda kept=call: graph.replay()  # it reads the memory of the weights and inputs of `kept`

    with torch.cuda.stream(torch.cuda.Stream()):
        yield captured
    torch.cuda.synchronize()
