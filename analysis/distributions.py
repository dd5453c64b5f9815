"""Statistics of attention matrices: entropy of weights, and attention distance."""

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


def mean_distance(weights: Tensor, grid: Grid, key_grid: Grid) -> Tensor:
    """Returns the distance of query and key, mean by weight and over queries (Dosovitskiy et al. 2021, appendix D.7).

    Args:
        weights: (..., queries, keys) between tokens of the two grids, as for `entropy`.
    Returns:
        (...), in tokens of `grid`.
    """
    return (as_distribution(weights) * distances(grid, key_grid).to(weights)).sum(-1).nanmean(-1)


def distances(grid: Grid, key_grid: Grid) -> Tensor:
    """Returns distances (queries, keys) of the centres of tokens over the same image, in tokens of `grid`."""

    def centres(of: Grid) -> Tensor:
        sides = [(torch.arange(n) + 0.5) * side / n for n, side in zip(of, grid, strict=True)]
        return torch.cartesian_prod(*sides)

    return torch.cdist(centres(grid), centres(key_grid), compute_mode="donot_use_mm_for_euclid_dist")


def key_grid(num_keys: int, grid: Grid) -> Grid:
    """Returns the grid of `num_keys` keys: the queries' grid or, for fewer keys, the grid of the most similar shape."""
    H, W = grid
    if num_keys == H * W:
        return grid
    grids = [(rows, num_keys // rows) for rows in range(1, num_keys + 1) if num_keys % rows == 0]
    return min(grids, key=lambda found: abs(math.log(found[0] * W / (found[1] * H))))
