"""Longformer (Beltagy et al. 2020, arXiv:2004.05150): a sliding band of w keys, and g global tokens.

A query attends, in one softmax, to the tokens within rho of it (in raster order, or in rows and columns: the window of
Vision Longformer, Zhang et al. 2021) and to g global tokens, which themselves attend to everything. The global tokens
are the central cells of g equal parts of the grid.
Cost: 2 N (3 rho + 2 g) C multiply-accumulates, 2 N g C of them for the global rows; linear in N. The band of
w = 2 rho + 1 keys (w^2 in two dimensions) is computed in tiles of rho queries a side, which take 3 rho keys (9 rho^2).
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Attention, Cost, LayerContext
from attention.costs import num_padded, projections, window_macs
from attention.mechanisms.softmax import softmax
from attention.ops.joint_softmax.op import exact_logits, mix, prefix_part, shared_logits
from attention.options import option
from attention.parts.geometry import (
    Grid,
    Windows,
    from_windows,
    raster,
    split_heads,
    split_prefix,
    to_windows,
    window_indices,
)
from attention.parts.groups import bin_counts


def longformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor | None = None,
    k_global: Tensor | None = None,
    v_global: Tensor | None = None,
    *,
    cells: Tensor,
    grid: Grid,
    radius: int,
    attn_drop: float = 0.0,
) -> Tensor:
    """Softmax over band and global keys; over all keys for the global queries.

    Args:
        q: (B, h, N, d). k, v: (B, h, P + N, d); all queries see prefix tokens.
        q_global (B, h, g, d), k_global, v_global (B, h, P + N, d): what global queries use instead.
        cells: distinct global tokens, (g,) int64. grid: rows and columns of the band; (1, N) for a raster band.
        radius: the farthest row and column rho of a key from its query. attn_drop: dropout rate of the weights.
    Returns:
        (B, h, N, d).
    """
    if q_global is None:
        q_global, k_global, v_global = q.index_select(2, cells), k, v
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    _, tile, overlap, _ = band(grid, radius)
    in_tiles = exact_logits(q, k, None, grid, tile, overlap)  # (B, h, tiles, w, e)
    in_tiles = in_tiles.masked_fill(~within(tile, overlap, radius, q.device), -torch.inf)
    queries = to_windows(q, grid, tile)
    on_cells = shared_logits(queries, k.index_select(2, cells))
    at, columns = window_indices(grid, tile, (0, 0), q.device)[..., None], grid[1]
    in_band = ((at // columns - cells // columns).abs() <= radius) & ((at % columns - cells % columns).abs() <= radius)
    on_cells = on_cells.masked_fill(in_band, -torch.inf), v.index_select(2, cells)[:, :, None]
    parts = [(in_tiles, to_windows(v, grid, tile, overlap)), on_cells, *prefix_part(queries, k_prefix, v_prefix)]
    rows = softmax(q_global, k_global, v_global, attn_drop)
    return from_windows(mix(parts, attn_drop), grid, tile).index_copy(2, cells, rows.to(v.dtype))


def band(grid: Grid, radius: int) -> Windows:
    """Tiles of rho queries a side and the keys within reach; a side that rho spans is one tile."""
    sides = ((side, 0) if radius >= side else (max(radius, 1), radius) for side in grid)
    return Windows(grid, *zip(*sides, strict=True))


def within(tile: Grid, overlap: Grid, radius: int, device: torch.device) -> Tensor:
    """Which cells of an extended tile lie within `radius` of each cell of the tile: (w, e) bool."""
    rows, columns = (
        (torch.arange(side, device=device)[:, None] + over - torch.arange(side + 2 * over, device=device)).abs()
        <= radius
        for side, over in zip(tile, overlap, strict=True)
    )
    return (rows[:, None, :, None] & columns[None, :, None, :]).flatten(2).flatten(0, 1)


def longformer_reference(q, k, v, q_global=None, k_global=None, v_global=None, *, cells, grid, radius, attn_drop=0.0):
    """`longformer`, query by query."""
    y, cells, P = torch.zeros_like(q), cells.tolist(), k.shape[2] - q.shape[2]
    for n in range(q.shape[2]):
        row, column = divmod(n, grid[1])
        keys = [
            P + m
            for m in range(q.shape[2])
            if m in cells or max(abs(m // grid[1] - row), abs(m % grid[1] - column)) <= radius
        ]
        keys = [*range(P), *keys]
        q_n, k_n, v_n = q[:, :, n, None], k[:, :, keys], v[:, :, keys]
        if n in cells:
            q_n, k_n, v_n = (q_n, k, v) if q_global is None else (q_global[:, :, [cells.index(n)]], k_global, v_global)
        weights = (q_n @ k_n.mT / q.shape[-1] ** 0.5).softmax(-1)
        y[:, :, n] = (F.dropout(weights, attn_drop) @ v_n)[:, :, 0]
    return y


class Longformer(Attention):
    """A band of keys and global cells."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        radius: int = option(24, "farthest key rho: tokens in raster order, or rows and columns; w = 2 rho + 1", low=0)
        layout: Literal["1d", "2d"] = option("1d", "band of the raster order, or square windows around each query")
        num_global: int = option(1, "global cells g, spread evenly over the grid", low=0)
        separate_global: bool = option(False, "projections of their own for the global rows, copied from qkv at first")
        attn_drop: float = option(0.0, "dropout rate of the attention weights", low=0, high=1)

    def __init__(self, site: LayerContext, config: Config):
        super().__init__(site, config)
        self.cells(site.grid, torch.device("cpu"))  # refuses a count that cannot part the grid
        if config.separate_global and not config.num_global:
            self.refuse("separate_global", True, "there is no global cell; set num_global above 0")
        self.qkv_global = copy.deepcopy(self.qkv) if config.separate_global else None

    def cells(self, grid: Grid, device: torch.device) -> Tensor:
        """Raster indices (g,) of the central cells of g equal parts of the grid."""
        if not self.config.num_global:
            return torch.empty(0, dtype=torch.int64, device=device)
        counts = bin_counts(self.config.num_global, grid, "attention(longformer).num_global")
        rows, columns = (
            (2 * torch.arange(count, device=device) + 1) * side // (2 * count)
            for side, count in zip(grid, counts, strict=True)
        )
        return (rows[:, None] * grid[1] + columns).flatten()

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor | None, ...]:
        """(B, P + N, C) -> q, k, v, and those of the global rows: q_global (B, h, g, d), k_global, v_global or None."""
        if self.qkv_global is None:
            return *super().project(x, grid), None, None, None
        C, weight, bias = x.shape[-1], self.qkv_global.weight, self.qkv_global.bias
        q_bias, kv_bias = (None, None) if bias is None else (bias[:C], bias[C:])
        chosen = split_prefix(x, grid[0] * grid[1])[1].index_select(1, self.cells(grid, x.device))
        q_global = split_heads(F.linear(chosen, weight[:C], q_bias), 1, self.num_heads)
        return *super().project(x, grid), *q_global, *split_heads(F.linear(x, weight[C:], kv_bias), 2, self.num_heads)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, g = context.num_tokens, context.dim, config.num_global
        windows = band(raster(context.grid, config.layout), config.radius)
        macs = window_macs(windows, C) + 2 * num_padded(windows) * g * C + 2 * N * g * C  # band, columns, rows
        if not config.separate_global:
            return Cost(0, macs)
        queries, keys_and_values = g * C * C, 2 * N * C * C
        return Cost(projections(context, 3).parameters, macs + queries + keys_and_values)

    def attend(self, q, k, v, q_global, k_global, v_global, grid: Grid) -> Tensor:
        return longformer(
            q,
            k,
            v,
            q_global,
            k_global,
            v_global,
            cells=self.cells(grid, q.device),
            grid=raster(grid, self.config.layout),
            radius=self.config.radius,
            attn_drop=self.attn_drop,
        )
