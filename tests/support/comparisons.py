"""Comparisons of results: tolerances, exact and Monte-Carlo comparisons, masked softmax as a reference."""

import torch
from torch import Tensor

from attention.parts.hashing import hash_clusters, ranks

FP64, FP64_GRADIENT, FP32_RMS, BF16_RMS = 1e-9, 1e-8, 1e-5, 1e-2


def assert_equal(y: Tensor, expected: Tensor):
    """Asserts equality in float64, to 1e-10."""
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def rms_ratio(a: Tensor, b: Tensor) -> float:
    """Root mean square of a - b, divided by the root mean square of b."""
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


def standard_errors(samples: Tensor, expected: Tensor | float) -> Tensor:
    """Distance of the mean over the first axis from `expected`, in standard errors."""
    error = (samples.mean(0) - expected).abs()
    return torch.where(error == 0, 0.0, error / (samples.std(0) / len(samples) ** 0.5))


def assert_mean(samples: Tensor, expected: Tensor | float):
    """Asserts that the mean of `samples` over their first axis is `expected`, within four standard errors."""
    assert standard_errors(samples, expected).max() < 4


def under_mask(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention over the visible keys: visible (..., N, N) bool."""
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def weights_of(op, q: Tensor, k: Tensor, *args, **options) -> Tensor:
    """The matrix (B, h, N, N) that `op` mixes values with."""
    N = q.shape[2]
    columns = torch.eye(N, dtype=q.dtype).expand(*q.shape[:2], N, N)
    return torch.cat([op(q, k, part, *args, **options) for part in columns.split(q.shape[-1], -1)], -1)


def same_cluster(q: Tensor, k: Tensor, directions: Tensor, size: int) -> Tensor:
    """Mask of the keys that each round's hash shows to a query, (B, h, r, N, N) bool."""
    of_q, of_k = (ranks(clusters, q.shape[2]) // size for clusters in hash_clusters(q, k, directions, size))
    return of_q[..., None] == of_k[..., None, :]


def assert_weights_sum_to_one_or_vanish(weights: Tensor):
    """Asserts this of a matrix (..., N, N) of weights that are not negative; the rows of some queries are zero."""
    total = weights.sum(-1)
    assert (weights >= -1e-15).all()
    assert_equal(total, (total > 0.5).double())
    assert total.mean() > 0.9
