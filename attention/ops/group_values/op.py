"""Groups of tokens that queries see through one summary each: a landmark in the softmax, and a random-feature estimate
of the group's average value (EVA, Zheng et al., 2023, eq. 16, appendix C).
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from attention.ops.dispatch import with_fast_path
from attention.ops.group_values import eager as fast
from attention.ops.joint_softmax.op import exact_set
from attention.parts.features import full_precision, full_type, log_features, scale, xi
from attention.parts.geometry import count_windows
from attention.parts.groups import Groups, gather_groups

Visibility = Literal["paper", "released"]


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
