"""Fast paths: functions with the signature and the meaning of an op, for the arguments they cover.

An op stays in the file of its mechanism as the definition; `with_fast_path` above it is the one place where another
function may answer for it. Every fast path is held to the op's literal twin by the same tests as the op.

with kernels.use("plain"): ...   # the definitions themselves
with kernels.use("lean"): ...    # fast paths that save less for the backward pass and compute it again
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch

Path = Literal["auto", "lean", "plain"]

_path: Path = "auto"
_fast: dict[str, Callable] = {}


def path() -> Path:
    """The path in use: "auto" takes fast paths, "lean" those that keep least memory, "plain" none."""
    return _path


@contextlib.contextmanager
def use(path: Path) -> Iterator[None]:
    """Sets the path for the calls inside, of all threads; what is checkpointed there must be recomputed under it.

    Raises:
        ValueError: an unknown path.
    """
    global _path
    if path not in get_args(Path):
        raise ValueError(f"kernels.use({path!r}): unknown path; one of {', '.join(get_args(Path))}")
    before, _path = _path, path
    try:
        yield
    finally:
        _path = before


def resolved() -> str:
    """The path in use and the ops that it serves, for logs."""
    return _path if _path == "plain" else f"{_path}: fast {', '.join(sorted(_fast))}"


def first_order(backward: Callable) -> Callable:
    """Decorates the backward pass of a `torch.autograd.Function` that autograd must not follow.

    torch's own `once_differentiable` leaves such a path out, silently, where another one leads to the same tensor.
    """

    @functools.wraps(backward)
    def run(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError("fast paths have no second derivatives; differentiate twice within kernels.use('plain')")
        return backward(ctx, *gradients)

    return run


def with_fast_path(fast: Callable, covers: Callable[..., bool]) -> Callable:
    """Decorates an op: `fast` answers for it where `covers` its arguments, unless the path is plain."""

    def decorate(op: Callable) -> Callable:
        _fast[op.__name__] = fast

        @functools.wraps(op)
        def run(*args, **kwargs):
            return (fast if _path != "plain" and covers(*args, **kwargs) else op)(*args, **kwargs)

        return run

    return decorate
