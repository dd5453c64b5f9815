"""What attention matrices say: how spread weights are, how far they reach, and what they make of many layers."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attention import Grid


def as_distribution(weights: Tensor) -> Tensor:
    """The magnitudes of weights (..., keys) over their sum: the weights themselves where they are a distribution.

    Rows of zeros have no distribution and become NaN.
    """
    return weights.abs() / weights.abs().sum(-1, keepdim=True)


def entropy(weights: Tensor) -> Tensor:
    """Entropy of the weights (..., queries, keys) of every query, mean over queries: (...), nats, at most ln keys.

    See `as_distribution` for weights that are none; queries whose weights are all zero are left out.
    """
    return torch.special.entr(as_distribution(weights)).sum(-1).nanmean(-1)


def mean_distance(weights: Tensor, grid: Grid, key_grid: Grid) -> Tensor:
    """Distance between a query and the keys, mean by weight and over queries (Dosovitskiy et al. 2021, appendix D.7).

    Args:
        weights: (..., queries, keys) between tokens of the two grids, as for `entropy`.
    Returns:
        (...), in tokens of `grid`.
    """
    return (as_distribution(weights) * distances(grid, key_grid).to(weights)).sum(-1).nanmean(-1)


def distances(grid: Grid, key_grid: Grid) -> Tensor:
    """Distances (queries, keys) of the centres of tokens, in those of `grid`, over the same image."""

    def centres(of: Grid) -> Tensor:
        sides = [(torch.arange(n) + 0.5) * side / n for n, side in zip(of, grid, strict=True)]
        return torch.cartesian_prod(*sides)

    return torch.cdist(centres(grid), centres(key_grid), compute_mode="donot_use_mm_for_euclid_dist")


def key_grid(num_keys: int, grid: Grid) -> Grid:
    """The grid of `num_keys` keys: that of the queries, or, where a mechanism makes fewer, the one most like it."""
    H, W = grid
    if num_keys == H * W:
        return grid
    grids = [(rows, num_keys // rows) for rows in range(1, num_keys + 1) if num_keys % rows == 0]
    return min(grids, key=lambda found: abs(math.log(found[0] * W / (found[1] * H))))


def rollout(layers: Sequence[Tensor]) -> Tensor:
    """What all layers together attend to: product of (A + I) / 2, first layer last (Abnar & Zuidema 2020, section 3).

    Args:
        layers: A (N, N) of each layer, the mean of its heads' distributions; a row of NaN attends to nothing.
    Returns:
        (N, N), rows sum to one.
    """
    identity = torch.eye(len(layers[0])).to(layers[0])
    rolled = identity
    for weights in layers:
        rolled = (torch.where(weights.isnan(), identity, weights) + identity) / 2 @ rolled
    return rolled
