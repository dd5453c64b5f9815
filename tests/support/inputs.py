"""Inputs for tests of limits: sizes, fixed random numbers, layers, all in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import Attention
from attention.parts.groups import Groups, bins
from tests.support.cases import Case

B, h, d = 2, 2, 8
CPU = torch.device("cpu")
GRIDS = [(4, 4), (6, 4), (8, 8)]
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals, a function of shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shuffled(count: int, seed: int = 0) -> Tensor:
    """A permutation of `count` tokens, a function of both."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def tokens(grid, count: int = 3) -> list[Tensor]:
    """Queries, keys, values, ... (B, h, N, d)."""
    return [draw(B, h, math.prod(grid), d, seed=seed) for seed in range(count)]


def one_head(*tokens: float | tuple[float, ...]) -> Tensor:
    """Tokens of one head, by one number or d of them each, for values computed by hand: (1, 1, N, d)."""
    return torch.tensor(tokens, dtype=torch.float64).view(1, 1, len(tokens), -1)


def identity(size: int) -> Tensor:
    """Values (B, h, N, N) for which the output of attention is its matrix of weights."""
    return torch.eye(size, dtype=torch.float64).expand(B, h, size, size)


def layer(name: str, grid, **options: Any) -> Attention:
    """A layer in evaluation, with weights moved off their initial values."""
    return Case(name, grid, options).build(dim=h * d, num_heads=h).eval()


def averaging(grid) -> tuple[Groups, Tensor]:
    """2 x 2 bins, and the matrix (1, 1, 4, N) that averages over each bin."""
    groups = bins(grid, (2, 2), CPU)
    matrix = torch.zeros(4, grid[0] * grid[1], dtype=torch.float64)
    for row, index, valid in zip(matrix, groups.members[0], groups.valid[0], strict=True):
        row[index[valid]] = 1 / valid.sum().double()
    return groups, matrix[None, None]
