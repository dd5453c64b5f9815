"""Scatterbrain (Chen et al., 2021; paper 002, paper 000 appendix G, eq. 30): exact on a sparse support, random features
elsewhere.

    y_n = sum_m A_nm v_m / sum_m A_nm,   A_nm = exp(q_n . k_m / sqrt(d)) on the support, phi(q_n) . phi(k_m) off it

The support is a query's window, or the clusters that SMYRF's hash finds for it. The matrix A is unbiased, its rows'
normalisation is not. With windows that do not overlap, the sums off the support are merged from those of the other
windows, so that nothing cancels; otherwise the support's part is subtracted from the sums over all tokens.

Cost at s samples: 4 N s C + 2 N |E| C multiply-accumulates, N s C more with subtraction; with r rounds of clusters of c
tokens 4 N s C + 2 r N c C + r N c s h + 2 r N (d + 2) h. Linear in N.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Attention, Grid, Site
from attention.draws import Draws, gaussian
from attention.eva import xi
from attention.features import full_precision, log_features, scale
from attention.hashing import cluster_ids, cluster_mask, from_clusters, hash_clusters, to_clusters
from attention.local import exact_logits, exact_set, mix_with_exact, raster, window_geometry
from attention.options import option
from attention.position import BiasKind, PositionBias
from attention.smyrf import same_cluster
from attention.windows import from_windows, to_windows, window_mask

Complement = Literal["merge", "subtract", "released"]


@full_precision
def scatterbrain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    bias: Tensor | None = None,
    *,
    grid: Grid,
    window: Grid,
    overlap: Grid = (0, 0),
    complement: Complement = "merge",
) -> Tensor:
    """Windows exactly, all else by random features, in one softmax.

    Args:
        q, k, v: (B, h, N, d). omega: samples (h, s, d). bias: of the window, (h, w, e).
        window, overlap: side of the windows and their reach beyond, along (y, x).
        complement: sums off the window, see `merge_others` and `subtract`; windows that overlap need the latter.
    Returns:
        (B, h, N, d), float32 at least.
    """
    exact, values = exact_logits(q, k, bias, grid, window, overlap), to_windows(v, grid, window, overlap)
    log_k = log_features(scale(k), omega)  # (B, h, N, s)
    log_own = to_windows(log_k, grid, window, overlap).mT  # (B, h, g, s, e)
    mask = window_mask(grid, window, overlap, q.device)
    if mask is not None:
        log_own = log_own.masked_fill(~mask[:, None], torch.finfo(log_own.dtype).min)
    own = log_own.logsumexp(-1), log_own.softmax(-1) @ values
    log_mass, beta = merge_others(*own) if complement == "merge" else subtract(log_k, v, *own, complement == "released")
    log_q = to_windows(log_features(scale(q), omega), grid, window)
    logits = log_q + log_mass[..., None, :] - math.log(omega.shape[-2])
    return from_windows(mix_with_exact(exact, values, logits, beta), grid, window)


def merge_others(log_mass: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """For each of g parts, the logarithm of the mass and the weighted mean of all others: (..., g, s), (..., g, s, d).

    Parts are merged in pairs up a binary tree; what lies outside a pair, merged with one of the two, lies outside the
    other. About 2 g merges, each a sum of positive terms.
    """
    g, empty = log_mass.shape[-2], torch.finfo(log_mass.dtype).min
    if g == 1:
        return torch.full_like(log_mass, empty), torch.zeros_like(mean)
    log_mass = F.pad(log_mass, (0, 0, 0, g % 2), value=empty).unflatten(-2, (-1, 2))
    mean = F.pad(mean, (0, 0, 0, 0, 0, g % 2)).unflatten(-3, (-1, 2))
    pairs = merge(log_mass[..., 0, :], mean[..., 0, :, :], log_mass[..., 1, :], mean[..., 1, :, :])
    log_outside, outside = merge_others(*pairs)
    log_mass, mean = merge(log_outside[..., None, :], outside[..., None, :, :], log_mass.flip(-2), mean.flip(-3))
    return log_mass.flatten(-3, -2)[..., :g, :], mean.flatten(-4, -3)[..., :g, :, :]


def merge(log_a: Tensor, a: Tensor, log_b: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithm of the mass (...) and weighted mean (..., d) of two parts together."""
    log_mass = torch.logaddexp(log_a, log_b)
    return log_mass, (log_a - log_mass).exp()[..., None] * a + (log_b - log_mass).exp()[..., None] * b


def subtract(log_k: Tensor, v: Tensor, log_own: Tensor, own: Tensor, released: bool) -> tuple[Tensor, Tensor]:
    """What is left of all tokens without each window's own, by subtraction: (B, h, g, s), (B, h, g, s, d).

    Where a window holds nearly all of a sample's mass the difference is rounding; the share left is kept above 8 units
    of rounding. The released code adds 1e-5 to that share in the mass, and in the mean keeps the mass left above 1e-3
    times that of the largest term.

    Args:
        log_k: log features of all tokens, (B, h, N, s). v: (B, h, N, d).
        log_own, own: logarithm of the mass and weighted mean of the windows, (B, h, g, s) and (B, h, g, s, d).
    """
    log_all, mean = log_k.logsumexp(-2)[:, :, None], (log_k.mT.softmax(-1) @ v)[:, :, None]
    share = (log_own - log_all).exp()
    if released:
        log_left = (1 - share + 1e-5).log()
        left = (1 - share).maximum(1e-3 * (log_k.amax(-2).detach()[:, :, None] - log_all).exp())
    else:
        left = (1 - share).clamp(min=8 * torch.finfo(share.dtype).eps)
        log_left = left.log()
    return log_all + log_left, (mean - share[..., None] * own) / left[..., None]


def scatterbrain_reference(q, k, v, omega, bias=None, *, grid, window, overlap=(0, 0), complement="merge"):
    """`scatterbrain`, query by query: eq. 30."""
    N, d, S = *q.shape[2:], omega.shape[-2]
    phi_q, phi_k, y = phi(q, omega), phi(k, omega), torch.zeros_like(v)
    for n in range(N):
        cells, places, row = exact_set(n, grid, window, overlap)
        outside = [m for m in range(N) if m not in cells]
        logits = (q[:, :, n, None] @ k[:, :, cells].mT)[:, :, 0] * d**-0.5
        exact = (logits if bias is None else logits + bias[:, row, places]).exp()
        mass = phi_k[:, :, outside].sum(2)  # (B, h, s)
        mean = phi_k[:, :, outside].mT @ v[:, :, outside] / mass[..., None]
        if complement == "released":
            largest = phi_k.amax(2).detach()
            mean = mean * (mass / mass.maximum(1e-3 * largest))[..., None]
            mass = mass + 1e-5 * phi_k.sum(2)
        estimate = phi_q[:, :, n] * mass / S
        numerator = (exact[:, :, None] @ v[:, :, cells] + estimate[:, :, None] @ mean)[:, :, 0]
        y[:, :, n] = numerator / (exact.sum(-1) + estimate.sum(-1))[..., None]
    return y


def phi(x: Tensor, omega: Tensor) -> Tensor:
    """Random features of tokens (B, h, N, d) at samples (h, s, d): (B, h, N, s)."""
    return xi(scale(x)[..., None, :], omega[:, None])


@full_precision
def scatterbrain_lsh(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, directions: Tensor, *, cluster_size: int
) -> Tensor:
    """Hashed clusters exactly, all else by random features; a pair that meets in several rounds counts once.

    Args:
        q, k, v: (B, h, N, d). omega: samples (h, s, d). directions: of the hash, one per round, (h, r, d + 2).
    Returns:
        (B, h, N, d), float32 at least.
    """
    (N, d), S = v.shape[2:], omega.shape[-2]
    log_k = log_features(scale(k), omega)
    log_q = log_features(scale(q), omega) + log_k.logsumexp(-2, keepdim=True) - math.log(S)
    log_mass = log_q.logsumexp(-1, keepdim=True)  # of the estimated row, (B, h, N, 1)
    low_q, low_k = log_q.softmax(-1), log_k.softmax(-2)  # low_q low_k^T: the estimate, row by row divided by its mass
    of_q, of_k = hash_clusters(q, k, directions, cluster_size)
    valid = cluster_mask(N, cluster_size, q.device)
    valid = valid[:, :, None] & valid[:, None]  # queries too: the shift suits them in their own cluster alone
    logits = (to_clusters(q * q.shape[-1] ** -0.5, of_q) @ to_clusters(k, of_k).mT).masked_fill(~valid, -torch.inf)
    largest = from_clusters(logits.detach().amax(-1, keepdim=True), of_q, N).amax(2)
    shift = largest.maximum(log_mass.detach())
    low_mass = (log_mass - shift).exp()
    meetings = [to_clusters(cluster_ids(clusters, N).mT, clusters) for clusters in (of_q, of_k)]
    times = (meetings[0][..., None, :] == meetings[1][..., None, :, :]).sum(-1).clamp(min=1)
    exact = (logits - to_clusters(shift, of_q)).exp() / times
    estimate = (to_clusters(low_q, of_q) @ to_clusters(low_k, of_k).mT).masked_fill(~valid, 0) / times
    correction = (exact - to_clusters(low_mass, of_q) * estimate) @ to_clusters(v, of_k)
    sums = torch.cat([correction, exact.sum(-1, keepdim=True), estimate.sum(-1, keepdim=True)], -1)
    correction, exact, estimate = from_clusters(sums, of_q, N).sum(2).split([d, 1, 1], -1)
    left = (1 - estimate).clamp(min=8 * torch.finfo(estimate.dtype).eps)
    return (low_mass * (low_q @ (low_k.mT @ v)) + correction) / (exact + low_mass * left)


def scatterbrain_lsh_reference(q, k, v, omega, directions, *, cluster_size):
    """`scatterbrain_lsh` by the dense matrix A."""
    estimate = phi(q, omega) @ phi(k, omega).mT / omega.shape[-2]
    exact = (q @ k.mT * q.shape[-1] ** -0.5).exp()
    support = sum(same_cluster(q, k, direction, cluster_size) for direction in directions.unbind(1)) > 0
    A = torch.where(support, exact, estimate)
    return A @ v / A.sum(-1, keepdim=True)


class Scatterbrain(Attention):
    """Sparse exact attention over random features. Papers: 002; 000 Tables 2, 15 'Scatterbrain' (windows)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_samples: int = option(96, "samples omega per head", low=1)
        support: Literal["local", "lsh"] = option("local", "windows, or clusters by locality-sensitive hashing")
        window_size: int = option(7, "side w of the window in cells; lsh: clusters of w * w tokens", low=1)
        layout: Literal["2d", "1d"] = option(
            "2d", "square windows of the grid, or blocks of w tokens of the raster order; lsh: clusters of w tokens"
        )
        overlap: int = option(0, "cells by which a window's keys reach beyond it; needs complement: subtract", low=0)
        position_bias: BiasKind = option("table", "relative position bias inside the window; none with support lsh")
        complement: Complement = option(
            "merge", "sums off the windows: of the other windows; all less the own; so by the released code"
        )
        num_rounds: int = option(2, "rounds of hashing; acts with support lsh", low=1)
        features: Literal["positive", "hyperbolic"] = option("positive", "xi(x, omega), or with xi(x, -omega) also")
        draws: Draws = option(
            "iid", "samples: independent, or orthogonal in blocks of d (norms of a Gaussian, or sqrt d)"
        )
        sampling: Literal["redraw", "fixed"] = option("redraw", "samples of training; evaluation keeps one set")

    def __init__(self, site: Site, config: Config):
        super().__init__(site, config)
        self.window, self.overlap = window_geometry(type(self), config, site)
        if config.support == "lsh":
            self.check_lsh(site)
            self.register_buffer("directions", self.draw_directions(self.qkv.weight))
        else:
            self.check_local()
            self.position_bias = PositionBias(
                config.position_bias, self.num_heads, self.head_dim, self.window, self.overlap
            )
        self.register_buffer("omega", self.draw_samples(self.qkv.weight))

    def check_lsh(self, site: Site) -> None:
        for name, neutral in (("overlap", 0), ("position_bias", "none"), ("complement", "merge")):
            if getattr(self.config, name) != neutral:
                self.refuse(name, getattr(self.config, name), f"does not act with support lsh; set {name}: {neutral}")
        (H, W), size = site.grid, math.prod(self.window)
        if size > H * W:
            self.refuse("window_size", self.config.window_size, f"clusters of {size} tokens; the {H}x{W} grid has less")

    def check_local(self) -> None:
        if self.config.num_rounds != self.Config.num_rounds:
            self.refuse("num_rounds", self.config.num_rounds, "nothing is hashed with support local; leave it out")
        if self.config.overlap and self.config.complement == "merge":
            self.refuse("overlap", self.config.overlap, "windows do not part the grid; set complement: subtract")

    def draw_samples(self, like: Tensor) -> Tensor:
        """Samples (h, s, d) on the device of `like`, in its full type."""
        return gaussian(self.config.draws, (self.num_heads, self.config.num_samples, self.head_dim), like)

    def draw_directions(self, like: Tensor) -> Tensor:
        """Directions (h, r, d + 2) of the hash."""
        return gaussian("iid", (self.num_heads, self.config.num_rounds, self.head_dim + 2), like)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        config = self.config
        omega = self.draw_samples(q) if self.training and config.sampling == "redraw" else self.omega
        if config.features == "hyperbolic":
            omega = torch.cat([omega, -omega], -2)
        if config.support == "lsh":
            directions = self.draw_directions(q) if self.training else self.directions
            return scatterbrain_lsh(q, k, v, omega, directions, cluster_size=math.prod(self.window)).to(v.dtype)
        exact = {"grid": raster(grid, config.layout), "window": self.window, "overlap": self.overlap}
        return scatterbrain(q, k, v, omega, self.position_bias(), complement=config.complement, **exact).to(v.dtype)
