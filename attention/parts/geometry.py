"""Tokens of a grid: heads, prefix tokens, windows, and tables with a column for every token.

A window is (rows, columns) of the grid; a 1-D block of length w is the window (1, w) of the grid (1, N). Windows that
do not divide the grid are padded at the bottom and the right; padding is an invalid key, and dropped from the output.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.parts.features import upcast

Grid = tuple[int, int]
"""Rows and columns (H, W) of the token grid."""

Layout = Literal["1d", "2d"]
"""Order of tokens: along the raster, n = y*W + x, or of the grid."""


def split_heads(x: Tensor, count: int, num_heads: int) -> tuple[Tensor, ...]:
    """(B, N, count*C) -> `count` tensors (B, h, N, d)."""
    B, N, width = x.shape
    # Taken apart before transposed, so that their gradients meet in the order of x.
    return tuple(y.transpose(1, 2) for y in x.view(B, N, count, num_heads, width // (count * num_heads)).unbind(2))


def merge_heads(y: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, N, C)."""
    return y.transpose(1, 2).flatten(2)


def split_prefix(x: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """(..., P + N, d) -> prefix tokens (..., P, d), tokens of the grid (..., N, d)."""
    if x.shape[-2] == N:  # a slice's gradient would be filled with zeros and copied
        return x.detach()[..., :0, :], x
    return x[..., :-N, :], x[..., -N:, :]


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, h, N, d) at index (B, h, n, s): (B, h, n, s, d)."""
    return x.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])).unflatten(2, index.shape[2:])


def raster(grid: Grid, layout: Layout) -> Grid:
    """The grid that windows are taken from: its raster order as one row where the layout is 1-D."""
    return (1, math.prod(grid)) if layout == "1d" else grid


def resample(table: Tensor, old: Grid, grid: Grid) -> Tensor:
    """Interpolates the columns (..., H*W) of the grid `old` to those of `grid`, as images: bilinear, antialiased."""
    if old == grid:
        return table
    images = upcast(table).flatten(0, -2).unflatten(1, old)[None]
    images = F.interpolate(images, grid, mode="bilinear", antialias=True, align_corners=False)
    return images[0].flatten(1).unflatten(0, table.shape[:-1]).to(table.dtype)


def to_windows(x: Tensor, grid: Grid, window: Grid, overlap: Grid = (0, 0)) -> Tensor:
    """Cuts tokens (B, h, N, d) into windows (B, h, g, e, d), grown by `overlap` cells on every side; zeros outside.

    The window (0, 0) is the whole grid, in raster order.
    """
    if window == (0, 0):
        return x[:, :, None]
    return window_view(x, grid, window, overlap).flatten(4, 5).flatten(2, 3)


def window_view(x: Tensor, grid: Grid, window: Grid, overlap: Grid = (0, 0)) -> Tensor:
    """`to_windows` with its axes apart, (B, h, g_y, g_x, e_y, e_x, d): a view where no padding is needed."""
    (H, W), (rows, columns), (above, beside) = grid, window, overlap
    x = x.unflatten(2, grid)
    if H % rows or W % columns or above or beside:
        x = F.pad(x, (0, 0, beside, beside + -W % columns, above, above + -H % rows))
    if overlap == (0, 0):  # the gradient of `unfold` fills and adds
        return x.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).transpose(3, 4)
    return x.unfold(2, rows + 2 * above, rows).unfold(3, columns + 2 * beside, columns).permute(0, 1, 2, 3, 5, 6, 4)


def from_windows(y: Tensor, grid: Grid, window: Grid) -> Tensor:
    """Puts windows (B, h, g, w, d) back in raster order (B, h, N, d), dropping padded cells."""
    if window == (0, 0):
        return y[:, :, 0]
    (H, W), (rows, columns) = grid, window
    y = y.unflatten(3, window).unflatten(2, (-(-H // rows), -(-W // columns)))  # (B, h, g_y, g_x, rows, columns, d)
    return y.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :H, :W].flatten(2, 3)


def window_indices(grid: Grid, window: Grid, overlap: Grid, device: torch.device) -> Tensor:
    """Raster index of every cell of every (extended) window: (g, e) int64; -1 outside the grid."""
    raster = torch.arange(1, grid[0] * grid[1] + 1, device=device).view(1, 1, -1, 1)
    return to_windows(raster, grid, window, overlap)[0, 0, :, :, 0] - 1


def window_mask(grid: Grid, window: Grid, overlap: Grid, device: torch.device) -> Tensor | None:
    """Which cells of every (extended) window lie in the grid: (g, e) bool; None where all do."""
    if grid[0] % window[0] == 0 and grid[1] % window[1] == 0 and overlap == (0, 0):
        return None
    return window_indices(grid, window, overlap, device) >= 0


def count_windows(grid: Grid, window: Grid) -> int:
    """How many windows cover the grid."""
    return -(-grid[0] // window[0]) * -(-grid[1] // window[1])


class Windows(NamedTuple):
    """A grid taken apart into g windows of w tokens, which attend to e = w tokens, or more with an overlap."""

    grid: Grid
    size: Grid
    overlap: Grid = (0, 0)
    causal: bool = False

    @property
    def count(self) -> int:
        """How many windows g cover the grid."""
        return count_windows(self.grid, self.size)

    @property
    def num_queries(self) -> int:
        """Tokens w of a window."""
        return math.prod(self.size)

    @property
    def num_keys(self) -> int:
        """Tokens e of a window grown by its overlap."""
        return (self.size[0] + 2 * self.overlap[0]) * (self.size[1] + 2 * self.overlap[1])
