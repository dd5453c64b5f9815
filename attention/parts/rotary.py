"""Rotary positions (Su et al. 2021, arXiv:2104.09864) on a grid: pairs of channels rotate by a token's row or column.

Products of rotated queries and keys depend on the difference of their positions alone.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .geometry import Grid
from .tables import kept_table
from .transforms import in_graph


def rotate(x: Tensor, grid: Grid, *, endpoint: bool) -> Tensor:
    """Rotates pairs (2i, 2i + 1) of channels of tokens (..., P + N, c): the first p = c // 4 by row, p more by column.

    The i-th of p pairs rotates by position * 10000^(-i/p) radians; with `endpoint`, as in numpy's linspace, the last
    pair by position / 10000. Prefix tokens, and the remaining channels if 4 does not divide c, are not rotated.
    """
    p = x.shape[-1] // 4
    if x.shape[-1] == 4 * p and not in_graph():  # complex numbers take one operator, which graphs do not all have
        factors = complex_turns(grid, x.shape[-2] - math.prod(grid), p, endpoint, x.dtype, x.device)
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2 * p, 2))) * factors).flatten(-2)
    cos, sin = turns(grid, x.shape[-2] - math.prod(grid), p, endpoint, x.dtype, x.device)
    a, b = x[..., : 4 * p].unflatten(-1, (2 * p, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([turned, x[..., 4 * p :]], -1)


def rotate_reference(x: Tensor, grid: Grid, *, endpoint: bool) -> Tensor:
    """`rotate`, number by number."""
    (H, W), p, y = grid, x.shape[-1] // 4, x.clone()
    for n in range(H * W):
        for i in range(2 * p):
            angle = (n // W if i < p else n % W) / 10000 ** (i % p / max(p - endpoint, 1))
            a, b = x[..., n - H * W, 2 * i], x[..., n - H * W, 2 * i + 1]
            y[..., n - H * W, 2 * i] = math.cos(angle) * a - math.sin(angle) * b
            y[..., n - H * W, 2 * i + 1] = math.sin(angle) * a + math.cos(angle) * b
    return y


@kept_table
def turns(
    grid: Grid, num_prefix_tokens: int, num_pairs: int, endpoint: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Cosine and sine of every token's angles, by row and by column: (2, P + N, 2p)."""
    frequencies = 10000 ** -(torch.arange(num_pairs, dtype=dtype, device=device) / max(num_pairs - int(endpoint), 1))
    y, x = (torch.arange(side, dtype=dtype, device=device)[:, None] * frequencies for side in grid)
    angles = torch.cat([y[:, None].expand(-1, grid[1], -1), x.expand(grid[0], -1, -1)], -1).flatten(0, 1)
    angles = torch.cat([angles.new_zeros(num_prefix_tokens, 2 * num_pairs), angles])
    return torch.stack([angles.cos(), angles.sin()])


@kept_table
def complex_turns(*arguments: Any) -> Tensor:
    """`turns` as complex numbers, (P + N, 2p)."""
    return torch.complex(*turns(*arguments))
