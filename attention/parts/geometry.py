"""Tokens of a grid: heads, prefix tokens, windows, and tables with a column for every token.

A window is (rows, columns) of the grid; a 1-D block of length w is the window (1, w) of the grid (1, N). Windows that
do not divide the grid are padded at the bottom and the right; padding is an invalid key, and dropped from the output.
Clips have grids (T, H, W) and windows (frames, rows, columns).
"""

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .features import compute_dtype, upcast
from .tables import kept_table

Grid = tuple[int, ...]
"""Rows and columns (H, W) of the token grid, or frames, rows and columns (T, H, W)."""

Layout = Literal["1d", "2d"]
"""Order of tokens: "1d" along the raster, n = y*W + x; "2d" on the grid."""


def each_axis(value: int | Grid, axes: int = 2) -> Grid:
    """(rows, columns), or (frames, rows, columns), of an option that is one number for all axes or one for each."""
    return (value,) * axes if isinstance(value, int) else value


def split_heads(x: Tensor, count: int, num_heads: int) -> tuple[Tensor, ...]:
    """(B, N, count*C) -> `count` tensors (B, h, N, d)."""
    B, N, width = x.shape
    # Unbind before transposing, so that gradients have the memory layout of x.
    return tuple(y.transpose(1, 2) for y in x.view(B, N, count, num_heads, width // (count * num_heads)).unbind(2))


def merge_heads(y: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, N, C)."""
    return y.transpose(1, 2).flatten(2)


def split_prefix(x: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Splits (..., P + N, d) into prefix tokens (..., P, d) and tokens of the grid (..., N, d)."""
    if x.shape[-2] == N:  # avoids the gradient of a slice, which fills zeros and copies
        return x.detach()[..., :0, :], x
    return x[..., :-N, :], x[..., -N:, :]


def select_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, h, N, d) at index (...), the same for all images and heads: (B, h, ..., d)."""
    return x.index_select(2, index.flatten()).unflatten(2, index.shape)


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, h, N, d) at index (B, h, ...): (B, h, ..., d)."""
    return x.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])).unflatten(2, index.shape[2:])


def raster(grid: Grid, layout: Layout) -> Grid:
    """The grid that windows divide: `grid` itself, or its raster order as one row if the layout is 1-D."""
    return (1, math.prod(grid)) if layout == "1d" else grid


def resample(table: Tensor, old: Grid, grid: Grid) -> Tensor:
    """Interpolates columns (..., H*W) of a table from the grid `old` to `grid`, as images: bilinear, antialiased."""
    if old == grid:
        return table
    images = upcast(table).flatten(0, -2).unflatten(1, old)[None]
    if grid[1] == 1:  # of images with one column torch makes one row everywhere; of those with one row it does not
        images, grid = images.mT, grid[::-1]
    images = F.interpolate(images, grid, mode="bilinear", antialias=True, align_corners=False)
    return images[0].flatten(1).unflatten(0, table.shape[:-1]).to(table.dtype)


class Windows(NamedTuple):
    """A grid divided into g windows of w tokens, which attend to e = w tokens, or more with an overlap.

    Attributes:
        grid: (H, W) of the tokens, or (T, H, W) with sizes and overlaps of three axes.
        size: rows and columns of a window; zeros: one window of all queries that attends to no token of the grid.
        overlap: rows and columns by which a window's keys reach beyond it on every side.
        causal: True if queries attend to no later tokens; windows are then blocks of the raster order.
        key_mask: (B, N) bool, true for tokens of each image that count; None if all count.
    """

    grid: Grid
    size: Grid
    overlap: Grid = (0, 0)
    causal: bool = False
    key_mask: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """True if queries attend to no token of the grid."""
        return not any(self.size)

    @property
    def counts(self) -> Grid:
        """Number of windows along each axis."""
        return tuple(-(-length // side) for length, side in zip(self.grid, self.size, strict=True))

    @property
    def num_windows(self) -> int:
        """Number g of windows that cover the grid."""
        return math.prod(self.counts)

    @property
    def num_queries(self) -> int:
        """Tokens w of a window."""
        return math.prod(self.size)

    @property
    def num_keys(self) -> int:
        """Tokens e of a window grown by its overlap."""
        return math.prod(self.reach)

    @property
    def reach(self) -> Grid:
        """Sides of a window grown by its overlap."""
        return tuple(side + 2 * over for side, over in zip(self.size, self.overlap, strict=True))

    @property
    def padded(self) -> bool:
        """True if a window, or its overlap, reaches beyond the grid."""
        return self.padded_grid != self.grid or any(self.overlap)

    @property
    def padded_grid(self) -> Grid:
        """Sides of the grid with its padding, without overlap."""
        return tuple(length + -length % side for length, side in zip(self.grid, self.size, strict=True))

    def partition(self, x: Tensor) -> Tensor:
        """Queries (B, h, N, d) -> windows (B, h, g, w, d); zeros outside the grid."""
        return x[:, :, None] if self.is_empty else self._merged(self.view(x))

    def partition_keys(self, x: Tensor) -> Tensor:
        """Keys or values (B, h, N, d) -> the e that each window attends to, (B, h, g, e, d); zeros outside the grid."""
        return self._merged(self.view(x, grown=True))

    def _merged(self, x: Tensor) -> Tensor:
        return x.flatten(2 + len(self.grid), -2).flatten(2, 1 + len(self.grid))

    def mean(self, x: Tensor) -> Tensor:
        """Means of tokens (B, h, N, d) over each window's tokens that count, (B, h, g, d); zero if none counts."""
        tokens, mask = self.partition(x), self.mask(x.device)
        if mask is None:
            return tokens.mean(3)
        total = tokens.masked_fill(~mask[..., None], 0).sum(3, dtype=compute_dtype(x))
        return (total / mask.sum(-1, keepdim=True).clamp(min=1)).to(x.dtype)

    def reverse(self, y: Tensor) -> Tensor:
        """The inverse of `partition`: windows (B, h, g, w, d) -> tokens (B, h, N, d), without padding."""
        if self.is_empty:
            return y[:, :, 0]
        axes = range(2, 2 + len(self.grid))
        y = y.unflatten(3, self.size).unflatten(2, self.counts)  # (B, h, g_y, g_x, rows, columns, d)
        y = y.permute(0, 1, *(i for axis in axes for i in (axis, axis + len(axes))), -1)
        for axis in axes:
            y = y.flatten(axis, axis + 1)
        return y[(slice(None), slice(None), *map(slice, self.grid))].flatten(2, 1 + len(axes))

    def view(self, x: Tensor, grown: bool = False) -> Tensor:
        """Tokens (B, h, N, d) -> (B, h, g_y, g_x, e_y, e_x, d), a view of x if no padding is needed."""
        axes, x = range(2, 2 + len(self.grid)), x.unflatten(2, self.grid)
        ends = zip(self.overlap if grown else (0,) * len(axes), self.padded_grid, self.grid, strict=True)
        margins = [(margin, margin + padded - length) for margin, padded, length in ends]
        if any(map(any, margins)):
            x = F.pad(x, (0, 0, *itertools.chain(*reversed(margins))))
        if not (grown and any(self.overlap)):  # avoids the gradient of `unfold`, which fills zeros and adds
            for axis, side in zip(axes, self.size, strict=True):
                x = x.unflatten(2 * axis - 2, (-1, side))
            return x.permute(0, 1, *(2 * axis - 2 for axis in axes), *(2 * axis - 1 for axis in axes), -1)
        for axis, side, reach in zip(axes, self.size, self.reach, strict=True):
            x = x.unfold(axis, reach, side)
        return x.movedim(2 + len(axes), -1)

    def indices(self, device: torch.device) -> Tensor:
        """Raster index of every token that each window attends to: (g, e) int64; -1 outside the grid."""
        return _indices(self._replace(key_mask=None), device)

    def mask(self, device: torch.device) -> Tensor | None:
        """Mask of every window's keys that lie in the grid, (g, e) bool, and count, (B, 1, g, e); None if all do."""
        if self.key_mask is not None:
            return self.partition_keys(self.key_mask[:, None, :, None])[..., 0]
        return _inside(self._replace(key_mask=None), device) if self.padded else None

    def later(self, device: torch.device) -> Tensor:
        """Mask of the keys of a raster-order window that come after each of its queries: (w, e) bool."""
        return _later(self.num_queries, self.num_keys, self.overlap[1], device)

    def index_of(self, n: int) -> int:
        """Index of the window of token n, for the literal twins."""
        place = zip(coordinates(n, self.grid), self.size, strict=True)
        return raster_index((x // side for x, side in place), self.counts)

    def attended(self, n: int) -> tuple[list[int], list[int], int]:
        """Keys that token n attends to in its window, for the literal twins: their raster indices, their positions
        among the window's e keys, and n's own position among its w queries. A key mask must be of one image.
        """
        if self.is_empty:
            return [], [], 0
        place = list(zip(coordinates(n, self.grid), self.size, self.overlap, strict=True))
        first, inside = [x - x % side - over for x, side, over in place], []
        for position in range(self.num_keys):
            key = [start + x for start, x in zip(first, coordinates(position, self.reach), strict=True)]
            if all(0 <= x < length for x, length in zip(key, self.grid, strict=True)):
                inside.append((raster_index(key, self.grid), position))
        inside = [(m, position) for m, position in inside if m <= n or not self.causal]
        inside = [(m, position) for m, position in inside if self.key_mask is None or self.key_mask[0, m]]
        own = raster_index((x % side for x, side, _ in place), self.size)
        return [m for m, _ in inside], [position for _, position in inside], own


def coordinates(n: int, grid: Grid) -> list[int]:
    """The place (y, x), or (t, y, x), of token n in the raster order of a grid."""
    return [n // math.prod(grid[axis + 1 :]) % length for axis, length in enumerate(grid)]


def raster_index(place: Iterable[int], grid: Grid) -> int:
    """The inverse of `coordinates`."""
    return functools.reduce(lambda n, axis: n * axis[1] + axis[0], zip(place, grid, strict=True), 0)


@kept_table
def _indices(windows: Windows, device: torch.device) -> Tensor:
    tokens = torch.arange(1, math.prod(windows.grid) + 1, device=device).view(1, 1, -1, 1)
    return windows.partition_keys(tokens)[0, 0, :, :, 0] - 1


@kept_table
def _inside(windows: Windows, device: torch.device) -> Tensor:
    return windows.indices(device) >= 0


@kept_table
def _later(w: int, e: int, overlap: int, device: torch.device) -> Tensor:
    return torch.ones(w, e, dtype=torch.bool, device=device).triu(overlap + 1)
