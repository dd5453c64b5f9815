"""Tiles of queries that attend to the k nearest tokens along both axes; neighbourhoods stay within the grid."""

from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import Grid
from .tables import kept_table


class Tiles(NamedTuple):
    """Tokens divided into g tiles of w queries with e keys.

    Attributes:
        queries, keys: raster indices, (g, w) and (g, e); tokens that only fill a tile are repeated.
        offsets: query minus key as a row of the bias table, (g, w, e); -1 for keys that are not attended to.
        position: index of every token among the queries, (N,).
    """

    queries: Tensor
    keys: Tensor
    offsets: Tensor
    position: Tensor


@kept_table
def tiles(grid: Grid, size: Grid, dilation: Grid, device: torch.device) -> Tiles:
    """The tiles of a grid for neighbourhoods of `size` k, in steps of `dilation`, both (rows, columns)."""
    axes = [_axis(*axis, device) for axis in zip(grid, size, dilation, strict=True)]
    queries, keys = (
        (y[:, None, :, None] * grid[1] + x[None, :, None]).flatten(2).flatten(0, 1)
        for y, x in zip(axes[0][:2], axes[1][:2], strict=True)
    )
    y, x = axes[0].offsets[:, None, :, None, :, None], axes[1].offsets[None, :, None, :, None]
    offsets = torch.where((y >= 0) & (x >= 0), y * (2 * size[1] - 1) + x, -1).flatten(4).flatten(2, 3).flatten(0, 1)
    (_, rows), (count, columns) = axes[0].queries.shape, axes[1].queries.shape
    y, x = axes[0].position[:, None], axes[1].position
    position = (y // rows * count + x // columns) * rows * columns + y % rows * columns + x % columns
    return Tiles(queries, keys, offsets, position.flatten())


def _axis(length: int, k: int, dilation: int, device: torch.device) -> Tiles:
    """The tiles along one axis."""
    (count, t, e), token = tiling(length, k, dilation), torch.arange(length, device=device)
    residue = torch.arange(min(dilation, length), device=device)[:, None, None]
    members = (length - 1 - residue) // dilation + 1  # tokens of each residue: (delta, 1, 1)
    query = torch.arange(count * t, device=device).view(count, t).minimum(members - 1)
    start = (query - k // 2).minimum(members - k).clamp(min=0)  # (delta, count, t)
    key = start[..., :1] + torch.arange(e, device=device)
    a, b = key[..., None, :], start[..., None]
    offsets = torch.where((a >= b) & (a < (b + k).minimum(members[..., None])), query[..., None] - a + k - 1, -1)
    queries, keys = (residue + dilation * x for x in (query, key.minimum(members - 1)))
    position = token % dilation * count * t + token // dilation
    return Tiles(queries.flatten(0, 1), keys.flatten(0, 1), offsets.flatten(0, 1), position)


def tiling(length: int, k: int, dilation: int) -> tuple[int, int, int]:
    """Number of tiles of each residue along an axis, and of the queries and keys of a tile."""
    longest, t = -(-length // dilation), (k + 1) // 2
    return -(-longest // t), t, min(t + k - 1, longest)
