"""Windows of a token grid: cutting, extending, masking and putting back.

A window is (rows, columns) of cells; a 1-D block of length w is the window (1, w) of the grid (1, N). Windows that do
not divide the grid are padded at the bottom and the right; padded cells are invalid keys, and dropped from the output.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Grid


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
