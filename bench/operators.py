"""Operators of a call: the bytes that each reads and writes, its arithmetic, and the memory of their results."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from attention.ops import kernels, memory, products
from attention.ops.kernels import NAMESPACE
from attention.parts import tables

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
OVERWRITING = {"copy_", "fill_", "zero_"}
"""In-place operators that overwrite a tensor without reading it."""
PARTIAL = {"embedding", "gather", "index", "index_select"}
"""Operators that read as many elements of their first argument as they return."""
SEARCHES = {"argmax", "argmin", "max", "min", "searchsorted", "sort", "topk"}
"""Operators whose work is in comparisons."""
FUSED = "scaled_dot_product"
"""Part of the name of softmax attention as one operator, and of its backward pass."""


class Operator(NamedTuple):
    """A call of an operator of PyTorch.

    Attributes:
        name: without namespace and overload. nbytes: bytes that it reads and writes; a broadcast element counts once.
        flops: operations of matrix products and convolutions, two for each multiply-accumulate.
        elements: elements of its largest tensor; for fused attention the number of weights.
        dtype: of the first tensor that it reads or, without one, writes.
    """

    name: str
    nbytes: int
    flops: int
    elements: int
    dtype: torch.dtype

    @property
    def is_fused_attention(self) -> bool:
        """True for softmax attention as one operator, and for its backward pass."""
        return FUSED in self.name


class OperatorCounter(TorchDispatchMode):
    """Context that notes all operators but views and allocations; works on fake tensors too.

    Tables that layers keep are not noted, nor are constants, which depend on no tensor from outside, on no table and on
    no random number.
    An operator with several kernels counts once. Operators are PyTorch's own and the project's Triton kernels.

    Attributes:
        found: the operators. peak_bytes: peak of the memory that was allocated in the context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operator] = []
        self.peak_bytes = self._live = 0
        self._known: dict[int, object] = {}
        self._constants: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace not in ("aten", NAMESPACE):
            return function(*args, **kwargs)
        with self:  # in inference mode composite operators arrive as a whole
            result = function.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = function(*args, **kwargs)
            self._note(function, args, kwargs, result)
        return result

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if function.is_view or _makes_table():
            return
        name, operators = function._schema.name.partition("::")[2], getattr(torch.ops, function.namespace)
        read, written = [], []
        for number, argument in enumerate(function._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
            changes = argument.alias_info is not None and argument.alias_info.is_write
            written += tensors if changes else []
            ignored = argument.is_out if changes else argument.name == "self" and kwargs.get("beta") == 0
            read += [] if ignored or (changes and name in OVERWRITING) else tensors
        storages = {_key(x) for x in (*read, *written)}
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor) and _key(x) not in storages]
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        constant = name not in ALLOCATIONS and not is_random and storages <= self._constants
        for x in results:
            self._allocate(x.untyped_storage(), constant)
        if not constant:
            self._constants.difference_update(map(_key, written))
        if constant or name in ALLOCATIONS or not (results or written):  # an allocation, or a copy that was not needed
            return
        written += results
        sizes = [*map(_bytes, read), *map(_bytes, written)]
        if name in PARTIAL:
            sizes[0] = min(sizes[0], sum(map(_bytes, written)))
        flops, elements = 0, max(x.numel() for x in (*read, *written))
        if FUSED in name:
            backward = "backward" in name
            q, k, v = read[1:4] if backward else read[:3]
            elements = q[..., 0].numel() * k.shape[-2]
            flops = 2 * elements * (3 * q.shape[-1] + 2 * v.shape[-1] if backward else q.shape[-1] + v.shape[-1])
        elif name == "convolution_backward":  # torch's own count is wrong for groups
            y, x, weight = read[:3]
            flops = 2 * conv_flop_count(x.shape, weight.shape, y.shape, transposed=args[7])
        elif (product := getattr(operators, name.rstrip("_"), None)) in flop_registry:  # in place too
            of_product = [each for each in args if not isinstance(each, torch.dtype)]  # torch 2.11 takes no out_dtype
            flops = flop_registry[product](*of_product, **kwargs, out_val=result)
        self.found.append(Operator(name, sum(sizes), flops, elements, (read or written)[0].dtype))

    def _allocate(self, storage: torch.UntypedStorage, constant: bool) -> None:
        if storage._cdata in self._known:
            return
        if constant:
            self._constants.add(storage._cdata)
        size = storage.nbytes()
        self._live += size
        self.peak_bytes = max(self.peak_bytes, self._live)
        self._known[storage._cdata] = weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._live -= size
        del self._known[key]
        self._constants.discard(key)


def count_operators(call: Callable[[], object]) -> list[Operator]:
    """Returns the operators of a call, on the paths that tensors off a CPU take: without chunks for its caches."""
    with off_cpu(), OperatorCounter() as counter:
        call()
    return counter.found


@contextmanager
def off_cpu(has_kernels: bool = False) -> Iterator[None]:
    """Context in which fast paths work as on a GPU, for fake tensors with `has_kernels` as on one that runs Triton's.
    They take a GPU's product of bfloat16, and Triton's kernels; others compute the same value by operators of a CPU.
    """
    of_gpu, known = products.sum_in_full, kernels.has_kernels
    if has_kernels:
        kernels.import_kernels()

    def sum_in_full(a: Tensor, b: Tensor) -> Tensor:
        return of_gpu(a, b) if isinstance(a, FakeTensor) else torch.bmm(a.float(), b.float())

    with (
        patch.object(memory, "on_cpu", lambda x: False),
        patch.object(memory, "on_gpu", lambda x: x.is_cuda or isinstance(x, FakeTensor)),
        patch.object(kernels, "has_kernels", lambda x: has_kernels if isinstance(x, FakeTensor) else known(x)),
        patch.object(products, "sum_in_full", sum_in_full),
    ):
        yield


def searches(operators: Iterable[Operator], tokens: int) -> bool:
    """Returns whether one of `SEARCHES` compares as many elements as there are tokens, or more: MACs leave this out."""
    return any(each.elements >= tokens for each in operators if each.name in SEARCHES)


def _makes_table() -> bool:
    """True within a function whose results layers keep (`kept_table`); fake tensors call it every time."""
    return any(frame.f_code.co_filename == tables.__file__ for frame, _ in walk_stack(None))


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _bytes(x: Tensor) -> int:
    return x.element_size() * math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step or not n)
