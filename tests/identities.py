"""Sizes, draws and tolerance of the tests of limits and identities (float64, 1e-10)."""

import pytest
import torch
from torch import Tensor

B, h, d = 2, 2, 8
CPU = torch.device("cpu")
every_grid = pytest.mark.parametrize("grid", [(4, 4), (6, 4), (8, 8)], ids=str)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(grid, count: int = 3) -> list[Tensor]:
    return [draw(B, h, grid[0] * grid[1], d, seed=seed) for seed in range(count)]


def assert_equal(y: Tensor, expected: Tensor):
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
