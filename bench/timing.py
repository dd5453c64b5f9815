"""What a call costs: time against other calls, in interleaved rounds; peak memory, saved bytes, kernel launches."""

import gc
import math
import os
import re
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from engine.failure import is_out_of_memory

Call = Callable[[], object]

MAX_ERROR = 0.03
"""Largest relative standard error of a median that does not count as noise."""
MAX_WAITED = 0.05
"""Largest share of the time on a CPU for which the measuring thread may have been kept from running."""


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one quantity.

    Attributes:
        median, low, high: median, first and third quartile. error: standard error of the median over the median, from
            the quartiles as of a normal distribution: 0.93 (high - low) / sqrt(count).
    """

    median: float
    low: float
    high: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least two values."""
        low, median, high = statistics.quantiles(values, method="inclusive")
        return cls(median, low, high, 0.93 * (high - low) / math.sqrt(len(values)) / median)


@dataclass(frozen=True)
class Times:
    """What several calls took in the same rounds.

    Attributes:
        seconds: name of a call -> its seconds in every round.
        waited: share of that time in which the calling thread did not run, because other programs took the processor;
            0 on a GPU, where it may sleep.
    """

    seconds: dict[str, list[float]]
    waited: float

    def speedup(self, name: str, baseline: str) -> Spread:
        """How many times faster than `baseline` the call `name` is, by the ratios of two times of the same round."""
        pairs = zip(self.seconds[baseline], self.seconds[name], strict=True)
        return Spread.of([reference / own for reference, own in pairs])

    def noisy(self, spread: Spread) -> bool:
        """Whether a median of these times, or of their ratios, is too uncertain to be quoted."""
        return spread.error > MAX_ERROR or self.waited > MAX_WAITED


def time_rounds(calls: Mapping[str, Call], rounds: int, device: torch.device, sample_seconds: float = 0.02) -> Times:
    """Times `calls` in turns: A B C, then C B A, and so on, so that drift meets all of them alike.

    A measurement repeats a short call until it lasts `sample_seconds`, by CUDA events on a GPU. One more round comes
    first and is dropped. Calls should have been made a few times before.
    """
    repeats = {name: max(1, math.ceil(sample_seconds / clock(call, 1, device))) for name, call in calls.items()}
    seconds = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            if number == 1:
                began, ran = time.perf_counter(), time.thread_time()
            for name in calls if number % 2 else reversed(calls):
                seconds[name].append(clock(calls[name], repeats[name], device))
        waited = 1 - (time.thread_time() - ran) / (time.perf_counter() - began)
    finally:
        gc.enable()
    return Times({name: samples[1:] for name, samples in seconds.items()}, waited if device.type == "cpu" else 0.0)


def clock(call: Call, repeats: int, device: torch.device) -> float:
    """Seconds of one of `repeats` calls in a row."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


@contextmanager
def memory_permitting() -> Iterator[None]:
    """Inside it, memory that does not suffice ends the block, and nothing else."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise


@contextmanager
def limit_memory(device: torch.device) -> Iterator[None]:
    """Inside it, what does not fit into the main memory that is free now is refused to this process.

    Linux would grant it, and end the process once it is used. Elsewhere, and on a GPU, it does nothing.
    """
    if device.type != "cpu" or not Path("/proc/meminfo").exists():
        yield
        return
    free = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    own = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = (1024 * (int(free[1]) + int(own[1])), soft, hard)
    limit = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def peak_bytes(call: Call, device: torch.device) -> int:
    """The most memory that was allocated at one time during the call, beyond what was allocated before it.

    By torch's allocator: what kernels ask it for counts, what libraries allocate by themselves does not.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports errors where there is no GPU
    # acc_events: torch 2.11 warns without it.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def saved_bytes(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes of memory that the result of `forward` keeps alive for its backward pass.

    Storages count once and as a whole; those of inputs count, those of `parameters` do not.
    """
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()  # alive until the addresses are compared, so that none is used twice
    for parameter in parameters:
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del result
    return sum(kept.values())


def count_launches(call: Call, device: torch.device) -> int | None:
    """CUDA kernels that the call launches; None on a CPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize(device)
    launches = ("cudaLaunchKernel", "cuLaunchKernel")  # of the runtime and of the driver (Triton), in all variants
    return sum(event.count for event in profiler.key_averages() if event.key.startswith(launches))
