"""Memory: the peak of a call, the tensors that its graph keeps, a limit above which allocations are refused."""

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

from engine.runtime.errors import UserError


@contextmanager
def memory_permitting() -> Iterator[None]:
    """Context that ends silently if memory runs out; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise


@contextmanager
def refuse_too_large(remedy: str) -> Iterator[None]:
    """Context that raises a UserError with `remedy` if memory runs out."""
    with memory_permitting():
        yield
        return
    raise UserError(f"out of memory; {remedy}")


@contextmanager
def limit_memory(device: torch.device) -> Iterator[None]:
    """Context in which allocations beyond the main memory that is free now fail.

    Linux would grant them and kill the process when it uses them. On other systems, and on a GPU, this does nothing.
    """
    if device.type != "cpu" or not Path("/proc/meminfo").exists():
        yield
        return
    free = _kilobytes("MemAvailable", Path("/proc/meminfo"))
    used = _kilobytes("VmData", Path("/proc/self/status"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = (1024 * (free + used), soft, hard)
    limit = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _kilobytes(name: str, file: Path) -> int:
    """Returns the number (kB) after `name` in a file of Linux's proc file system."""
    found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    assert found is not None, f"{file} has no {name}"
    return int(found[1])


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Returns the peak of allocated memory during the call, above the memory allocated before it.

    Allocations by torch's allocator count, including those of kernels; allocations by other libraries do not.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # without a GPU the profiler reports errors
    # acc_events: torch 2.11 warns without it.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@contextmanager
def saved_storages() -> Iterator[dict[int, torch.UntypedStorage]]:
    """Context that yields the storages, by address, that graphs made inside it save for a backward pass.

    That backward pass cannot run. A hook that handed the tensors back to the graph would make a cycle of them, which
    is never freed, wherever an operator saves its own result.
    """
    saved = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # kept alive, so that no address is used twice

    with saved_tensors_hooks(note, lambda nothing: nothing):
        yield saved


def saved_bytes(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Returns the bytes of memory that the result of `forward` keeps alive for its backward pass.

    Storages count once and as a whole; the storages of inputs count, the storages of `parameters` do not.
    """
    with saved_storages() as saved:
        forward()
    for parameter in parameters:
        saved.pop(parameter.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in saved.values())


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether `error` means that memory ran out; on a CPU torch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
