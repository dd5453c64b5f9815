"""Leave-one-out sums over all tokens outside a window, as logarithms of masses and weighted means."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .geometry import Windows
from .tables import kept_table

LeaveOneOut = Literal["merge", "subtract", "none", "released"]


def over_all(log_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Log mass and weighted mean of all tokens, (B, h, 1, s) and (B, h, 1, s, d); arguments as in `subtract`."""
    return log_k.logsumexp(-2)[:, :, None], (log_k.mT.softmax(-1) @ v)[:, :, None]


def within(log_k: Tensor, v: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Log mass and weighted mean of a window's keys, (B, h, g, s) and (B, h, g, s, d); arguments as in `subtract`."""
    log_own, mask = windows.partition_keys(log_k).mT, windows.mask(v.device)  # (B, h, g, s, e)
    if mask is not None:
        log_own = log_own.masked_fill(~mask[..., None, :], torch.finfo(log_own.dtype).min)
    return log_own.logsumexp(-1), log_own.softmax(-1) @ windows.partition_keys(v)


def before(log_k: Tensor, v: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Log mass and weighted mean of all keys before a window's keys, in raster order; shapes as in `within`."""
    reach = windows.overlap[1]
    log_k = F.pad(log_k, (0, 0, reach, 0), value=torch.finfo(log_k.dtype).min)
    sums = merge_before(*within(log_k, F.pad(v, (0, 0, reach, 0)), shifted(windows)))
    return sums[0][:, :, : windows.num_windows], sums[1][:, :, : windows.num_windows]


def shifted(windows: Windows) -> Windows:
    """Blocks of the raster order, shifted by the overlap, so that they end where the keys of `windows` begin."""
    return Windows((1, windows.overlap[1] + windows.grid[1]), windows.size)


def merge_all_but_one(log_mass: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """For each of g windows, log mass and weighted mean of all other windows: (..., g, s), (..., g, s, d).

    The sums of a window are subtracted from those of all. Where another window has a larger mass, this loses no digits,
    because the share is at most one half. The others of the window of the largest mass are summed by themselves.
    """
    if log_mass.shape[-2] == 1:
        return torch.full_like(log_mass, torch.finfo(log_mass.dtype).min), torch.zeros_like(mean)
    # two sets of windows: all, and all but the one of the largest mass
    g, index = log_mass.shape[-2], log_mass.argmax(-2, keepdim=True)
    left_out = _left_out(g, log_mass.device).view(2, *[1] * (log_mass.dim() - 2), g, 1) == index
    is_largest, log_sets = left_out[1], log_mass.masked_fill(left_out, torch.finfo(log_mass.dtype).min)
    shift = log_sets.detach().amax(-2, keepdim=True)
    masses = (log_sets - shift).exp()
    sums, totals = masses[..., None] * mean, masses.sum(-2, keepdim=True)
    all_sums, rest_sums = sums.sum(-3, keepdim=True).unbind()
    left = torch.where(is_largest, totals[1], totals[0] - masses[0])
    left_sums = torch.where(is_largest[..., None], rest_sums, all_sums - sums[0])
    return torch.where(is_largest, shift[1], shift[0]) + left.log(), left_sums / left[..., None]


@kept_table
def _left_out(g: int, device: torch.device) -> Tensor:
    """For two sets of g windows, the index of the largest at which each is left out: none, itself; (2, g)."""
    window = torch.arange(g, device=device)
    return torch.stack([torch.full_like(window, -1), window])


def merge_before(log_mass: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """For each of g windows, log mass and weighted mean of the windows before it: (..., g, s), (..., g, s, d).

    Windows are merged in pairs up a binary tree; then, down the tree, the first of a pair gets the sum before the pair,
    and the second that sum plus the first. This takes about 2 g merges, each a sum of positive terms.
    """
    g, empty = log_mass.shape[-2], torch.finfo(log_mass.dtype).min
    if g == 1:
        return torch.full_like(log_mass, empty), torch.zeros_like(mean)
    log_mass = F.pad(log_mass, (0, 0, 0, g % 2), value=empty).unflatten(-2, (-1, 2))
    mean = F.pad(mean, (0, 0, 0, 0, 0, g % 2)).unflatten(-3, (-1, 2))
    pairs = merge(log_mass[..., 0, :], mean[..., 0, :, :], log_mass[..., 1, :], mean[..., 1, :, :])
    log_before, before = merge_before(*pairs)
    first = F.pad(log_mass[..., :1, :], (0, 0, 1, 0), value=empty), F.pad(mean[..., :1, :, :], (0, 0, 0, 0, 1, 0))
    log_mass, mean = merge(log_before[..., None, :], before[..., None, :, :], *first)
    return log_mass.flatten(-3, -2)[..., :g, :], mean.flatten(-4, -3)[..., :g, :, :]


def merge(log_a: Tensor, a: Tensor, log_b: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the mass (...) and weighted mean (..., d) of two sets of tokens together."""
    log_mass = torch.logaddexp(log_a, log_b)
    return log_mass, (log_a - log_mass).exp()[..., None] * a + (log_b - log_mass).exp()[..., None] * b


def subtract(log_k: Tensor, v: Tensor, log_own: Tensor, own: Tensor, released: bool) -> tuple[Tensor, Tensor]:
    """Log mass and weighted mean of the tokens outside each window, by subtraction: (B, h, g, s), (B, h, g, s, d).

    If a window holds nearly all of a sample's mass, the difference is rounding error; the remaining share is kept above
    8 units of rounding. The released code adds 1e-5 to that share in the mass, and in the mean keeps the remaining mass
    above 1e-3 times the mass of the largest term.

    Args:
        log_k: log features of all tokens, (B, h, N, s). v: (B, h, N, d).
        log_own, own: logarithm of the mass and weighted mean of the windows, (B, h, g, s) and (B, h, g, s, d).
    """
    log_all, mean = over_all(log_k, v)
    share = (log_own - log_all).exp()
    if released:
        log_left = (1 - share + 1e-5).log()
        left = (1 - share).maximum(1e-3 * (log_k.amax(-2).detach()[:, :, None] - log_all).exp())
    else:
        left = (1 - share).clamp(min=8 * torch.finfo(share.dtype).eps)
        log_left = left.log()
    return log_all + log_left, (mean - share[..., None] * own) / left[..., None]
