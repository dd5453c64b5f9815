"""EVA (Zheng et al. 2023, arXiv:2302.04542): a window exactly, and c groups of tokens by control variates.

A query attends exactly to its local window E, and to c groups of tokens P_c through one summary each: a key k_tilde_c
that stands for the group in the softmax, and a random-feature estimate beta_c of the group's average value (eq. 16,
Algorithm 1):

    y_n = [sum_E exp(l_nm) v_m + sum_c exp(t_nc) beta_c] / [sum_E exp(l_nm) + sum_c exp(t_nc)]
    l_nm = q_n . k_m / sqrt(d) + bias,   t_nc = q_n . k_tilde_c / sqrt(d)
    beta_c = sum_{P_c} xi(k_m, omega_c) v_m / sum_{P_c} xi(k_m, omega_c)
    omega_c ~ N(mu_c, I),   mu_c = q_tilde_c + k_tilde_c

With s > 1 samples beta depends on the query, by self-normalised importance weights over the samples.
Cost: 2 N (|E| + c) C multiply-accumulates with s = 1, 2 N C more for beta and 2 c C d for the landmarks; linear in N.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.base import Attention, Grid, Site
from attention.features import full_precision, log_features, scale
from attention.landmarks import (
    Groups,
    LandmarkTransform,
    bin_counts,
    bins,
    bins_outside,
    chunks_outside,
    gather_groups,
    group_mean,
    tokens_outside,
)
from attention.local import exact_part, exact_set, local, mix_with_exact, raster, window_geometry
from attention.options import option
from attention.position import BiasKind, PositionBias
from attention.windows import from_windows


def eva(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_tilde: Tensor,
    mu: Tensor,
    omega: Tensor,
    bias: Tensor | None = None,
    *,
    groups: Groups,
    grid: Grid,
    window: Grid,
    overlap: Grid = (0, 0),
    log_count: bool = False,
    attn_drop: float = 0.0,
) -> Tensor:
    """One softmax over the exact set and the groups (eq. 16).

    Args:
        q, k, v: (B, h, N, d). k_tilde: landmarks (B, h, G, c, d), G = 1 or g windows.
        mu: proposal means (B, h, G, c, d); omega: samples (B, h, G, c, s, d), both in the scale d^-1/4 of the features.
        bias: position bias of the exact set (h, w, e).
        groups: members of the groups. window: side of the exact set along (y, x); (0, 0) for none.
        log_count: adds log |P_c| to a group's logit. attn_drop: dropout rate of the weights.
    Returns:
        (B, h, N, d).
    """
    queries, values, exact = exact_part(q, k, v, bias, grid, window, overlap)
    beta, log_mass = group_values(k, v, omega, groups)
    shared = queries.reshape(
        *queries.shape[:2], k_tilde.shape[2], -1, queries.shape[-1]
    )  # queries of one set of groups
    logits = group_logits(shared, k_tilde, mu, omega, log_mass, groups, log_count).reshape(*queries.shape[:4], -1)
    return from_windows(mix_with_exact(exact, values, logits, beta, attn_drop), grid, window)


@full_precision
def group_values(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Random-feature averages of each group, sample by sample.

    Args:
        k, v: (B, h, N, d). omega: (B, h, G, c, s, d).
    Returns:
        softmax_{P_c}[g(k'_m, omega_cs)] v_m (B, h, G, c*s, d), and LSE_{P_c} g(k'_m, omega_cs) (B, h, G, c, s).
    """
    keys, values = gather_groups(scale(k), groups), gather_groups(v, groups)
    log_xi = log_features(keys, omega).mT  # (B, h, G, c, s, t)
    log_xi = log_xi.masked_fill(~groups.valid[:, :, None], torch.finfo(log_xi.dtype).min)
    return (log_xi.softmax(-1) @ values).flatten(3, 4), log_xi.logsumexp(-1)


@full_precision
def group_logits(
    q: Tensor, k_tilde: Tensor, mu: Tensor, omega: Tensor, log_mass: Tensor, groups: Groups, log_count: bool
) -> Tensor:
    """Logits of every group's samples, t_nc + log w_ncs: (B, h, G, n, c*s); -inf for an empty group.

    With one sample w = 1. With more, w_ncs = softmax_s[g(q'_n, omega_cs) + log_mass_cs - g(mu_c, omega_cs)], where the
    squared norms of q' and mu cancel.
    """
    logits = q * q.shape[-1] ** -0.5 @ k_tilde.mT
    if log_count:
        logits = logits + groups.count().to(logits.dtype).log()[:, None]
    logits = logits.masked_fill(groups.count()[:, None] == 0, -torch.inf)
    if omega.shape[-2] == 1:
        return logits
    log_ratio = log_mass - (omega @ mu[..., None])[..., 0]
    samples = scale(q) @ omega.flatten(3, 4).mT  # (B, h, G, n, c*s)
    log_w = (samples.unflatten(-1, log_ratio.shape[-2:]) + log_ratio[:, :, :, None]).log_softmax(-1)
    return (logits[..., None] + log_w).flatten(-2)


def eva_reference(
    q,
    k,
    v,
    k_tilde,
    mu,
    omega,
    bias=None,
    *,
    groups,
    grid,
    window,
    overlap=(0, 0),
    log_count=False,
    attn_drop=0.0,
):
    """`eva`, query by query and group by group: eq. 16 with the ratio of sums of appendix C for beta."""
    N, d = q.shape[2:]
    y = torch.zeros_like(q)
    q_, k_ = scale(q), scale(k)
    for n in range(N):
        window_index = 0
        weights, values = [], []
        if window != (0, 0):
            cells, places, row = exact_set(n, grid, window, overlap)
            logits = (q[:, :, n, None] @ k[:, :, cells].mT)[:, :, 0] * d**-0.5
            weights += [(logits if bias is None else logits + bias[:, row, places]).exp()]
            values += [v[:, :, cells]]
            window_index = (n // grid[1] // window[0]) * -(-grid[1] // window[1]) + n % grid[1] // window[1]
        G = window_index if k_tilde.shape[2] > 1 else 0
        for c in range(k_tilde.shape[3]):
            members = groups.index[G, c][groups.valid[G, c]]
            if len(members) == 0:
                continue
            numerator, denominator = 0, 0
            for s in range(omega.shape[4]):
                sample, mean = omega[:, :, G, c, s, None], mu[:, :, G, c, None]
                ratio = xi(q_[:, :, n, None], sample) / xi(mean, sample)  # xi(q, w) N(w; 0, I) / N(w; mu, I)
                features = ratio * xi(k_[:, :, members], sample)  # (B, h, t)
                numerator = numerator + features[:, :, None] @ v[:, :, members]
                denominator = denominator + features.sum(-1)[..., None, None]
            t = (q[:, :, n] * k_tilde[:, :, G, c]).sum(-1, keepdim=True) * d**-0.5
            weights += [t.exp() * (len(members) if log_count else 1)]
            values += [numerator / denominator]
        weights, values = torch.cat(weights, -1), torch.cat(values, 2)
        weights = F.dropout(weights / weights.sum(-1, keepdim=True), attn_drop)
        y[:, :, n] = (weights[:, :, None] @ values)[:, :, 0]
    return y


def xi(x: Tensor, omega: Tensor) -> Tensor:
    """The positive random feature exp(omega . x - |x|^2 / 2)."""
    return ((omega * x).sum(-1) - x.square().sum(-1) / 2).exp()


class Eva(Attention):
    """Exact window plus control variates for groups. Papers: 000 Tables 1-3, 6 (|E| and C), 8 (all other options)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        window_size: int = option(7, "side of the exact window E in cells; 0: no exact set", low=0)
        num_landmarks: int = option(49, "number of groups C; 0: none (local attention)", low=0)
        layout: Literal["2d", "1d"] = option("2d", "square windows of the grid, or blocks of the raster order")
        overlap: int = option(
            0, "cells e by which a window's keys reach beyond it; the papers' overlap is w // 2", low=0
        )
        position_bias: BiasKind = option("table", "relative position bias inside the window")
        partition: Literal["all", "all_1d", "complement", "mask"] = option(
            "all", "2-D bins of all tokens; raster chunks of all; raster chunks of all but E; bins without E's members"
        )
        landmark_transform: Literal["ln_linear", "linear", "identity"] = option(
            "ln_linear", "sigma applied to group means"
        )
        num_samples: int = option(1, "samples S per group", low=1)
        mu: Literal["qk", "q", "zero", "trainable"] = option(
            "qk", "proposal mean: q_tilde + k_tilde, q_tilde, 0, a parameter"
        )
        mu_scale: float = option(1.0, "factor of the means qk and q; the released code uses 0.5", above=0)
        log_count: bool = option(False, "add log |P_c| to a group's logit")
        noise: Literal["unit", "released"] = option("unit", "standard deviation of omega: 1, or the released d^-1/4")
        released_overlap_groups: bool = option(False, "grow the bins by the overlap too, as the released code does")
        attn_drop: float = option(0.0, "dropout rate of the joint softmax weights", low=0, high=1)

    def __init__(self, site: Site, config: Config):
        super().__init__(site, config)
        c, per_window = config.num_landmarks, config.partition in ("complement", "mask")
        self.window, self.overlap = window_geometry(type(self), config, site)
        if not (config.window_size or c):
            self.refuse("window_size", 0, "with num_landmarks = 0 nothing is attended to; give one of them")
        if per_window and not (config.window_size and c):
            self.refuse("partition", config.partition, "needs window_size and num_landmarks above 0; use all")
        if config.released_overlap_groups and not (config.overlap and config.partition == "all"):
            self.refuse("released_overlap_groups", True, "needs overlap above 0 and partition all")
        self.position_bias = PositionBias(
            config.position_bias if config.window_size else "none",
            self.num_heads,
            self.head_dim,
            self.window,
            self.overlap,
        )
        if not c:
            return
        self.groups(site.grid, torch.device("cpu"))  # refuses a count that cannot part the grid
        if config.partition == "complement":
            least, _ = tokens_outside(raster(site.grid, config.layout), self.window, self.overlap)
            if c > least:
                self.refuse("num_landmarks", c, f"a window leaves only {least} tokens outside it; at most {least}")
        self.landmark_k = self.make_transform()
        if config.mu in ("qk", "q"):
            self.landmark_q = self.make_transform()
        if config.mu == "trainable":
            self.mu = nn.Parameter(torch.empty(self.num_heads, c, self.head_dim))
            nn.init.trunc_normal_(self.mu, std=0.02)
        if config.num_samples > 1:  # with one sample, evaluation uses the proposal's mean
            self.register_buffer("eval_noise", torch.randn(self.num_heads, config.num_samples, self.head_dim))

    def make_transform(self) -> nn.Module:
        kind = self.config.landmark_transform
        return nn.Identity() if kind == "identity" else LandmarkTransform(self.head_dim, norm=kind == "ln_linear")

    def groups(self, grid: Grid, device: torch.device) -> Groups:
        """The partition of the option `partition` over this grid."""
        c, partition, windows = self.config.num_landmarks, self.config.partition, raster(grid, self.config.layout)
        if partition == "complement":
            return chunks_outside(windows, self.window, self.overlap, c, device)
        area = (1, grid[0] * grid[1]) if partition == "all_1d" or self.config.layout == "1d" else grid
        margin = self.overlap if self.config.released_overlap_groups else (0, 0)
        groups = bins(area, bin_counts(c, area, "attention(eva).num_landmarks"), device, margin)
        return bins_outside(groups, windows, self.window, self.overlap) if partition == "mask" else groups

    def proposal_mean(self, q: Tensor, k_tilde: Tensor, groups: Groups) -> Tensor:
        """mu (B, h, G, c, d) in the scale of the features (eq. 28 and Table 8)."""
        kind = self.config.mu
        if kind == "zero":
            return torch.zeros_like(k_tilde)
        if kind == "trainable":
            return scale(self.mu[:, None].expand_as(k_tilde))
        q_tilde = self.landmark_q(group_mean(q, groups))
        return scale(self.config.mu_scale * (q_tilde + k_tilde if kind == "qk" else q_tilde))

    def noise(self, mu: Tensor) -> Tensor:
        """Deviation of the samples from their means, (B, h, G, c, s, d): drawn in training, fixed in evaluation."""
        shape = (*mu.shape[:-1], self.config.num_samples, mu.shape[-1])
        if self.training:
            noise = torch.randn(shape, dtype=mu.dtype, device=mu.device)
        elif self.config.num_samples > 1:
            noise = self.eval_noise[:, None, None].expand(shape)
        else:
            noise = mu.new_zeros(shape)
        return noise * (self.head_dim**-0.25 if self.config.noise == "released" else 1.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        exact = {
            "grid": raster(grid, self.config.layout),
            "window": self.window,
            "overlap": self.overlap,
            "attn_drop": self.config.attn_drop if self.training else 0.0,
        }
        if not self.config.num_landmarks:
            return local(q, k, v, self.position_bias(), **exact)
        groups = self.groups(grid, q.device)
        k_tilde = self.landmark_k(group_mean(k, groups))
        mu = self.proposal_mean(q, k_tilde, groups)
        omega = mu[..., None, :] + self.noise(mu)
        return eva(
            q, k, v, k_tilde, mu, omega, self.position_bias(), groups=groups, log_count=self.config.log_count, **exact
        )
