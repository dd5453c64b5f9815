"""Groups of tokens, their means and maxima.

A partition is a table of token indices per group, padded to the longest group: see `Groups`.
"""

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import OptionError, option
from .features import compute_dtype
from .geometry import Grid, Windows
from .tables import kept_table


class Groups(NamedTuple):
    """Members of c groups, for G sets of queries: G = 1 if all queries share the groups, otherwise G = g windows.

    Attributes:
        members: (G, c, t) int64 raster indices; padding points at an arbitrary token. valid: (G, c, t) bool, false at
            padding; (B, 1, G, c, t) if tokens of images are masked.
        tiles: the groups as windows that divide an (H, W) grid without padding; None if they are not such windows.
        padded_means: True if means divide by t instead of the number of members.
    """

    members: Tensor
    valid: Tensor
    tiles: Windows | None = None
    padded_means: bool = False

    def num_members(self) -> Tensor:
        """Members per group, (..., G, c)."""
        return self.valid.sum(-1)

    def masked(self, key_mask: Tensor | None) -> "Groups":
        """The groups without the tokens that key_mask (B, N) hides: valid (B, 1, G, c, t). Groups may become empty."""
        if key_mask is None:
            return self
        return self._replace(valid=self.valid & key_mask[:, self.members][:, None], tiles=None)


def up_to_bins(count: int, grid: Grid) -> tuple[int, str]:
    """The largest number up to `count` with factors that fit the grid, and what an error says of another `count`."""
    near = min(count, math.prod(grid))
    valid = next((c for far in range(near) for c in (near - far, near + far) if _bin_counts(c, grid)), 0)
    T, frames = ("", "") if len(grid) == 2 else (f"{grid[0]}x", "frames x ")
    sides = f"{T}{grid[-2]}x{grid[-1]} grid into {frames}rows x columns"
    return _most_bins(count, grid), f" does not divide the {sides} of bins; nearest valid: {valid}"


def bin_counts(count: int, grid: Grid, key: str, fit: bool = False) -> Grid:
    """Factors `count` into (rows, columns) of bins over the grid, or (frames, rows, columns), as square as possible.

    With `fit`, a count that no factors of fit the grid becomes the largest smaller one with such factors.

    A grid with sides that differ gets bins of equal size if some factors allow it, the squarest of these: 16 bins of a
    12x4 grid are 4x4, each of 3x1 tokens, and not 8x2.

    Raises:
        OptionError: no factors fit the grid; names `key`, both numbers and the nearest count with such factors.
    """
    most = _most_bins(count, grid)
    if most != count and not fit:
        raise OptionError(key, f" = {count}{up_to_bins(count, grid)[1]}")
    choices = _bin_counts(most, grid)
    equal = [counts for counts in choices if not any(map(operator.mod, grid, counts))]
    choices = equal if equal and len({*grid}) > 1 else choices

    axes = list(itertools.combinations(range(len(grid)), 2))
    # loops for torch 2.11, whose compiler has no `min` by such a key
    stretches = [max([abs(math.log(grid[y] * c[x] / (grid[x] * c[y]))) for y, x in axes]) for c in choices]
    return choices[stretches.index(min(stretches))]


def _most_bins(count: int, grid: Grid) -> int:
    return next((c for c in range(min(count, math.prod(grid)), 0, -1) if _bin_counts(c, grid)), 0)


def _bin_counts(count: int, grid: Grid) -> list[Grid]:
    if len(grid) == 1:
        return [(count,)] if count <= grid[0] else []
    firsts = [a for a in range(1, min(count, grid[0]) + 1) if count % a == 0]
    return [(a, *others) for a in firsts for others in _bin_counts(count // a, grid[1:])]


@kept_table
def bins(grid: Grid, counts: Grid, device: torch.device, margin: Grid = (), *, overlapping: bool = False) -> Groups:
    """Disjoint rectangular bins with edges floor(i*H/rows), floor(j*W/columns), each grown by `margin` rows and
    columns within the grid; means of grown bins count tokens outside the grid as zeros, as in the released code of EVA.

    Args:
        overlapping: makes the bins of adaptive average pooling, which end at ceil((i+1)*H/rows) and overlap if rows do
            not divide H.
    """
    index = torch.zeros(1, 1, dtype=torch.int64, device=device)
    valid = torch.ones_like(index, dtype=torch.bool)
    for length, number, beyond in zip(grid, counts, margin or (0,) * len(grid), strict=True):
        position, inside = _chunks(torch.full((), length, device=device), length, number, beyond, overlapping)
        index = (index[:, None, :, None] * length + position[None, :, None]).flatten(2).flatten(0, 1)
        valid = (valid[:, None, :, None] & inside[None, :, None]).flatten(2).flatten(0, 1)
    equal = len(grid) == 2 and not any(map(operator.mod, grid, counts)) and not any(margin)
    tiles = Windows(grid, tuple(map(operator.floordiv, grid, counts))) if equal else None
    return Groups(index[None], valid[None], tiles, padded_means=any(margin))


def pools_option(applies: Callable[[Any], bool] = lambda c: True) -> Any:
    """The field `released_pools`; `applies` returns from the options whether the mechanism has segments."""
    return option(
        None,
        "segments of adaptive average pooling: as many rows as columns of them where their number is a square, and "
        "overlapping where these do not divide the grid; null: as released",
        chosen=lambda c: c.released and applies(c),
    )


@kept_table
def segments(count: int, grid: Grid, device: torch.device, key: str, *, pooled: bool, fit: bool = False) -> Groups:
    """Divides the grid into `count` bins, with `pooled` the bins of adaptive average pooling, see `pools_option`.

    Args:
        fit: see `bin_counts`.
    Raises:
        OptionError: see `bin_counts`.
    """
    counts = bin_counts(count, grid, key, fit)
    side = math.isqrt(math.prod(counts))
    if pooled and side**2 == math.prod(counts) and side <= min(grid):
        counts = side, side
    return bins(grid, counts, device, overlapping=pooled)


def bins_outside(groups: Groups, windows: Windows) -> Groups:
    """`groups` without the tokens that each window attends to: G = g. A group may become empty."""
    attended = _attended(windows, groups.members.device)
    return Groups(groups.members.expand(len(attended), -1, -1), groups.valid & ~attended[:, groups.members[0]])


def up_to_outside(count: int, windows: Windows) -> tuple[int, str]:
    """The largest number of chunks up to `count` that every window leaves tokens for; `count` if one leaves none."""
    least, _ = tokens_outside(windows)
    return min(count, least) or count, f": a window leaves only {least} tokens outside it; at most {least}"


@kept_table
def chunks_outside(
    windows: Windows, count: int, device: torch.device, key: str | None = None, fit: bool = False
) -> Groups:
    """`count` contiguous chunks of the raster order without the tokens that each window attends to: G = g.

    With `fit`, there are at most as many chunks as tokens outside any window.

    Raises:
        OptionError: a window leaves fewer tokens than chunks; names `key`. If `key` is None, some groups are empty.
    """
    (least, most), (allowed, problem) = tokens_outside(windows), up_to_outside(count, windows)
    if key and count > least and not (fit and least):
        raise OptionError(key, f" = {count}{problem}")
    count = allowed if fit else count
    attended = _attended(windows, device)
    outside = attended.to(torch.uint8).argsort(dim=-1, stable=True)  # raster order, the attended tokens last
    position, valid = _chunks((~attended).sum(-1), most, count)
    return Groups(outside.gather(1, position.flatten(1)).view_as(position), valid)


def tokens_outside(windows: Windows) -> tuple[int, int]:
    """Smallest and largest number of tokens that a window does not attend to, over all windows."""
    lengths = [
        [min(start + side + over, size) - max(start - over, 0) for start in range(0, size, side)]
        for size, side, over in zip(windows.grid, windows.size, windows.overlap, strict=True)
    ]
    N = math.prod(windows.grid)
    return N - math.prod([max(x) for x in lengths]), N - math.prod([min(x) for x in lengths])


def _chunks(total: Tensor, most: int, count: int, margin: int = 0, overlapping: bool = False) -> tuple[Tensor, Tensor]:
    """Positions of `count` contiguous chunks of range(total), with edges floor(i*total/count): (..., count, t), and
    validity. Overlapping chunks begin there and end at ceil((i+1)*total/count).

    `total` (...) may differ per window; `most` is its largest value, known without a device synchronisation.
    """
    edge = torch.arange(count + 1, device=total.device) * total[..., None]
    start = edge[..., :-1, None] // count - margin
    stop = (edge[..., 1:, None] + (count - 1) * overlapping) // count + margin
    longest = max(-(-most // count), 1)
    if overlapping and most % count > 1:
        longest += 1
    position = start + torch.arange(longest + 2 * margin, device=total.device)
    valid = (position < stop) & (position >= 0) & (position < total[..., None, None])
    return position.minimum(total[..., None, None] - 1).clamp(min=0), valid


@kept_table
def _attended(windows: Windows, device: torch.device) -> Tensor:
    """Mask of the tokens that each window attends to, (g, N) bool."""
    index = windows.indices(device) + 1  # padding becomes 0
    attended = torch.zeros(len(index), math.prod(windows.grid) + 1, dtype=torch.bool, device=device)
    return attended.scatter(1, index, 1)[:, 1:]  # tracing does not support scatter of True


def gather_groups(x: Tensor, groups: Groups) -> Tensor:
    """Tokens (B, h, N, d) -> members of groups (B, h, G, c, t, d)."""
    if groups.tiles:
        return groups.tiles.partition(x)[:, :, None]
    return x.index_select(2, groups.members.flatten()).unflatten(2, groups.members.shape)


def group_mean(x: Tensor, groups: Groups) -> Tensor:
    """Means of tokens (B, h, N, d) over the valid members of groups: (B, h, G, c, d); zero for an empty group.

    With `padded_means`, sums over the valid members are divided by t, the size of the longest group.
    """
    if groups.tiles:
        tiles = groups.tiles.view(x).movedim(1, 5)  # heads adjacent, as in memory
        total = tiles.sum(3, dtype=compute_dtype(x)).movedim(4, 1).sum(4).flatten(2, 3)[:, :, None]
        return (total / groups.members.shape[-1]).to(x.dtype)
    weight = groups.valid[..., None].to(x.dtype)
    count = groups.members.shape[-1] if groups.padded_means else groups.num_members()[..., None].clamp(min=1)
    return ((gather_groups(x, groups) * weight).sum(-2, dtype=compute_dtype(x)) / count).to(x.dtype)


def group_max(x: Tensor, groups: Groups) -> Tensor:
    """Maxima of tokens (B, h, N, d) over the valid members of groups, channel by channel: (B, h, G, c, d); zero for an
    empty group.
    """
    largest = gather_groups(x, groups).masked_fill(~groups.valid[..., None], -torch.inf).amax(-2)
    return largest.masked_fill((groups.num_members() == 0)[..., None], 0)
