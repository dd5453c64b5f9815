"""Times of two functions with the meaning of an op, in training on a GPU."""

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..parts.features import autocast_off

Clock = Callable[[Callable[[], object]], float]
"""Function of a call that makes it several times, and returns its milliseconds."""

WARM_UPS, CALLS = 3, 5
CYCLES = 4e9
"""Cycles for every second of the host's work for which a GPU waits meanwhile: twice as many as it makes in a second."""


def gpu_milliseconds(call: Callable[[], object]) -> float:
    """Least time (ms) of a call on the present GPU without the host's, as in a CUDA graph: the GPU waits until the host
    has launched `CALLS` calls.
    """
    for _ in range(WARM_UPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        of_host = time.perf_counter() - began
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(CYCLES * CALLS * of_host))
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in itertools.pairwise(events))


def speedup(
    clock: Clock, kernel: Callable[..., Any], other: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> float:
    """How many times as fast as `other` the function `kernel` is, in a forward and backward pass with these arguments.

    A function that fails, for instance because a GPU has too little memory for it, is infinitely slow, with a warning.
    """
    kernel_time, other_time = (_milliseconds(clock, function, args, kwargs) for function in (kernel, other))
    return other_time / kernel_time if kernel_time < torch.inf else 0.0


def _milliseconds(clock: Clock, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    def leaf(x: Any) -> Any:
        return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    def call() -> None:
        inputs, named = [leaf(x) for x in args], {name: leaf(x) for name, x in kwargs.items()}
        results = function(*inputs, **named)
        results = [y for y in (results if isinstance(results, tuple) else (results,)) if y.requires_grad]
        leaves = [x for x in (*inputs, *named.values()) if isinstance(x, Tensor) and x.requires_grad]
        if leaves:  # parameters that the function knows get no gradients
            with autocast_off(args[0]):
                torch.autograd.backward(results, [torch.ones_like(y) for y in results], inputs=leaves)

    try:  # without the hooks of activations that are computed again
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
            return clock(call)
    except Exception as error:
        warnings.warn(f"{getattr(function, '__qualname__', function)} fails here: {error}", stacklevel=2)
        return torch.inf
