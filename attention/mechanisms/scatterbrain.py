"""Scatterbrain (Chen et al. 2021, arXiv:2110.15343): exact on a sparse support, s random features elsewhere.

    y_n = sum_m A_nm v_m / sum_m A_nm,   A_nm = exp(q_n . k_m / sqrt(d)) on the support, phi(q_n) . phi(k_m) off it

The support is a query's window (EVA appendix G, eq. 30), or the clusters that SMYRF's hash finds for it. The matrix A
is unbiased, its rows' normalisation is not. With windows that do not overlap, the sums off the support are merged from
those of the other windows, so that nothing cancels; otherwise the support's part is subtracted from the sums over all
tokens.
Cost: 4 N s C + 2 N |E| C multiply-accumulates, N s C more with subtraction; with r rounds of clusters of c tokens
4 N s C + 2 r N c C + r N c s h + 2 r N (d + 2) h. Linear in N.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attention.base import Attention, Cost, LayerContext
from attention.costs import num_padded, window_cost
from attention.mechanisms.scatterbrain_lsh import lsh_cost, scatterbrain_lsh
from attention.ops.joint_softmax.op import exact_set, joint_softmax, seen_exactly
from attention.options import option
from attention.parts.features import full_precision, log_features, phi, scale
from attention.parts.geometry import Grid, split_prefix, to_windows, window_mask
from attention.parts.leave_one_out import Complement, merge_others, subtract
from attention.parts.position import BiasKind
from attention.parts.sampling import Draws, gaussian
from attention.window_options import exact_window, window_options, windows_on


@full_precision
def scatterbrain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    bias: Tensor | None = None,
    *,
    complement: Complement = "merge",
    **windows: Any,
) -> Tensor:
    """Windows exactly, all else by random features, in one softmax.

    Args:
        q: (B, h, N, d). k, v: (B, h, P + N, d). omega: samples (h, s, d). bias: of the window, (h, w, e).
        complement: sums off the window, see `merge_others` and `subtract`; windows that overlap need the latter.
        windows: grid, window and overlap, see `joint_softmax`.
    Returns:
        (B, h, N, d), float32 at least.
    """
    grid, window, overlap = windows["grid"], windows["window"], windows.get("overlap", (0, 0))
    k_grid, v_grid = (split_prefix(x, q.shape[2])[1] for x in (k, v))
    log_k = log_features(scale(k_grid), omega)  # (B, h, N, s)
    log_own = to_windows(log_k, grid, window, overlap).mT  # (B, h, g, s, e)
    mask = window_mask(grid, window, overlap, q.device)
    if mask is not None:
        log_own = log_own.masked_fill(~mask[:, None], torch.finfo(log_own.dtype).min)
    own = log_own.logsumexp(-1), log_own.softmax(-1) @ to_windows(v_grid, grid, window, overlap)
    released = complement == "released"
    log_mass, beta = merge_others(*own) if complement == "merge" else subtract(log_k, v_grid, *own, released)
    log_q = to_windows(log_features(scale(q), omega), grid, window)
    logits = log_q + log_mass[..., None, :] - math.log(omega.shape[-2])
    return joint_softmax(q, k, v, bias, values=beta, logits=logits, **windows)


def scatterbrain_reference(q, k, v, omega, bias=None, *, complement="merge", **windows):
    """`scatterbrain`, query by query: eq. 30."""
    N, S = q.shape[2], omega.shape[-2]
    phi_q, phi_k, v_grid, y = phi(q, omega), phi(k[:, :, -N:], omega), v[:, :, -N:], torch.zeros_like(q)
    for n in range(N):
        cells, *_ = exact_set(n, windows["grid"], windows["window"], windows.get("overlap", (0, 0)))
        outside = [m for m in range(N) if m not in cells]
        logits, values = seen_exactly(n, q, k, v, bias, **windows)
        mass = phi_k[:, :, outside].sum(2)  # (B, h, s)
        mean = phi_k[:, :, outside].mT @ v_grid[:, :, outside] / (mass[..., None] if outside else 1)
        if complement == "released":
            largest = phi_k.amax(2).detach()
            mean = mean * (mass / mass.maximum(1e-3 * largest))[..., None]
            mass = mass + 1e-5 * phi_k.sum(2)
        exact, estimate = logits.exp(), phi_q[:, :, n] * mass / S
        numerator = (exact[:, :, None] @ values + estimate[:, :, None] @ mean)[:, :, 0]
        y[:, :, n] = numerator / (exact.sum(-1) + estimate.sum(-1))[..., None]
    return y


class Scatterbrain(Attention):
    """Sparse exact attention over random features. Papers: EVA Tables 2, 15 'Scatterbrain' (windows)."""

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

    def __init__(self, site: LayerContext, config: Config):
        super().__init__(site, config)
        self.window, self.overlap, self.position_bias = exact_window(self, site)
        if config.support == "lsh":
            self.check_lsh(site)
            self.register_buffer("directions", self.draw_directions(self.qkv.weight))
        else:
            self.check_local()
        self.register_buffer("omega", self.draw_samples(self.qkv.weight))

    def check_lsh(self, site: LayerContext) -> None:
        neutral = {"overlap": 0, "position_bias": "none", "complement": "merge"}
        self.refuse_unused(neutral, "does not act with support lsh")
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

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        if config.support == "lsh":
            return lsh_cost(context, config)
        window, windows = window_cost(context, config), windows_on(config, context.grid)
        N, C, queries = context.num_tokens, context.dim, num_padded(windows)
        s = config.num_samples * (2 if config.features == "hyperbolic" else 1)
        features, total = 2 * N * s * C, 0 if config.complement == "merge" else N * s * C
        inside, outside = windows.count * windows.num_keys * s * C, queries * s * C  # their values
        return Cost(window.parameters, window.macs + features + total + inside + outside)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        config = self.config
        omega = self.draw_samples(q) if self.training and config.sampling == "redraw" else self.omega
        if config.features == "hyperbolic":
            omega = torch.cat([omega, -omega], -2)
        if config.support == "lsh":
            directions = self.draw_directions(q) if self.training else self.directions
            return scatterbrain_lsh(q, k, v, omega, directions, cluster_size=math.prod(self.window)).to(v.dtype)
        options = {"complement": config.complement, **window_options(self, grid)}
        return scatterbrain(q, k, v, omega, self.position_bias(), **options).to(v.dtype)
