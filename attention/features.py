"""Random features of the exponential kernel, kept as logarithms, and the draws they are evaluated at.

With xi(x, omega) = exp(omega . x - ||x||^2 / 2) and omega ~ N(0, I), E[xi(x, omega) xi(y, omega)] = exp(x . y)
(Choromanski et al., 2021; papers 000 and 001, eq. 1). Queries and keys come here scaled by d^(-1/4) each (`scale`): the
variance of the estimate depends on ||q + k||, so that the softmax scale cannot be put on one side only.
"""

import functools
import math
from typing import Literal

import torch
from torch import Tensor

Draws = Literal["iid", "orthogonal", "orthogonal_sqrt_d"]


def full_type(x: Tensor) -> torch.dtype:
    """The type to compute with: float32 for half types, else that of `x`."""
    return torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 at least: half types become float32, float64 stays."""
    return x.to(full_type(x))


def full_precision(function):
    """Runs `function` with its tensors upcast and autocast off; results stay upcast.

    Exponentials, normalisers and random features overflow or lose their small terms in half types. Every function that
    has them wears this decorator, and nothing else decides about precision.
    """

    @functools.wraps(function)
    def run(first: Tensor, *arguments, **options):
        arguments = [upcast(x) if isinstance(x, Tensor) else x for x in (first, *arguments)]
        options = {name: upcast(x) if isinstance(x, Tensor) else x for name, x in options.items()}
        if first.is_meta:  # has no autocast
            return function(*arguments, **options)
        with torch.autocast(first.device.type, enabled=False):
            return function(*arguments, **options)

    return run


def scale(x: Tensor) -> Tensor:
    """d^(-1/4) x: what a query or key is to a feature map."""
    return x * x.shape[-1] ** -0.25


@full_precision
def log_features(x: Tensor, omega: Tensor) -> Tensor:
    """g(x, omega) = omega . x - ||x||^2 / 2, log xi: x (..., N, d), omega (..., s, d) -> (..., N, s)."""
    return x @ omega.mT - x.square().sum(-1, keepdim=True) / 2


def xi(x: Tensor, omega: Tensor) -> Tensor:
    """The positive random feature exp(omega . x - |x|^2 / 2)."""
    return ((omega * x).sum(-1) - x.square().sum(-1) / 2).exp()


def phi(x: Tensor, omega: Tensor) -> Tensor:
    """Random features of tokens (B, h, N, d) at samples (h, s, d): (B, h, N, s)."""
    return xi(scale(x)[..., None, :], omega[:, None])


@full_precision
def mix_features(log_q: Tensor, log_k: Tensor, v: Tensor) -> Tensor:
    """Ratio of sums sum_sm exp(log_q_ns + log_k_sm) v_m / sum_sm exp(log_q_ns + log_k_sm), as two nested softmaxes.

    It equals paper 001 eq. 2 and 10 exactly, needs no epsilon and cannot overflow.

    Args:
        log_q: (..., N, s), up to a constant per query. log_k: (..., s, M). v: (..., M, d).
    Returns:
        (..., N, d).
    """
    return (log_q + log_k.logsumexp(-1)[..., None, :]).softmax(-1) @ (log_k.softmax(-1) @ v)


@full_precision
def random_feature_attention(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, log_weight: Tensor | float = 0.0
) -> Tensor:
    """Self-normalised estimate of attention from samples that all queries share (paper 001 eq. 2; with weights eq. 10).

    Args:
        q, k: scaled queries (..., N, d) and keys (..., M, d). v: (..., M, d). omega: (..., s, d).
        log_weight: log importance weight of sample s for query n, (..., N, s).
    Returns:
        (..., N, d). Cost: 4 N s d multiply-accumulates at M = N.
    """
    return mix_features(q @ omega.mT + log_weight, log_features(k, omega).mT, v)


@full_precision
def linear_attention(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, floor: float = 1e-6, num_clamped: Tensor | None = None
) -> Tensor:
    """Attention of the kernel phi_q . phi_k, sums over keys taken once: sum_m (phi_q_n . phi_k_m) v_m over their sum.

    Args:
        phi_q: features (..., N, f) of queries. phi_k: (..., M, f). v: (..., M, d).
        floor: least magnitude of a normaliser; its sign stays. A query without any weight gives 0 above floor 0.
        num_clamped: int64 scalar; the number of normalisers below `floor`, or negative, is added to it.
    Returns:
        (..., N, d). Cost: 2 N f d multiply-accumulates at M = N.
    """
    normaliser = phi_q @ phi_k.sum(-2)[..., None]
    if num_clamped is not None:
        num_clamped.add_((normaliser < floor).sum())
    return phi_q @ (phi_k.mT @ v) / normaliser.abs().clamp(min=floor).copysign(normaliser)


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 > 0, without the cancellation of (exp(x) - 1) + 1."""
    return x.clamp(max=0).exp() + x.relu()


def gaussian(draws: Draws, shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """Samples of N(0, I), shape (h, s, d), on the device of `like` and in its full type.

    "iid": independent rows. "orthogonal": blocks of d rows that are orthogonal directions, uniform over rotations, with
    independent chi_d norms, so that each row alone is still N(0, I). "orthogonal_sqrt_d": the same with norms sqrt(d).
    """
    normal = functools.partial(torch.randn, device=like.device, dtype=full_type(like))
    if draws == "iid":
        return normal(shape)
    h, s, d = shape
    basis, triangle = torch.linalg.qr(normal(h, -(-s // d), d, d))
    # The sign of R's diagonal is the algorithm's choice; without it Q is uniform over rotations.
    basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    rows = basis.mT.flatten(1, 2)[:, :s]
    return rows * (d**0.5 if draws == "orthogonal_sqrt_d" else normal(shape).norm(dim=-1, keepdim=True))


def mixture_draws(shape: tuple[int, ...], like: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """What samples of Gaussian mixtures are made of: standard normals (*shape, d) and uniforms of `shape`.

    Args:
        like: queries (..., d), whose device and full type the draws take.
        seed: None draws from the device's generator; an int64 pair makes the draws a function of it and of position.
    """
    shape_normal, kind = (*shape, like.shape[-1]), {"device": like.device, "dtype": full_type(like)}
    if seed is None:
        return torch.randn(shape_normal, **kind), torch.rand(shape, **kind)
    return counter_normal(seed[0], shape_normal).to(**kind), counter_uniform(seed[1], shape).to(**kind)


def random_seed() -> Tensor:
    """An int64 pair for `mixture_draws`, to be kept as a buffer."""
    return torch.randint(2**32, (2,))


def counter_uniform(seed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniforms in (0, 1) that depend on `seed` and position only: float32 of `shape`, on the device of `seed`.

    Evaluation draws of mechanisms whose samples cannot be stored (their number follows the grid): the same on every
    device and at every call, without touching a generator or leaving the device.

    Args:
        seed: int64 scalar in [0, 2^32).
    """
    bits = _hash(_hash(torch.arange(math.prod(shape), device=seed.device)) ^ seed)
    return (((bits >> 9) + 0.5) / 2**23).view(shape)


def counter_normal(seed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normals by Box and Muller's transform of `counter_uniform`, on the same terms."""
    radius, angle = counter_uniform(seed, (2, *shape)).unbind(0)
    return (-2 * radius.log()).sqrt() * (2 * torch.pi * angle).cos()


def _hash(x: Tensor) -> Tensor:
    """32-bit integer hash in int64: xor-shifts and multiplications, whose products stay below 2^63."""
    for multiplier in (0x7FEB352D, 0x5A2D39B5, 0x45D9F3B5):
        x = ((x ^ (x >> 16)) * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 16)


def sample_indices(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Indices (..., s) drawn from `probabilities` (..., M) by inverting their cumulative sums at `uniform` (..., s)."""
    with torch.no_grad():
        cumulative = probabilities.cumsum(-1)
        place = uniform.expand(*cumulative.shape[:-1], -1).to(cumulative.dtype) * cumulative[..., -1:]
        return torch.searchsorted(cumulative, place.contiguous(), right=True).clamp(max=cumulative.shape[-1] - 1)
