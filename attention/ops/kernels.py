"""Fast paths: functions with the signature and the meaning of an op, for the arguments they cover.

An op is the definition; the decorator `with_fast_path` is the one place that replaces it by another function. The same
tests compare the op and its fast paths with the op's literal twin. The decorator comes first, above `full_precision`: a
fast path takes tensors in their own type and upcasts those that need it.

with kernels.use("plain"): ...   # the definitions themselves
with kernels.use("torch"): ...   # fast paths of PyTorch's operators
with kernels.use("triton"): ...  # fused kernels on a GPU, fast paths of PyTorch's operators for what they do not cover
with kernels.use("lean"): ...    # as "auto", by parts of the batch that the backward pass computes again

"auto", the default, is "triton" in half precision on GPUs where the kernels were measured (`MEASURED`), else "torch".
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch

from ..parts import transforms
from ..parts.features import autocast_off
from ..parts.transforms import exporting, in_graph, transformed
from . import memory

Op = TypeVar("Op", bound=Callable[..., Any])

Path = Literal["auto", "torch", "triton", "lean", "plain"]

MEASURED = {(9, 0)}
"""Compute capabilities of NVIDIA's GPUs on which Triton's kernels were measured: they are faster in half precision, and
slower in float32 (docs/speed.md).
"""

NAMESPACE = __package__.replace(".", "_")
"""Namespace of Triton's kernels among torch's operators: copies of this folder under other names have others."""
TRITON_MODULES: dict[str, str] = {}
"""Name of an op -> the module with its kernel, a function with the decorator `kernel`; filled by `with_fast_path`."""

_path: Path = "auto"
_fast: dict[str, Callable] = {}
_triton: dict[str, "Kernel"] = {}
_has_kernels = False
"""True once kernels are wanted: modules of ops that are imported later bring theirs."""


class Kernel(NamedTuple):
    """A function with the signature of an op, and the predicate of arguments that it takes."""

    run: Callable[..., Any]
    covers: Callable[..., bool]


def kernel(covers: Callable[..., bool]) -> Callable[[Op], Op]:
    """Decorates a function of an op's name: the path "triton" prefers it if `covers` is true of the arguments."""

    def decorate(run: Op) -> Op:
        _triton[run.__name__] = Kernel(run, covers)
        return run

    return decorate


def path() -> Path:
    """The path in use: "torch" takes fast paths, "triton" prefers kernels to them, "plain" takes none. "auto" is one of
    the first two. "lean" is "auto" with least memory: layers attend by parts of the batch, see `memory.by_parts`.
    """
    return _path


def measured(x: torch.Tensor) -> bool:
    """True if the tensor's GPU is one of `MEASURED`. Tests and counts replace this function."""
    return memory.on_gpu(x) and _measured(x.device.index)


@torch.compiler.assume_constant_result
def _measured(gpu: int | None) -> bool:
    return _measured_gpu(gpu)


@functools.cache
def _measured_gpu(gpu: int | None) -> bool:
    """True if Triton is installed and the GPU, by its index, is one of `MEASURED`; imports the kernels then."""
    known = torch.version.hip is None and importlib.util.find_spec("triton") is not None
    if known := known and torch.cuda.get_device_capability(gpu) in MEASURED:
        import_kernels()
    return known


def _prefers_kernels(x: torch.Tensor) -> bool:
    return _path == "triton" or (_path != "torch" and x.element_size() == 2 and measured(x))


def import_kernels() -> None:
    """Imports Triton and the modules of `TRITON_MODULES`, those of ops that are imported later included."""
    global _has_kernels
    for module in ("triton", *TRITON_MODULES.values()):
        importlib.import_module(module)
    _has_kernels = True


@contextlib.contextmanager
def use(path: Path) -> Iterator[None]:
    """Sets the path for calls inside the context, in all threads; checkpointed activations must be recomputed under the
    same path.

    Raises:
        ValueError: the path is unknown, or is "triton" and triton is not installed.
    """
    global _path
    if path not in get_args(Path):
        raise ValueError(f"kernels.use({path!r}): unknown path; one of {', '.join(get_args(Path))}")
    if path == "triton":
        try:
            import_kernels()
        except ModuleNotFoundError as error:
            raise ValueError(f"kernels.use('triton'): {error.name} is not installed; use 'torch'") from error
    before, _path = _path, path
    transforms.by_definition = path == "plain"
    try:
        yield
    finally:
        _path, transforms.by_definition = before, before == "plain"


def resolved() -> str:
    """The path in use and the imported ops that it serves, for logs."""
    if _path == "plain":
        return _path
    on_measured = _path in ("auto", "lean") and torch.cuda.is_initialized() and _measured_gpu(None)
    half = "" if _path == "triton" else " in half precision"
    on_gpu = f"on a GPU{half} Triton's {', '.join(TRITON_MODULES)}; " if _path == "triton" or on_measured else ""
    return f"{_path}: {on_gpu}fast {', '.join(sorted(_fast))}"


def by_path(attend: Op, projected: tuple[Any, ...], grid: Any, key_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Calls a layer's `attend_all`; with the path "lean" by parts of the batch, but not in graphs and transforms of
    torch.func.
    """
    if _path != "lean" or in_graph() or transformed():
        return attend(projected, grid, key_mask)
    return memory.by_parts(lambda *part: attend(part[:-1], grid, part[-1]), *projected, key_mask)


def first_order(backward: Op) -> Op:
    """Decorates the backward pass of a `torch.autograd.Function` that autograd must not follow.

    torch's own `once_differentiable` silently drops this path if another one leads to the same tensor.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("fast paths have no second derivatives; differentiate twice within kernels.use('plain')")
        if not torch.compiler.is_compiling() and any(map(_is_batched, gradients)):
            raise RuntimeError(
                "fast paths have no batched gradients (vectorize, is_grads_batched); use torch.func.jacrev, or"
                " differentiate within kernels.use('plain')"
            )
        return backward(ctx, *gradients)

    return cast(Op, run)


def _is_batched(gradient: torch.Tensor | None) -> bool:
    """True for several gradients in one tensor, as torch.autograd makes them with `vectorize` or `is_grads_batched`."""
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)


def with_fast_path(fast: Callable, covers: Callable[..., bool], triton: str | None = None) -> Callable[[Op], Op]:
    """Decorates an op, whose first argument is a tensor: calls `fast` in its place if `covers` is true of the arguments
    and the path is not "plain". The path "triton" prefers the kernel of the module `triton` if that covers them, and so
    do "auto" and "lean" in half precision on GPUs of `MEASURED`. Exported and traced graphs, transforms of torch.func
    and forward differentiation take the op itself.
    """

    def decorate(op: Op) -> Op:
        _fast[op.__name__] = fast
        if triton:
            TRITON_MODULES[op.__name__] = triton
            if _has_kernels:
                importlib.import_module(triton)

        @functools.wraps(op)
        def run(*args: Any, **kwargs: Any) -> Any:
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
            # exported and traced graphs must consist of torch's own operators; no fast path supports key masks
            of_torch = exporting() or torch.jit.is_tracing()
            if _path == "plain" or of_torch or transformed() or "key_mask" in kwargs:
                return op(*args, **kwargs)
            if triton and _prefers_kernels(args[0]) and _triton[op.__name__].covers(*args, **kwargs):
                return _triton[op.__name__].run(*args, **kwargs)
            return (fast if covers(*args, **kwargs) else op)(*args, **kwargs)

        return cast(Op, run)

    return decorate


def with_gradients(gradients: Callable[..., Any], keep: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[[Op], Op]:
    """Decorates an op of tensors: its gradients are by hand, but not in compiled graphs, whose compilers fuse it.

    Args:
        gradients: function of the gradients of the results, of what `keep` returns and of the op's keywords that
            returns the gradients of the arguments. keep: function of the results and the arguments that returns the
            tensors that the backward pass keeps.
    """

    def decorate(op: Op) -> Op:
        def fast(*args: torch.Tensor, **options: Any) -> Any:
            return ByHand.apply(op, gradients, keep, options, *args)

        return with_fast_path(fast, lambda *args, **options: not torch.compiler.is_compiling())(op)

    return decorate


class ByHand(torch.autograd.Function):
    """An op with the gradients of `with_gradients`; its value is that of the definition, to the bit."""

    @staticmethod
    def forward(ctx, op, gradients, keep, options, *args):
        results = op(*args, **options)
        ctx.save_for_backward(*keep(results, *args))
        ctx.gradients, ctx.options = gradients, options
        return results

    @staticmethod
    @first_order
    def backward(ctx, *of_results):
        with autocast_off(of_results[0]):
            return None, None, None, None, *ctx.gradients(*of_results, *ctx.saved_tensors, **ctx.options)
