"""Local attention (Child et al. 2019, arXiv:1904.10509): softmax within windows, with a relative position bias.

Windows are w x w cells (or 1-D blocks of w tokens in raster order), not overlapping by default; with `overlap` e a
window's keys reach e cells beyond it on every side: |E| = (w + 2e)^2. Exact within the window, blind beyond. The
baseline 'Local' of EVA (appendix E.1).
Cost: 2 N |E| C multiply-accumulates.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Attention, Grid, Site
from attention.features import upcast
from attention.options import option
from attention.position import BiasKind, PositionBias
from attention.windows import from_windows, to_windows, window_mask


def exact_logits(q: Tensor, k: Tensor, bias: Tensor | None, grid: Grid, window: Grid, overlap: Grid) -> Tensor:
    """Logits q . k / sqrt(d) + bias of each window on its exact set: (B, h, g, w, e), fp32, -inf at padding."""
    logits = to_windows(q * q.shape[-1] ** -0.5, grid, window) @ to_windows(k, grid, window, overlap).mT
    logits = upcast(logits) if bias is None else upcast(logits) + bias[:, None]
    mask = window_mask(grid, window, overlap, q.device)
    return logits if mask is None else logits.masked_fill(~mask[:, None], -torch.inf)


def exact_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, grid: Grid, window: Grid, overlap: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, h, g, w, d) of each window, values (B, h, g, e, d) and logits (B, h, g, w, e) of its exact set.

    The window (0, 0) is one window of all queries, with an empty exact set.
    """
    if window == (0, 0):
        return q[:, :, None], v[:, :, None, :0], upcast(q[:, :, None] @ k[:, :, None, :0].mT)
    queries, values = to_windows(q, grid, window), to_windows(v, grid, window, overlap)
    return queries, values, exact_logits(q, k, bias, grid, window, overlap)


def mix_with_exact(exact: Tensor, values: Tensor, logits: Tensor, others: Tensor, attn_drop: float = 0.0) -> Tensor:
    """Values under one softmax over each window's exact set and what stands for the tokens outside it.

    Args:
        exact: logits (B, h, g, w, e) of the exact sets; values: of their tokens, (B, h, g, e, d).
        logits: (B, h, g, w, c) of the others; others: their values (B, h, G, c, d), G = 1 or g windows.
        attn_drop: dropout rate of the weights.
    Returns:
        (B, h, g, w, d).
    """
    weights = F.dropout(torch.cat([exact, logits], -1).softmax(-1), attn_drop).to(values.dtype)
    on_exact, on_others = weights.split([exact.shape[-1], logits.shape[-1]], -1)
    shared = on_others.reshape(*on_others.shape[:2], others.shape[2], -1, others.shape[3])
    return on_exact @ values + (shared @ others.to(values.dtype)).reshape(*weights.shape[:4], -1)


def local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    grid: Grid,
    window: Grid,
    overlap: Grid = (0, 0),
    attn_drop: float = 0.0,
) -> Tensor:
    """Softmax attention within windows: q, k, v (B, h, N, d) and bias (h, w, e) -> (B, h, N, d)."""
    weights = F.dropout(exact_logits(q, k, bias, grid, window, overlap).softmax(-1), attn_drop)
    return from_windows(weights.to(v.dtype) @ to_windows(v, grid, window, overlap), grid, window)


def local_reference(q, k, v, bias=None, *, grid, window, overlap=(0, 0), attn_drop=0.0):
    """`local`, query by query."""
    y = torch.zeros_like(q)
    for n in range(q.shape[2]):
        cells, places, row = exact_set(n, grid, window, overlap)
        logits = (q[:, :, n, None] @ k[:, :, cells].mT)[:, :, 0] * q.shape[-1] ** -0.5
        if bias is not None:
            logits = logits + bias[:, row, places]
        y[:, :, n] = (F.dropout(logits.softmax(-1), attn_drop)[:, :, None] @ v[:, :, cells])[:, :, 0]
    return y


def exact_set(n: int, grid: Grid, window: Grid, overlap: Grid) -> tuple[list[int], list[int], int]:
    """Token n's exact set: raster indices of its keys, their places in the (extended) window, and n's place in the
    window.
    """
    (y, x), (rows, columns) = divmod(n, grid[1]), window
    top, left = y - y % rows - overlap[0], x - x % columns - overlap[1]
    height, width = rows + 2 * overlap[0], columns + 2 * overlap[1]
    cells = [(top + i, left + j, i * width + j) for i in range(height) for j in range(width)]
    inside = [(a * grid[1] + b, place) for a, b, place in cells if 0 <= a < grid[0] and 0 <= b < grid[1]]
    return *map(list, zip(*inside, strict=True)), (y % rows) * columns + x % columns


def window_geometry(mechanism: type[Attention], config: Any, site: Site) -> tuple[Grid, Grid]:
    """(window, overlap) along (y, x), in cells, of the options window_size, layout and, if any, overlap; a window
    beyond the grid is refused.
    """
    (H, W), longest = site.grid, max(raster(site.grid, config.layout))
    overlap = getattr(config, "overlap", 0)
    for name, cells in (("window_size", config.window_size), ("overlap", overlap)):
        if cells > longest:
            mechanism.refuse(name, cells, f"larger than the {H}x{W} grid; at most {longest}")
    if config.window_size == 0:
        return (0, 0), (0, 0)
    if config.layout == "1d":
        return (1, config.window_size), (0, overlap)
    return (config.window_size, config.window_size), (overlap, overlap)


def raster(grid: Grid, layout: Literal["1d", "2d"]) -> Grid:
    """The grid that windows are cut from: its raster order as one row where the layout is 1-D."""
    return (1, grid[0] * grid[1]) if layout == "1d" else grid


class Local(Attention):
    """Attention within windows, with a learned relative position bias. Papers: 000 Tables 1-3 'Local'."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        window_size: int = option(7, "window side w in cells; block length in tokens where layout is 1d", low=1)
        layout: Literal["2d", "1d"] = option("2d", "square windows of the grid, or blocks of the raster order")
        overlap: int = option(
            0, "cells e by which a window's keys reach beyond it; the papers' overlap is w // 2", low=0
        )
        position_bias: BiasKind = option("table", "relative position bias inside the window")
        attn_drop: float = option(0.0, "dropout rate of the attention weights", low=0, high=1)

    def __init__(self, site: Site, config: Config):
        super().__init__(site, config)
        self.window, self.overlap = window_geometry(type(self), config, site)
        self.position_bias = PositionBias(
            config.position_bias, self.num_heads, self.head_dim, self.window, self.overlap
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return local(
            q,
            k,
            v,
            self.position_bias(),
            grid=raster(grid, self.config.layout),
            window=self.window,
            overlap=self.overlap,
            attn_drop=self.config.attn_drop if self.training else 0.0,
        )
