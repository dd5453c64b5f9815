"""What the tests of limits and identities share: sizes, fixed draws, layers, exact and Monte-Carlo comparisons.

Float64; equal means to 1e-10, a mean that of four standard errors.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention import Attention
from tests.support.cases import Case

B, h, d = 2, 2, 8
CPU = torch.device("cpu")
every_grid = pytest.mark.parametrize("grid", [(4, 4), (6, 4), (8, 8)], ids=str)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals, a function of shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shuffled(count: int, seed: int = 0) -> Tensor:
    """A permutation of `count` tokens, a function of both."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def tokens(grid, count: int = 3) -> list[Tensor]:
    """Queries, keys, values, ... (B, h, N, d)."""
    return [draw(B, h, grid[0] * grid[1], d, seed=seed) for seed in range(count)]


def layer(name: str, grid, **options: Any) -> Attention:
    """A layer in evaluation, its weights moved off their start."""
    return Case(name, grid, options).build(dim=h * d, num_heads=h).eval()


def under_mask(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention over the visible keys: visible (..., N, N) bool."""
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf).softmax(-1) @ v


def assert_equal(y: Tensor, expected: Tensor):
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def deviation(samples: Tensor, expected: Tensor | float) -> Tensor:
    """Distance of the mean over the first axis from `expected`, in standard errors."""
    error = (samples.mean(0) - expected).abs()
    return torch.where(error == 0, 0.0, error / (samples.std(0) / len(samples) ** 0.5))


def assert_mean(samples: Tensor, expected: Tensor | float):
    """The mean of `samples` over their first axis is `expected`, within four standard errors."""
    assert deviation(samples, expected).max() < 4
