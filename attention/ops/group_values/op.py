"""Attention to groups of tokens through one summary token each: a landmark as its key in the softmax, and a
random-feature estimate of the group's average value (EVA, Zheng et al., 2023, eq. 16, appendix C).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from ...parts import groups as partitions
from ...parts.features import compute_dtype, full_precision, log_features, scale, xi
from ...parts.geometry import Windows
from ...parts.groups import Groups, gather_groups
from ..kernels import with_fast_path
from . import fused

Visibility = Literal["paper", "released"]


@with_fast_path(fused.group_mean, fused.covers_mean)
def group_mean(x: Tensor, groups: Groups) -> Tensor:
    """`attention.parts.groups.group_mean`."""
    return partitions.group_mean(x, groups)


@with_fast_path(fused.group_values, fused.covers)
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
    log_xi = log_xi.masked_fill(~groups.valid[..., None, :], torch.finfo(log_xi.dtype).min)
    return (log_xi.softmax(-1) @ values).flatten(3, 4), log_xi.logsumexp(-1)


def group_values_reference(k, v, omega, groups):
    """`group_values`, group by group: ratios of sums of features."""
    values, masses = [], []
    all_members = (
        index[valid] for index, valid in zip(groups.members.flatten(0, 1), groups.valid.flatten(0, 1), strict=True)
    )
    for members, samples in zip(all_members, omega.flatten(2, 3).unbind(2), strict=True):
        features = xi(scale(k[:, :, None, members]), samples[:, :, :, None])  # (B, h, s, t)
        values.append(features @ v[:, :, members] / features.sum(-1, keepdim=True))
        masses.append(features.sum(-1).log())
    G, c, s, _ = omega.shape[2:]
    return torch.cat(values, 2).unflatten(2, (G, c * s)), torch.stack(masses, 2).unflatten(2, (G, c))


@full_precision
def group_logits(
    q: Tensor, k_tilde: Tensor, mu: Tensor, omega: Tensor, log_mass: Tensor, prior: Tensor | None = None
) -> Tensor:
    """Logits of every group's samples for windows of queries (B, h, g, w, d), t_nc + log w_ncs: (B, h, g, w, c*s).

    With one sample w = 1. With more, w_ncs = softmax_s[g(q'_n, omega_cs) + log_mass_cs - g(mu_c, omega_cs)], in which
    the squared norms of q' and mu cancel.

    Args:
        k_tilde, mu, omega: see `eva`. log_mass: see `group_values`.
        prior: see `group_prior`.
    """
    (B, h, g, w, d), G = q.shape, k_tilde.shape[2]
    q = q.reshape(B, h, G, g * w // G, d)
    logits = q * d**-0.5 @ k_tilde.mT
    if prior is not None:
        g_prior, w_prior, c = prior.shape[-3:]
        logits = logits + prior.reshape(*prior.shape[:-3], G, g_prior * w_prior // G, c)

    if omega.shape[-2] > 1:
        log_ratio = log_mass - (omega @ mu[..., None])[..., 0]
        samples = scale(q) @ omega.flatten(3, 4).mT  # (B, h, G, n, c*s)
        log_w = (samples.unflatten(-1, log_ratio.shape[-2:]) + log_ratio[:, :, :, None]).log_softmax(-1)
        logits = (logits[..., None] + log_w).flatten(-2)
    return logits.reshape(B, h, g, w, logits.shape[-1])


def group_prior(q: Tensor, groups: Groups, visibility: Visibility, log_count: bool, windows: Windows) -> Tensor | None:
    """Term added to the logit t_nc, broadcast to (..., g, w, c): log |P_c| with `log_count`, -inf for a group that is
    not attended to; None if there is nothing to add.
    """
    if groups.tiles and not windows.causal and not log_count:  # tiles are never empty
        return None
    count = groups.num_members()[..., None, :].to(compute_dtype(q))
    attended = attended_groups(groups, visibility, windows)
    return (count.log() if log_count else torch.zeros_like(count)).masked_fill(~attended, -torch.inf)


def attended_groups(groups: Groups, visibility: Visibility, windows: Windows) -> Tensor:
    """Mask of the groups that every query attends to, broadcast to (..., g, w, c): groups with members; in causal
    attention only groups that end before the query's window ("paper") or before the query ("released").
    """
    filled = (groups.num_members() > 0)[..., None, :]
    if not windows.causal:
        return filled
    n = torch.arange(windows.num_windows * windows.num_queries, device=filled.device)
    last = groups.members.where(groups.valid, -1).amax(-1)[..., None, :]
    start = n if visibility == "released" else n - n % windows.size[1] - windows.overlap[1]
    return filled & (last < start.view(windows.num_windows, windows.num_queries, 1))


def attended_summaries(n, q, k, v, k_tilde, mu, omega, groups, window, visibility, log_count, windows):
    """Pairs of a logit (B, h, 1) and a value (B, h, 1, d), one per group that query n attends to, for the twins: eq. 16
    with the ratio of sums of appendix C as beta.
    """
    (q_, k_), d, pairs = (scale(q), scale(k)), q.shape[-1], []
    window_tokens, _, _ = windows._replace(causal=False).attended(n)
    for c in range(k_tilde.shape[3]):
        members = groups.members[window, c][groups.valid[window, c]]
        before = {"paper": min(window_tokens, default=0), "released": n}[visibility]
        end = before if windows.causal else q.shape[2]
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
