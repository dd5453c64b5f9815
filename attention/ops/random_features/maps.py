"""Maps of linear attention with gradients by hand: of features, x (..., h, N, d), and of its results."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...parts import features
from ..kernels import with_gradients


def of_both(feature_map: Callable[[Tensor], Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Features of queries and of keys, by one call of the map if their shapes are the same."""
    if q.shape != k.shape:
        return feature_map(q), feature_map(k)
    phi_q, phi_k = feature_map(torch.stack([q, k])).unbind()
    return phi_q, phi_k


elu_plus_one = with_gradients(lambda dy, y: (dy * y.clamp(max=1),), keep=lambda y, x: (y,))(features.elu_plus_one)


def _of_powers(dy: Tensor, y: Tensor, x: Tensor, scale: Tensor, power: Tensor) -> tuple[Tensor, ...]:
    products = (dy * y).unflatten(-1, (2, -1)).sum(-2)  # one of the two signs has none
    x = x.masked_fill(x == 0, 1)
    dpower = (products * (x / scale).abs_().log_()).sum_to_size(power.shape)
    products *= power
    return products / x, products.sum_to_size(scale.shape) / -scale, dpower


@with_gradients(_of_powers, keep=lambda y, *inputs: (y, *inputs))
def powers_by_sign(x: Tensor, scale: Tensor, power: Tensor) -> Tensor:
    """[ReLU(z)^power, ReLU(-z)^power], (..., h, N, 2 d), z = x / scale; scale > 0 and power > 1 (h, 1, d)."""
    z = x / scale
    return torch.cat([z, -z], -1).relu() ** torch.cat([power, power], -1)


def _of_focus(dy: Tensor, y: Tensor, x: Tensor, scale: Tensor, *, power: float) -> tuple[Tensor, Tensor]:
    floored, products = x.relu() + 1e-6, dy * y
    length = torch.linalg.vector_norm(y, dim=(-3, -1), keepdim=True)  # that of t, too
    total = products.sum((-3, -1), keepdim=True) / length.square()
    of_t = (floored / scale).square_().addcmul_(y, y, value=-power).mul_(total).add_(products, alpha=power)  # times t
    dscale = of_t.sum_to_size(scale.shape) / -scale
    return torch.ops.aten.threshold_backward(of_t.div_(floored), x, 0), dscale


@with_gradients(_of_focus, keep=lambda y, *inputs: (y, *inputs))
def focused(x: Tensor, scale: Tensor, *, power: float) -> Tensor:
    """t^power with the length of t over all heads, t = (ReLU(x) + 1e-6) / scale; scale > 0 (h, 1, d)."""
    t = (x.relu() + 1e-6) / scale
    raised = (t / t.amax((-3, -1), keepdim=True)) ** power  # at most 1 for any power
    length, after = (torch.linalg.vector_norm(y, dim=(-3, -1), keepdim=True) for y in (t, raised))
    return raised * (length / after)


def _of_waves(dy: Tensor, y: Tensor) -> tuple[Tensor]:
    (dsin, dcos), (sin, cos) = (x.tensor_split(2, -1) for x in (dy, y))
    return ((dsin * cos).addcmul_(dcos, sin, value=-1),)


@with_gradients(_of_waves, keep=lambda y, x: (y,))
def waves(x: Tensor) -> Tensor:
    """[sin x, cos x], (..., N, 2 s)."""
    return torch.cat([x.sin(), x.cos()], -1)


def _of_bounds(dy: Tensor, y: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    outside = dy * (y.abs() > bound)
    return dy - outside, (outside * y.sgn()).sum_to_size(bound.shape)


@with_gradients(_of_bounds, keep=lambda y, *inputs: inputs)
def within(y: Tensor, bound: Tensor) -> Tensor:
    """y, at least -bound and at most bound."""
    return y.clamp(-bound, bound)


def _of_log_features(dy: Tensor, x: Tensor, omega: Tensor) -> tuple[Tensor, Tensor | None]:
    domega = (dy.mT @ x).sum_to_size(omega.shape) if omega.requires_grad else None
    return torch.addcmul(dy @ omega, x, dy.sum(-1, keepdim=True), value=-1), domega


log_features = with_gradients(_of_log_features, keep=lambda y, *inputs: inputs)(features.log_features)
"""`attention.parts.features.log_features`, with its gradients by hand."""


def log_kernel(x: Tensor, omega: Tensor | None) -> Tensor:
    """Log features of queries or keys (..., h, N, d), whose mean product replaces exp(q . k / sqrt(d)) in Scatterbrain.

    Random features (..., h, N, s) at samples omega (h, s, d); without samples, elu + 1 of every channel, (..., N, d).
    """
    return x.clamp(max=0) + x.relu().log1p() if omega is None else log_features(features.scale(x), omega)
