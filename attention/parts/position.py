"""Relative position bias of window attention: one number per head for every (query, key) of a window.

With a window of side w and an overlap of e, offsets along an axis lie in [-(w+e-1), w+e-1]; in causal attention, in
which no query attends to a later token, they lie in [0, w+e-1].
"""

import functools
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .geometry import Grid, Windows, resample
from .tables import kept_table

BiasKind = Literal["table", "t5", "none", "table_released", "t5_released"]


class PositionBias(nn.Module):
    """Bias (h, w, e) added to local logits; `table` is learned, and a fixed index looks up its rows.

    Kinds:
        table: a row per offset (Swin, Liu et al. 2021): (2w+2e-1)^2 rows in 2-D, 2w+2e-1 in 1-D. Windows that are no
            squares, and those of clips, have this kind or none.
        t5: logarithmic buckets (Raffel et al. 2020), b_y(dy) + b_x(dx) in 2-D; their number follows the window size.
            In causal attention all buckets are for keys before the query.
        table_released: as in the released code; in 2-D a row stride of w+2e, so that some offsets share a row; in 1-D
            a row per pair of tokens.
        t5_released: as in the released code; offsets of the flattened window, times d^-1/2, initialised by N(0, 1).
        none: no bias.

    squares: windows of all sizes are squares, or parts of one row, so that a table tells its window, see `middle`.
    """

    table: nn.Parameter | None

    def __init__(self, kind: BiasKind, num_heads: int, head_dim: int, windows: Windows, squares: bool = False):
        super().__init__()
        self.index_arguments = kind, windows.size, windows.overlap, windows.causal
        self.squares = squares
        if kind == "none":
            self.register_parameter("table", None)
            return
        index, rows = _index_and_rows(*self.index_arguments, torch.device("meta"))
        self.scale = head_dim**-0.5 if kind == "t5_released" else 1.0
        self.table = nn.Parameter(torch.empty(len(index), rows, num_heads))
        nn.init.trunc_normal_(self.table, std=0.02) if kind != "t5_released" else nn.init.normal_(self.table)

    def index(self) -> Tensor:
        """Table rows of every pair of positions of a window, (axes, w, e); a constant, and not a part of the state."""
        assert self.table is not None
        return bias_index(*self.index_arguments, self.table.device)

    def forward(self) -> Tensor | None:
        """The bias, (h, w, e); None for the kind `none`."""
        if self.table is None:
            return None
        index, table = self.index(), self.middle(self.table)
        # a single table is a view, because the gradient of `unbind` copies
        tables = [table.flatten(0, 1)] if len(index) == 1 else table
        rows = (F.embedding(of_axis, table) for of_axis, table in zip(index, tables, strict=True))
        bias = functools.reduce(torch.add, rows).permute(2, 0, 1)
        return bias if self.scale == 1 else bias * self.scale

    @property
    def offsets(self) -> Grid:
        """Number of offsets along each axis that a bias of the kind `table` has a row for."""
        _, size, overlap, causal = self.index_arguments
        sides = [side + over for side, over in zip(size, overlap, strict=True)]
        return (1, sides[1]) if causal else tuple(2 * side - 1 for side in sides)

    def middle(self, table: Tensor) -> Tensor:
        """The rows (1, rows, h) of this window's offsets in the table of a larger one; any other table as it is."""
        (*_, y, x), rows, (kind, *_, causal) = self.offsets, table.shape[1], self.index_arguments
        there = (math.isqrt(rows),) * 2 if y > 1 else (1, rows)
        if not self.squares or kind != "table" or math.prod(there) != rows or there[0] < y or there[1] <= x:
            return table
        top, left = (there[0] - y) // 2, 0 if causal else (there[1] - x) // 2
        return table.unflatten(1, there)[:, top : top + y, left : left + x].flatten(1, 2)


class PositionTable(nn.Module):
    """`width` learned numbers for every token of a grid, or of one row or column; resampled for another grid.

    std: standard deviation of the initial values.
    """

    def __init__(self, width: int, grid: Grid, std: float = 0.0):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.zeros(width, grid[0] * grid[1]))
        if std:
            nn.init.trunc_normal_(self.table, std=std)

    def on(self, grid: Grid) -> Tensor:
        """The numbers for a grid, (width, H*W)."""
        return self.resampled(self.table, self.grid, grid)

    @staticmethod
    def resampled(table: Tensor, old: Grid, grid: Grid) -> Tensor:
        """Resamples a table (width, H*W) from the grid `old` to `grid`."""
        return resample(table, old, grid)


class KeyPositions(PositionTable):
    """A learned vector for every token of a grid, added to its key; prefix tokens have no vector."""

    def forward(self, k: Tensor, grid: Grid) -> Tensor:
        """Adds the vectors to keys (B, h, P + N, d) of a grid."""
        vectors = self.on(grid).unflatten(0, (k.shape[1], -1)).mT
        return k + F.pad(vectors, (0, 0, k.shape[2] - vectors.shape[1], 0))


def _offsets(size: Grid, overlap: Grid, device: torch.device) -> tuple[Tensor, ...]:
    """Query minus key along y and x, or t, y and x, each (w, e)."""
    sides = zip(size, overlap, strict=True)
    key = torch.cartesian_prod(*(torch.arange(-over, side + over, device=device) for side, over in sides))
    query = torch.cartesian_prod(*(torch.arange(side, device=device) for side in size))
    return (query[:, None] - key[None]).unbind(-1)


def _of_one_row(size: Grid, overlap: Grid) -> bool:
    """True if a window's queries and keys lie in one row, as in 1-D."""
    return size[0] + overlap[0] == 1


def _table(size: Grid, overlap: Grid, device: torch.device) -> tuple[Tensor, int]:
    far = [side + over - 1 for side, over in zip(size, overlap, strict=True)]
    index, rows = torch.zeros((), dtype=torch.int64, device=device), 1
    for offset, most in zip(_offsets(size, overlap, device), far, strict=True):
        index, rows = index * (2 * most + 1) + offset + most, rows * (2 * most + 1)
    return index[None], rows


def _table_released(size: Grid, overlap: Grid, device: torch.device) -> tuple[Tensor, int]:
    if _of_one_row(size, overlap):
        w, e = size[1], size[1] + 2 * overlap[1]
        return torch.arange(w * e, device=device).view(1, w, e), w * e
    dy, dx = _offsets(size, overlap, device)
    (w, _), (e, _) = size, overlap
    shift = (w + e - 1) * (w + 2 * e + 1)
    return (dy * (w + 2 * e) + dx + shift)[None], 2 * shift + 1


def _t5(size: Grid, overlap: Grid, device: torch.device) -> tuple[Tensor, int]:
    distance = size[1] + overlap[1]
    buckets = t5_num_buckets(distance)
    offsets = _offsets(size, overlap, device)[_of_one_row(size, overlap) :]
    return torch.stack([t5_bucket(offset, buckets, distance) for offset in offsets]), buckets


def _t5_released(size: Grid, overlap: Grid, device: torch.device) -> tuple[Tensor, int]:
    distance = size[1] + overlap[1]
    buckets = t5_num_buckets(distance)
    w, e = size[0] * size[1], (size[0] + 2 * overlap[0]) * (size[1] + 2 * overlap[1])
    # In the released code both ranges start at 0, so that the offsets of an extended window are shifted.
    offset = torch.arange(w, device=device)[:, None] - torch.arange(e, device=device)
    return t5_bucket(offset, buckets, distance)[None], buckets


def _causal_table(size: Grid, overlap: Grid, device: torch.device) -> tuple[Tensor, int]:
    return _offsets(size, overlap, device)[1].clamp(min=0)[None], size[1] + overlap[1]


def _causal_t5(size: Grid, overlap: Grid, device: torch.device) -> tuple[Tensor, int]:
    distance = size[1] + overlap[1]
    buckets = t5_num_buckets(distance)
    return log_bucket(_offsets(size, overlap, device)[1].clamp(min=0), buckets, distance)[None], buckets


INDEX = {"table": _table, "t5": _t5, "table_released": _table_released, "t5_released": _t5_released}
"""Kind -> table rows of every pair of positions of a window, (axes, w, e), and the number of rows."""
CAUSAL_INDEX = {"table": _causal_table, "t5": _causal_t5}
"""`INDEX` for causal attention, in which keys later than the query are masked."""


def _index_and_rows(kind: str, size: Grid, overlap: Grid, causal: bool, device: torch.device) -> tuple[Tensor, int]:
    return (CAUSAL_INDEX if causal else INDEX)[kind](size, overlap, device)


@kept_table
def bias_index(kind: str, size: Grid, overlap: Grid, causal: bool, device: torch.device) -> Tensor:
    """Table rows of a `PositionBias` for every pair of positions of a window, (axes, w, e) int64."""
    return _index_and_rows(kind, size, overlap, causal, device)[0]


def t5_num_buckets(distance: int) -> int:
    """Buckets for offsets up to `distance` tokens (the released code's rule)."""
    return min(max(distance // 2, 16), 64)


def t5_bucket(offset: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Bidirectional T5 bucket of `offset` = query - key, with one half of the buckets for either side."""
    half = num_buckets // 2
    return half * (offset < 0) + log_bucket(offset.abs(), half, max_distance)


def log_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """T5 bucket of a distance: exact in the first half of the buckets, then logarithmic up to `max_distance`."""
    exact = num_buckets // 2
    stretch = _float32(math.log(max(max_distance, exact + 1) / exact))
    buckets = list(range(exact))
    while buckets[-1] < num_buckets - 1:
        log = _float32(exact * _float32(math.log(_float32(len(buckets) / exact))))
        buckets.append(min(exact + int(_float32(log / stretch)), num_buckets - 1))
    rises = [x for x in range(1, len(buckets)) for _ in range(buckets[x] - buckets[x - 1])]
    return sum((distance >= x for x in rises), torch.zeros_like(distance))  # no table, for whose copy a host would wait


def _float32(x: float) -> float:
    """Rounds to float32, in which the released code finds buckets, by Veltkamp's splitting: graphs can record it."""
    high = x * (2**29 + 1)
    return high - (high - x)
