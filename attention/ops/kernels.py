"""Fast paths: functions with the signature and the meaning of an op, for the arguments they cover.

An op is the definition; the decorator `with_fast_path` is the one place that replaces it by another function. The same
tests compare the op and its fast paths with the op's literal twin. The decorator comes first, above `full_precision`: a
fast path takes tensors in their own type and upcasts those that need it.

with kernels.use("plain"): ...   # the definitions themselves
with kernels.use("torch"): ...   # fast paths of PyTorch's operators
with kernels.use("triton"): ...  # fused kernels on a GPU, fast paths of PyTorch's operators for what they do not cover

"auto", the default, takes for each call the faster of "triton" and "torch" where both were timed, as train.py does. For
others it is "triton" in half precision on NVIDIA's GPUs from `LOWEST_CAPABILITY` on, else "torch".
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch

from ..parts import transforms
from ..parts.features import autocast_off
from ..parts.transforms import exporting, transformed
from . import memory
from .timing import Clock, speedup

Op = TypeVar("Op", bound=Callable[..., Any])

Path = Literal["auto", "torch", "triton", "plain"]

LOWEST_CAPABILITY = (8, 0)
"""Lowest compute capability of NVIDIA's GPUs that Triton's kernels are for. On (9, 0) they were measured: they are
faster in half precision, and slower in float32 (docs/speed.md).
"""

NAMESPACE = __package__.replace(".", "_")
"""Namespace of Triton's kernels among torch's operators: copies of this folder under other names have others."""
TRITON_MODULES: dict[str, str] = {}
"""Name of an op -> the module with its kernel, a function with the decorator `kernel`; filled by `with_fast_path`."""

_path: Path = "auto"
_speedups: dict[str, float] = {}
"""Signature of a call -> how many times as fast as PyTorch's operators Triton's kernel is."""
_clock: Clock | None = None
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


def offer(op: str, module: str) -> None:
    """Names the module with the Triton kernel of an op."""
    TRITON_MODULES[op] = module
    if _has_kernels:
        importlib.import_module(module)


def path() -> Path:
    """The path in use: "torch" takes fast paths, "triton" prefers kernels to them, "plain" takes none. "auto" is one of
    the first two.
    """
    return _path


def takes_kernels(x: torch.Tensor) -> bool:
    """True if the path in use takes Triton's kernels for some calls with this tensor; `prefer` chooses for each."""
    return _path == "triton" or (_path == "auto" and has_kernels(x))


def has_kernels(x: torch.Tensor) -> bool:
    """True if the tensor's GPU runs Triton's kernels. Tests and counts replace this function."""
    return memory.on_gpu(x) and _has_kernels_on(x.device.index)


@torch.compiler.assume_constant_result
def _has_kernels_on(gpu: int | None) -> bool:
    return refusal_of(gpu) is None


@functools.cache
def refusal_of(gpu: int | None) -> str | None:
    """The reason why the GPU, by its index, runs no kernels of Triton; None if it does, and they are imported then."""
    if torch.version.hip is not None:
        return "kernels are for NVIDIA's GPUs"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if (capability := torch.cuda.get_device_capability(gpu)) < LOWEST_CAPABILITY:
        here, lowest = (f"{major}.{minor}" for major, minor in (capability, LOWEST_CAPABILITY))
        return f"kernels need compute capability {lowest}, and this GPU has {here}"
    import_kernels()
    return None


def prefer(op: str, kernel: Callable[..., Any], other: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `kernel` or `other`, two functions of one meaning, with the arguments, of which the first is a tensor.

    Call it where `takes_kernels` is true, and `kernel` covers the arguments. The path "triton" takes the kernel, others
    the faster function by `use`; in calls that were not timed, the kernel in half precision.

    Args:
        op: name of what both compute, for the signature of the call.
    """
    x = args[0]
    if _clock and (key := signature(op, x.shape[1:], x.dtype)) not in _speedups:
        _speedups[key] = speedup(_clock, kernel, other, args, kwargs)
    in_half, shape = x.element_size() == 2, tuple(x.shape[1:])
    is_preferred = _path == "triton" or (_is_faster(op, shape, x.dtype) if _speedups else in_half)
    return (kernel if is_preferred else other)(*args, **kwargs)


def signature(op: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Key of a call in a table of speed-ups: the name of the op, and shape and type of an image's first tensor."""
    return f"{op} {'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"


@torch.compiler.assume_constant_result
def _is_faster(op: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    found = _speedups.get(signature(op, shape, dtype))
    return dtype.itemsize == 2 if found is None else found > 1


def covering(op: str, x: torch.Tensor, *args: Any) -> Callable[..., Any] | None:
    """The kernel of an op that only a kernel has, for `prefer`; None if the path in use takes none, or the kernel does
    not cover the arguments.
    """
    if follows_torch() or not takes_kernels(x) or not _triton[op].covers(x, *args):
        return None
    return _triton[op].run


def follows_torch() -> bool:
    """True in exported and traced graphs and in transforms of torch.func, which consist of torch's own operators."""
    return exporting() or torch.jit.is_tracing() or transformed()


def import_kernels() -> None:
    """Imports Triton and the modules of `TRITON_MODULES`, those of ops that are imported later included."""
    global _has_kernels
    for module in ("triton", *TRITON_MODULES.values()):
        importlib.import_module(module)
    _has_kernels = True


@contextlib.contextmanager
def use(path: Path, speedups: dict[str, float] | None = None, clock: Clock | None = None) -> Iterator[None]:
    """Sets the path for calls inside the context, in all threads; checkpointed activations must be recomputed under the
    same path.

    Args:
        speedups: signature of a call -> how many times as fast as PyTorch's operators Triton's kernel is; decides for
            the path "auto".
        clock: times calls that are not in `speedups`, and adds them; compiled graphs cannot.
    Raises:
        ValueError: the path is unknown, or is "triton" and triton is not installed.
    """
    global _path, _speedups, _clock
    if path not in get_args(Path):
        raise ValueError(f"kernels.use({path!r}): unknown path; one of {', '.join(get_args(Path))}")
    if path == "triton":
        try:
            import_kernels()
        except ModuleNotFoundError as error:
            raise ValueError(f"kernels.use('triton'): {error.name} is not installed; use 'torch'") from error
    before = _path, _speedups, _clock
    _path, _speedups, _clock = path, {} if speedups is None else speedups, clock
    transforms.by_definition = path == "plain"
    try:
        yield
    finally:
        _path, _speedups, _clock = before
        transforms.by_definition = _path == "plain"


def resolved() -> str:
    """The path in use and the calls or the imported ops that it serves, for logs."""
    if _path == "plain":
        return _path
    if _path == "auto" and _speedups:
        taken = (f"{'triton' if x > 1 else 'torch'} for {key} ({x:.2f}x)" for key, x in sorted(_speedups.items()))
        return f"{_path}: {', '.join(taken)}; fast {', '.join(sorted(_fast)) or 'none'}"
    runs_kernels = _path == "triton" or (_path == "auto" and torch.cuda.is_initialized() and refusal_of(None) is None)
    on_gpu = f"on a GPU in half precision Triton's {', '.join(TRITON_MODULES)}; " if runs_kernels else ""
    return f"{_path}: {on_gpu}fast {', '.join(sorted(_fast)) or 'none'}"


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


def with_fast_path(
    fast: Callable, covers: Callable[..., bool] = lambda *_, **__: True, triton: str | None = None
) -> Callable[[Op], Op]:
    """Decorates an op, whose first argument is a tensor: calls `fast` in its place if `covers` is true of the arguments
    and the path is not "plain". The path "triton" prefers the kernel of the module `triton` if that covers them, and so
    does "auto" where `prefer` does. Exported and traced graphs, transforms of torch.func and forward
    differentiation take the op itself.
    """

    def decorate(op: Op) -> Op:
        _fast[op.__name__] = fast
        if triton:
            offer(op.__name__, triton)

        def by_torch(*args: Any, **kwargs: Any) -> Any:
            return (fast if covers(*args, **kwargs) else op)(*args, **kwargs)

        @functools.wraps(op)
        def run(*args: Any, **kwargs: Any) -> Any:
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
            if _path == "plain" or follows_torch() or "key_mask" in kwargs:  # no fast path supports key masks
                return op(*args, **kwargs)
            if triton and takes_kernels(args[0]) and _triton[op.__name__].covers(*args, **kwargs):
                return prefer(op.__name__, _triton[op.__name__].run, by_torch, *args, **kwargs)
            return by_torch(*args, **kwargs)

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
