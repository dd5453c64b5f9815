"""Entropy of attention weights, and the grid of their keys."""

import math

import torch
from torch import Tensor

from attention import Grid


def as_distribution(weights: Tensor) -> Tensor:
    """Returns the magnitudes of weights (..., keys) over their sum; leaves distributions unchanged.

    Rows of zeros have no distribution and become NaN.
    """
    return weights.abs() / weights.abs().sum(-1, keepdim=True)


def entropy(weights: Tensor) -> Tensor:
    """Returns the entropy of weights (..., queries, keys), mean over queries: (...), nats, at most ln keys.

    `as_distribution` normalises the weights. Queries whose weights are all zero are left out.
    """
    return torch.special.entr(as_distribution(weights)).sum(-1).nanmean(-1)


def key_grid(num_keys: int, grid: Grid) -> Grid:
    """Returns the grid of `num_keys` keys: the queries' grid or, for fewer keys, the grid of the most similar shape."""
    H, W = grid
    if num_keys == H * W:
        return grid
    grids = [(rows, num_keys // rows) for rows in range(1, num_keys + 1) if num_keys % rows == 0]
    return min(grids, key=lambda found: abs(math.log(found[0] * W / (found[1] * H))))
