"""Sampling of N(0, I), of mixtures and of keys, from a generator or as a function of position."""

import functools
import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..options import option
from .features import compute_dtype
from .geometry import gather_tokens

OmegaSampling = Literal["iid", "orthogonal", "orthogonal_sqrt_d"]
Noise = Literal["unit", "released"]


def omega_sampling_option() -> Any:
    """The field `omega_sampling`."""
    return option("iid", "samples: independent, or orthogonal in blocks of d (norms of a Gaussian, or sqrt d)")


def noise_option() -> Any:
    """The field `noise`."""
    meaning = "standard deviation of samples about their means: 1, or the released code's d^-1/4; null: unit"
    return option(None, meaning, chosen=lambda c: "released" if c.released else "unit")


def scale_noise(normal: Tensor, noise: Noise) -> Tensor:
    """Scales standard normals (..., d) to the standard deviation that the option `noise` names."""
    return normal if noise == "unit" else normal * normal.shape[-1] ** -0.25


def gaussian(sampling: OmegaSampling, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Samples of N(0, I), shape (h, s, d), on the device of `like` and in its compute dtype.

    "iid": independent rows. "orthogonal": blocks of d rows that are orthogonal directions, uniform over rotations, with
    independent chi_d norms, so that each row alone is still N(0, I). "orthogonal_sqrt_d": the norms are sqrt(d).
    """
    normal = functools.partial(torch.randn, device=like.device, dtype=compute_dtype(like))
    if sampling == "iid":
        return normal(shape)
    h, s, d = shape
    basis, triangle = torch.linalg.qr(normal(h, -(-s // d), d, d))
    # The QR algorithm chooses the signs of R's diagonal; with these signs removed, Q is uniform over rotations.
    basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    rows = basis.mT.flatten(1, 2)[:, :s]
    return rows * (d**0.5 if sampling == "orthogonal_sqrt_d" else normal(shape).norm(dim=-1, keepdim=True))


def redrawn(training: bool, kept: Tensor, like: Tensor) -> Tensor:
    """Fresh samples of N(0, I) of the shape of `kept` in training, on the device of `like`; `kept` in evaluation."""
    return gaussian("iid", kept.shape, like) if training else kept


def mixture_noise(shape: tuple[int, ...], q: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Noise for samples of Gaussian mixtures: standard normals (..., *shape, d) and uniforms (..., *shape).

    Args:
        q: queries (B, ..., d), whose device and compute dtype the samples have.
        seed: None samples from the device's generator, independently for each image: (B, *shape). With an int64 pair,
            samples are a function of it and of position, and all images share them: the output of an image does not
            depend on its place in the batch.
    """
    d, device, dtype = q.shape[-1], q.device, compute_dtype(q)
    if seed is None:
        shape = (q.shape[0], *shape)
        return torch.randn((*shape, d), device=device, dtype=dtype), torch.rand(shape, device=device, dtype=dtype)
    return counter_normal(seed[0], (*shape, d)).to(device, dtype), counter_uniform(seed[1], shape).to(device, dtype)


def random_seed() -> Tensor:
    """An int64 pair for `mixture_noise`, to be kept as a buffer."""
    return torch.randint(2**32, (2,))


def counter_uniform(seed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniforms in (0, 1) that depend on `seed` and position only: float32 of `shape`, on the device of `seed`.

    Evaluation uses them as samples whose number depends on the grid, so that they cannot be stored. They are equal on
    every device and at every call, and need no generator.

    Args:
        seed: int64 scalar in [0, 2^32).
    """
    bits = _hash(_hash(torch.arange(math.prod(shape), device=seed.device)) ^ seed)
    return (((bits >> 9) + 0.5) / 2**23).view(shape)


def counter_normal(seed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normals that depend on `seed` and position only, by Box and Muller's transform of `counter_uniform`."""
    radius, angle = counter_uniform(seed, (2, *shape)).unbind(0)
    return (-2 * radius.log()).sqrt() * (2 * torch.pi * angle).cos()


def _hash(x: Tensor) -> Tensor:
    """32-bit integer hash in int64, from xor-shifts and multiplications whose products stay below 2^63."""
    for multiplier in (0x7FEB352D, 0x5A2D39B5, 0x45D9F3B5):
        x = ((x ^ (x >> 16)) * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 16)


def sample_indices(probabilities: Tensor, uniform: Tensor, out: Tensor | None = None) -> Tensor:
    """Indices (..., s) drawn from `probabilities` (..., M) by inverting their cumulative sums at `uniform` (..., s).

    If `out` is given, it holds the sums afterwards; it may be `probabilities`.
    """
    with torch.no_grad():
        cumulative = torch.cumsum(probabilities, -1, out=out)
        position = uniform.expand(*cumulative.shape[:-1], -1).to(cumulative.dtype) * cumulative[..., -1:]
        return torch.searchsorted(cumulative, position.contiguous(), right=True).clamp(max=cumulative.shape[-1] - 1)


def attended_keys(pi: Tensor, k: Tensor, uniform: Tensor | None) -> Tensor:
    """Keys (B, h, M, d) drawn with probabilities pi (B, h, n, M) at `uniform` in (0, 1), (..., n, s): (B, h, n, s, d).

    Without `uniform`, the means of keys under pi: s = 1.
    """
    if uniform is None:
        return (pi @ k)[:, :, :, None]
    return gather_tokens(k, sample_indices(pi, uniform))
