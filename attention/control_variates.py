"""Groups of tokens that queries see through one summary each: a landmark in the softmax, and a random-feature estimate
of the group's average value (EVA, Zheng et al., 2023, eq. 16, appendix C).
"""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attention.exact import exact_set
from attention.features import full_precision, full_type, log_features, scale, xi
from attention.kernels import groups as fast
from attention.kernels import with_fast_path
from attention.landmarks import Groups, LandmarkTransform, gather_groups, group_mean
from attention.windows import count_windows

Visibility = Literal["paper", "released"]


class Landmarks(nn.Module):
    """What groups are seen through: landmarks of their keys, and proposals about those of queries and keys (eq. 26 to
    28, Table 8).

    Args:
        config: options of `eva`. num_heads, head_dim: h, d.
    """

    def __init__(self, config: Any, num_heads: int, head_dim: int):
        super().__init__()
        self.config = config
        kind = config.landmark_transform
        transform = (
            nn.Identity if kind == "identity" else partial(LandmarkTransform, head_dim, norm=kind == "ln_linear")
        )
        self.k = transform()
        if config.mu in ("qk", "q"):
            self.q = transform()
        if config.mu == "trainable":
            self.mu = nn.Parameter(torch.empty(num_heads, config.num_landmarks, head_dim))
            nn.init.trunc_normal_(self.mu, std=0.02)
        if config.num_samples > 1:  # with one sample, evaluation uses the proposal's mean
            self.register_buffer("eval_noise", torch.randn(num_heads, config.num_samples, head_dim))

    def forward(self, q: Tensor, k: Tensor, groups: Groups, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """k_tilde (B, h, G, c, d), means mu (B, h, G, c, d) and samples omega (B, h, G, c, s, d) of the proposals.

        Args:
            q, k: tokens of the grid, (B, h, N, d). first: which of the layer's groups the first of `groups` is.
        """
        k_tilde = self.k(group_mean(k, groups))
        mu = scale(self.mean(q, k_tilde, groups, first))
        return k_tilde, mu, mu[..., None, :] + self.noise(mu)

    def mean(self, q: Tensor, k_tilde: Tensor, groups: Groups, first: int) -> Tensor:
        """mu (B, h, G, c, d), unscaled."""
        kind = self.config.mu
        if kind == "zero":
            return torch.zeros_like(k_tilde)
        if kind == "trainable":
            return self.mu[:, None, first : first + k_tilde.shape[3]].expand_as(k_tilde)
        q_tilde = self.q(group_mean(q, groups))
        return self.config.mu_scale * (q_tilde + k_tilde if kind == "qk" else q_tilde)

    def noise(self, mu: Tensor) -> Tensor:
        """Deviation of the samples from their means, (B, h, G, c, s, d): drawn in training, fixed in evaluation."""
        shape = (*mu.shape[:-1], self.config.num_samples, mu.shape[-1])
        if self.training:
            noise = torch.randn(shape, dtype=mu.dtype, device=mu.device)
        elif self.config.num_samples > 1:
            noise = self.eval_noise[:, None, None].expand(shape)
        else:
            noise = mu.new_zeros(shape)
        return noise * (mu.shape[-1] ** -0.25 if self.config.noise == "released" else 1.0)


@with_fast_path(fast.group_values, fast.covers)
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
    q: Tensor,
    k_tilde: Tensor,
    mu: Tensor,
    omega: Tensor,
    log_mass: Tensor,
    prior: Tensor | None = None,
) -> Tensor:
    """Logits of every group's samples for queries (B, h, G, n, d), t_nc + log w_ncs: (B, h, G, n, c*s).

    With one sample w = 1. With more, w_ncs = softmax_s[g(q'_n, omega_cs) + log_mass_cs - g(mu_c, omega_cs)], where the
    squared norms of q' and mu cancel.

    Args:
        k_tilde, mu, omega: see `eva`. log_mass: see `group_values`.
        prior: see `group_prior`.
    """
    logits = q * q.shape[-1] ** -0.5 @ k_tilde.mT
    logits = logits if prior is None else logits + prior
    if omega.shape[-2] == 1:
        return logits
    log_ratio = log_mass - (omega @ mu[..., None])[..., 0]
    samples = scale(q) @ omega.flatten(3, 4).mT  # (B, h, G, n, c*s)
    log_w = (samples.unflatten(-1, log_ratio.shape[-2:]) + log_ratio[:, :, :, None]).log_softmax(-1)
    return (logits[..., None] + log_w).flatten(-2)


def group_prior(
    q: Tensor, groups: Groups, visibility: Visibility | None, log_count: bool, windows: dict[str, Any]
) -> Tensor | None:
    """Added to t_nc, broadcast to (G, n, c): log |P_c| with `log_count`, -inf for a group that is not seen; None
    for nothing.
    """
    if groups.tiles and visibility is None and not log_count:  # tiles have members
        return None
    count = groups.count()[:, None].to(full_type(q))
    num_queries = count_windows(windows["grid"], windows["window"]) * windows["window"][1] if visibility else 1
    seen = visible_groups(groups, visibility, num_queries, windows)
    return (count.log() if log_count else torch.zeros_like(count)).masked_fill(~seen, -torch.inf)


def visible_groups(groups: Groups, visibility: Visibility | None, num_queries: int, windows: dict[str, Any]) -> Tensor:
    """Which groups every query sees, broadcast to (G, n, c): those with members; in causal attention only those that
    end before the query's exact set ("paper"), or before the query ("released").
    """
    filled = (groups.count() > 0)[:, None]
    if visibility is None:
        return filled
    n, last = torch.arange(num_queries, device=filled.device), groups.index.where(groups.valid, -1).amax(-1)
    start = n if visibility == "released" else n - n % windows["window"][1] - windows.get("overlap", (0, 0))[1]
    return filled & (last[:, None] < start[:, None])


def seen_in_groups(n, q, k, v, k_tilde, mu, omega, groups, window, visibility, log_count, windows):
    """Pairs of query n's logit (B, h, 1) on a group that it sees and the group's value (B, h, 1, d), for the twins:
    eq. 16 with the ratio of sums of appendix C for beta.
    """
    (q_, k_), d, pairs = (scale(q), scale(k)), q.shape[-1], []
    exact, _, _ = exact_set(n, windows["grid"], windows["window"], windows.get("overlap", (0, 0)))
    for c in range(k_tilde.shape[3]):
        members = groups.index[window, c][groups.valid[window, c]]
        end = {None: q.shape[2], "paper": min(exact, default=0), "released": n}[visibility]
        if len(members) == 0 or members.max() >= end:
            continue
        numerator, denominator = 0, 0
        for s in range(omega.shape[4]):
            sample, mean = omega[:, :, window, c, s, None], mu[:, :, window, c, None]
            ratio = xi(q_[:, :, n, None], sample) / xi(mean, sample)  # xi(q, w) N(w; 0, I) / N(w; mu, I)
            features = ratio * xi(k_[:, :, members], sample)  # (B, h, t)
            numerator = numerator + features[:, :, None] @ v[:, :, members]
            denominator = denominator + features.sum(-1)[..., None, None]
        t = (q[:, :, n] * k_tilde[:, :, window, c]).sum(-1, keepdim=True) * d**-0.5
        pairs.append((t + (math.log(len(members)) if log_count else 0), numerator / denominator))
    return pairs
