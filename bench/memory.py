"""What a call needs of memory: its peak, what its graph keeps; and a limit, within which too much of it is refused."""

import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from bench.timing import Call
from engine.failure import is_out_of_memory


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
    used = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = (1024 * (int(free[1]) + int(used[1])), soft, hard)
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
