"""Operators of a call, and the bytes that they move."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention.ops import memory, products
from attention.ops.kernels import NAMESPACE


class OperatorCounter(TorchDispatchMode):
    """Context that notes all operators but views, allocations and constants, which depend on no tensor from outside and
    on no random number; works on fake tensors too.

    An operator with several kernels counts once. Operators are PyTorch's own and the project's Triton kernels.

    Attributes:
        found: their names, without namespace and overload. nbytes: bytes that they read and write; a broadcast element
            counts once, and a lookup its whole table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.nbytes = 0
        self._constants: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is used twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace not in ("aten", NAMESPACE):
            return function(*args, **kwargs)
        with self:  # in inference mode composite operators arrive as a whole
            result = function.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = function(*args, **kwargs)
            name = function._schema.name.partition("::")[2]
            read, made = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), result))
            inputs, outputs = ({x.untyped_storage()._cdata: x.untyped_storage() for x in each} for each in (read, made))
            is_random, is_mutable = torch.Tag.nondeterministic_seeded in function.tags, function._schema.is_mutable
            if name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"):
                pass
            elif inputs.keys() <= self._constants.keys() and not is_random:
                self._constants |= outputs
            elif is_mutable or not outputs.keys() <= inputs.keys():  # else a view
                self.found.append(name)
                self.nbytes += sum(map(moved, (*read, *made)))
                for key in inputs if is_mutable else ():
                    self._constants.pop(key, None)
        return result


def moved(x: Tensor) -> int:
    """Bytes of a tensor; a broadcast element counts once."""
    return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


def count_operators(call: Callable[[], object]) -> OperatorCounter:
    """Counts the operators of a call, on the paths that tensors off a CPU take: without chunks for its caches."""
    with off_cpu(), OperatorCounter() as counter:
        call()
    return counter


@contextmanager
def off_cpu() -> Iterator[None]:
    """Context in which fast paths work as on a GPU, without Triton's kernels and with a CPU's product of bfloat16."""
    with (
        patch.object(memory, "on_cpu", lambda x: False),
        patch.object(products, "sum_in_full", lambda a, b: torch.bmm(a.float(), b.float())),
    ):
        yield
