"""Longformer (Beltagy et al. 2020, arXiv:2004.05150): a sliding band of w keys, and g global tokens.

A query attends, in one softmax, to the tokens within distance rho (in raster order, or in rows and columns as in Vision
Longformer, Zhang et al. 2021) and to g global tokens, which themselves attend to all tokens. The global tokens are the
tokens at the centres of g equal bins of the grid.
Cost: 2 N (w + 2 g) C multiply-accumulates by definition, w = 2 rho + 1 keys (w^2 in two dimensions), 2 N g C of them
for the global rows. The band is computed in tiles of rho queries a side, so that w becomes 3 rho. Linear in N.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..costs import num_padded, window_macs
from ..ops.joint_softmax.op import gathered_logits, mix, prefix_term, shared_logits
from ..options import Options, attn_drop_option, fit_option, local_option, option
from ..parts.geometry import Grid, Windows, raster, select_tokens, split_prefix
from ..parts.groups import bin_counts, up_to_bins
from ..parts.tables import kept_table
from .softmax import softmax


def longformer(
    q: Tensor, k: Tensor, v: Tensor, *, global_tokens: Tensor, grid: Grid, radius: int, attn_drop: float = 0.0
) -> Tensor:
    """Softmax over band and global keys; over all keys for the global queries.

    Args:
        global_tokens: distinct raster indices of the global tokens, (g,) int64.
        grid: rows and columns of the band; (1, N) for a raster band. radius: rho, by row or column.
    """
    rows = softmax(q.index_select(2, global_tokens), k, v, attn_drop)
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    tiles = band(grid, radius)
    band_keys = tiles.indices(q.device)  # (tiles, e); -1 outside the grid
    keys, values = (select_tokens(x, band_keys.clamp(min=0)) for x in (k, v))
    queries, attended = tiles.partition(q), within(tiles, radius, q.device) & (band_keys >= 0)[:, None]
    on_band = gathered_logits(queries, keys, attended)  # (B, h, tiles, w, e)
    on_global = shared_logits(queries, k.index_select(2, global_tokens))
    n, W = tiles._replace(overlap=(0, 0)).indices(q.device)[..., None], grid[1]
    distances = (n // W - global_tokens // W).abs(), (n % W - global_tokens % W).abs()
    on_global = on_global.masked_fill((distances[0] <= radius) & (distances[1] <= radius), -torch.inf)
    global_values = v.index_select(2, global_tokens)[:, :, None]
    terms = [(on_band, values), (on_global, global_values), *prefix_term(queries, k_prefix, v_prefix)]
    return tiles.reverse(mix(terms, attn_drop)).index_copy(2, global_tokens, rows.to(v.dtype))


def band(grid: Grid, radius: int) -> Windows:
    """Tiles that hold a band: `radius` queries a side, extended by `radius`; a whole side if the band spans it."""
    tile, overlap = zip(*((side, 0) if radius >= side else (max(radius, 1), radius) for side in grid), strict=True)
    return Windows(grid, tile, overlap)


@kept_table
def within(tiles: Windows, radius: int, device: torch.device) -> Tensor:
    """Mask of the keys of a tile that lie within `radius` of each of its queries: (w, e) bool."""
    rows, columns = (
        (torch.arange(side, device=device)[:, None] + over - torch.arange(side + 2 * over, device=device)).abs()
        <= radius
        for side, over in zip(tiles.size, tiles.overlap, strict=True)
    )
    return (rows[:, None, :, None] & columns[None, :, None, :]).flatten(2).flatten(0, 1)


def longformer_reference(q, k, v, *, global_tokens, grid, radius, attn_drop=0.0):
    """`longformer`, query by query."""
    y, chosen, P = torch.zeros_like(q), global_tokens.tolist(), k.shape[2] - q.shape[2]
    for n in range(q.shape[2]):
        row, column = divmod(n, grid[1])
        keys = [
            P + m
            for m in range(q.shape[2])
            if m in chosen or max(abs(m // grid[1] - row), abs(m % grid[1] - column)) <= radius
        ]
        keys = [*range(P), *keys]
        k_n, v_n = (k, v) if n in chosen else (k[:, :, keys], v[:, :, keys])
        weights = (q[:, :, n, None] @ k_n.mT / q.shape[-1] ** 0.5).softmax(-1)
        y[:, :, n] = (F.dropout(weights, attn_drop) @ v_n)[:, :, 0]
    return y


class Longformer(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its global tokens have fixed positions"
    size_option = "radius"

    class Config(Options):
        radius: int = option(
            24, "distance rho of the farthest key: tokens in raster order, or rows and columns; w = 2 rho + 1", low=0
        )
        layout: Literal["1d", "2d"] = option("1d", "band of the raster order, or square windows around each query")
        num_global: int = option(1, "global tokens g, spread evenly over the grid", low=0)
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(num_global=lambda g, layer, _: up_to_bins(g, layer.grid))

    def global_tokens(self, grid: Grid, device: torch.device) -> Tensor:
        """Raster indices (g,) of the tokens at the centres of g equal bins of the grid."""
        if not self.config.num_global:
            return torch.empty(0, dtype=torch.int64, device=device)
        counts = bin_counts(self.config.num_global, grid, "attention(longformer).num_global", self.config.fit)
        sides = zip(grid, counts, strict=True)
        rows, columns = ((2 * torch.arange(c, device=device) + 1) * side // (2 * c) for side, c in sides)
        return (rows[:, None] * grid[1] + columns).flatten()

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, g = context.num_tokens, context.dim, config.num_global
        windows = band(raster(context.grid, config.layout), config.radius)
        macs = window_macs(windows, C) + 2 * num_padded(windows) * g * C + 2 * N * g * C  # band, columns, rows
        return Cost(0, macs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        options: dict[str, Any] = {"radius": self.config.radius, "attn_drop": self.attn_drop}
        options |= {"global_tokens": self.global_tokens(grid, q.device), "grid": raster(grid, self.config.layout)}
        return longformer(q, k, v, **options)
