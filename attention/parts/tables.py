"""Constant tables of grids, windows and groups, made once on the CPU and cached on every device that uses them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

MAX_KEPT = 64
"""Number of cached tables of each kind; the least recently used are dropped first."""

_held: list[list[Any]] = []


def kept_table(make: Callable) -> Callable:
    """Caches the results of `make`, a function of hashable arguments, one of them the device, that returns a tensor, or
    a NamedTuple of tensors and other constants.

    Calls with equal arguments share one result, which must not be changed in place. It is an ordinary tensor, usable in
    training even if it was first made in inference mode. Compiled, exported and traced graphs, fake tensors and
    transforms of torch.func make tables of their own on the device, which are not cached.
    """

    @functools.lru_cache(maxsize=MAX_KEPT)
    def keep(device: torch.device, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            on_cpu = (torch.device("cpu") if isinstance(x, torch.device) else x for x in args)
            return _to(device, make(*on_cpu, **kwargs))

    @functools.wraps(make)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or _holds_no_data():
            return make(*args, **kwargs)
        table = keep(next(x for x in args if isinstance(x, torch.device)), *args, **kwargs)
        for tables in _held:
            tables.append(table)
        return table

    vars(run)["kept"] = keep.cache_info
    return run


@contextlib.contextmanager
def held_tables() -> Iterator[list[Any]]:
    """Context of a list of all cached tables that are used inside it. CUDA graphs read their memory later."""
    tables: list[Any] = []
    _held.append(tables)
    try:
        yield tables
    finally:
        _held.pop()


def _holds_no_data() -> bool:
    """True if a tensor made now would be a fake tensor or belong to a transform of torch.func."""
    return detect_fake_mode() is not None or torch._C._are_functorch_transforms_active()


def _to(device: torch.device, table: Any) -> Any:
    if isinstance(table, Tensor):
        return table.to(device)
    return table._make(x.to(device) if isinstance(x, Tensor) else x for x in table)
