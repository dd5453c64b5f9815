"""Feature maps of kernels, which make attention linear in the number of tokens.

Random features of the exponential kernel are kept as logarithms. With xi(x, omega) = exp(omega . x - ||x||^2 / 2) and
omega ~ N(0, I), E[xi(x, omega) xi(y, omega)] = exp(x . y) (Choromanski et al., 2021; EVA's and LARA's papers, eq. 1).
Feature maps take queries and keys scaled by d^(-1/4) each (`scale`): the variance of the estimate depends on ||q + k||,
so that the softmax scale cannot be put on one side only.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .transforms import exporting

Function = TypeVar("Function", bound=Callable[..., Any])

Normaliser = Literal["floor", "clamp", "sum", "mean", "none"]
"""Divisor of the sums of linear attention, see `attention.ops.random_features.op.linear_attention`."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The compute dtype: float32 for half types, otherwise the type of `x`."""
    return torch.float32 if x.is_floating_point() and x.element_size() < 4 else x.dtype


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 at least: half types become float32, float64 stays."""
    return x.to(compute_dtype(x))


def product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in float32 at least: logits of queries and keys.

    A product of float16 numbers can exceed the largest of them, 65504, so that they are upcast before; bfloat16 has the
    range of float32.
    """
    if torch.float16 not in (x.dtype, y.dtype):
        return upcast(x @ y)
    with autocast_off(x):
        return upcast(x) @ upcast(y)


def widened(logits: Tensor) -> Tensor:
    """Logits (..., n) with columns up to 16 whose weight is 0, on a CPU: PyTorch's softmax of shorter rows is not
    vectorised, and takes ten times as long.
    """
    missing = 16 - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-1e30) if missing > 0 and logits.device.type == "cpu" else logits


def autocast_off(x: Tensor) -> contextlib.AbstractContextManager:
    """Turns autocast off on the device of `x` if it may be on; torch.export.load cannot read every graph with autocast.

    It may be on in compiled graphs, because their backward pass runs under the autocast state of their callers.
    """
    compiles = torch.compiler.is_compiling() and not exporting()
    may_be_on = not x.is_meta and (compiles or torch.is_autocast_enabled(x.device.type))  # meta has no autocast
    return torch.autocast(x.device.type, enabled=False) if may_be_on else contextlib.nullcontext()


def full_precision(function: Function) -> Function:
    """Runs `function` with its tensors upcast and autocast off; results stay upcast.

    Exponentials, normalisers and random features overflow or lose their small terms in half types. Every function that
    computes them has this decorator, which alone decides about precision.
    """

    @functools.wraps(function)
    def run(first: Tensor, *arguments: Any, **options: Any) -> Any:
        upcasted = [upcast(x) if isinstance(x, Tensor) else x for x in (first, *arguments)]
        options = {name: upcast(x) if isinstance(x, Tensor) else x for name, x in options.items()}
        with autocast_off(first):
            return function(*upcasted, **options)

    return cast(Function, run)


def scale(x: Tensor) -> Tensor:
    """d^(-1/4) x: a query or key as a feature map takes it."""
    return x * x.shape[-1] ** -0.25


@full_precision
def log_features(x: Tensor, omega: Tensor) -> Tensor:
    """g(x, omega) = omega . x - ||x||^2 / 2, log xi: x (..., N, d), omega (..., s, d) -> (..., N, s)."""
    return torch.sub(x @ omega.mT, x.square().sum(-1, keepdim=True), alpha=0.5)


def xi(x: Tensor, omega: Tensor) -> Tensor:
    """The positive random feature exp(omega . x - |x|^2 / 2)."""
    return ((omega * x).sum(-1) - x.square().sum(-1) / 2).exp()


def phi(x: Tensor, omega: Tensor) -> Tensor:
    """Random features of tokens (B, h, N, d) at samples (h, s, d): (B, h, N, s)."""
    return xi(scale(x)[..., None, :], omega[:, None])


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 > 0, without the cancellation of (exp(x) - 1) + 1."""
    return x.clamp(max=0).exp() + x.relu()


def waves(x: Tensor, omega: Tensor) -> Tensor:
    """(sin, cos)(omega . x), (..., N, 2 s)."""
    projected = x @ omega.mT
    return torch.cat([projected.sin(), projected.cos()], -1)


def trigonometric(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """exp(||x||^2 / 2) (sin, cos)(omega . x), less exp(||q||^2 / 2) and exp(max ||k||^2 / 2), which cancel."""
    return waves(q, omega), waves(k, omega) * (relative_size(k) / omega.shape[-2])


def trigonometric_released(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """`trigonometric` with exp(||q||^2 / 2 - max ||q||^2 / 2), which does not cancel under a clamped normaliser."""
    phi_q, phi_k = trigonometric(q, k, omega)
    return phi_q * relative_size(q), phi_k


def relative_size(x: Tensor) -> Tensor:
    """exp(||x||^2 / 2) over its largest value, which has no gradient: (..., N, d) -> (..., N, 1)."""
    half = x.square().sum(-1, keepdim=True) / 2
    return (half - half.amax(-2, keepdim=True).detach()).exp()


def relu(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """ReLU(s^(-1/2) omega . x) + 1e-3: generic linear attention."""
    omega = omega * omega.shape[-2] ** -0.5
    return (q @ omega.mT).relu() + 1e-3, (k @ omega.mT).relu() + 1e-3


def positive_logs(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """omega . x - ||x||^2 / 2: for queries (..., N, s), without ||q||^2 / 2, which cancels; for keys (..., s, M)."""
    return q @ omega.mT, log_features(k, omega).mT


def hyperbolic_logs(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """`positive_logs` at omega and -omega: (..., N, 2 s) and (..., 2 s, M)."""
    log_q, log_k, half = q @ omega.mT, omega @ k.mT, k.square().sum(-1)[..., None, :] / 2
    return torch.cat([log_q, -log_q], -1), torch.cat([log_k, -log_k], -2) - half


def favorp(q: Tensor, k: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """s^(-1/2) exp(g(x, omega) - max) + 1e-4, with the maximum of omega . x over samples, for keys over tokens too."""

    def positive(x: Tensor, over: int | tuple[int, int]) -> Tensor:
        projected, half = x @ omega.mT, x.square().sum(-1, keepdim=True) / 2
        largest = projected.amax(over, keepdim=True).detach()
        return (projected - half - largest).exp() * omega.shape[-2] ** -0.5 + 1e-4

    return positive(q, -1), positive(k, (-2, -1))


LOG_FEATURE_MAPS = {"positive": positive_logs, "hyperbolic": hyperbolic_logs}
"""Features that are positive, kept as logarithms."""
FEATURE_MAPS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], Normaliser, float]] = {
    "trigonometric": (trigonometric, "floor", 1e-6),
    "trigonometric_released": (trigonometric_released, "clamp", 1e-2),
    "relu": (relu, "floor", 1e-12),  # below the weight of any single key
    "relu_released": (relu, "clamp", 1e-2),
    "favorp": (favorp, "floor", 1e-2),
}
"""Features that can vanish or turn negative: feature map, kind of normaliser, and its least value."""
CAUSAL = ("positive", "hyperbolic", "relu")
"""Features for causal attention: the features of a key do not depend on a maximum over all keys."""
CLAMPED = ("trigonometric", "relu")
"""Features with a `_released` variant, whose normalisers have the floor of the released code."""
