"""Proposal distributions of randomized attention, and the weights of their samples (LARA paper sections 3, 4).

A proposal q_c is centred on q_bar_c and the keys that q_bar_c attends to. Queries and keys are scaled, as in
`attention.parts.features`.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...parts.features import log_features
from ...parts.masking import mask_logits, masked_mean, of_grid
from ...parts.sampling import attended_keys

Proposal = Literal["mixture", "attended_keys", "pool", "pool_mixed"]
POOLED = ("pool", "pool_mixed")
"""Proposals centred on landmarks of keys."""
Weighting = Literal["balance", "coupled", "coupled_density", "decoupled"]
MIN_ALPHA = 1e-8
"""Floor of query-specific weights alpha, which can turn negative; from the released code.

It is multiplied by the number of samples of a proposal. The released code counts every sample as a proposal of its own,
so that its alpha is smaller by this number.
"""


class Proposals(NamedTuple):
    """c distributions q_c: unit Gaussians, or mixtures of unit Gaussians centred on q_bar_c + k_m.

    Attributes:
        mean: mean of the Gaussian that each of s samples is drawn from, (B, h, c, s, d).
        q_bar, log_total: for mixtures, (B, h, c, d) and log sum_m exp(q_bar_c . k_m), (B, h, c); None otherwise.
    """

    mean: Tensor
    q_bar: Tensor | None = None
    log_total: Tensor | None = None

    def log_ratio(self, omega: Tensor, log_k: Tensor) -> Tensor:
        """log q_c'(omega) / N(omega; 0, I) of every sample under every proposal, (B, h, c s, c').

        Args:
            omega: (B, h, c s, d). log_k: log features of keys at omega, (B, h, c s, M).
        """
        if self.q_bar is None or self.log_total is None:
            return log_features(self.mean[:, :, :, 0], omega).mT
        mass = log_k.logsumexp(-1, keepdim=True)
        return log_features(self.q_bar, omega).mT + mass - self.log_total[:, :, None]


def propose(
    q_bar: Tensor,
    k: Tensor,
    k_bar: Tensor | None,
    uniform: Tensor | None,
    proposal: Proposal,
    key_mask: Tensor | None = None,
    filled: Tensor | None = None,
) -> Proposals:
    """Proposals, each centred on the sum of a landmark of queries and a key.

    Args:
        q_bar, k_bar: landmarks (B, h, c, d). k: (B, h, M, d).
        uniform: numbers in (0, 1), (..., c, s), that choose the mixture's component; None takes the components' mean.
        proposal: choice of the key: drawn by attention (eq. 32), the mean under attention (33), k_bar_c (34), or k_bar
            mixed by self-attention among landmarks (35).
        key_mask: (B, M) bool, true for keys that count. filled: (B, c) bool, true for landmarks that count.
    """
    if proposal in POOLED:
        assert k_bar is not None, "pooled proposals have landmarks of keys"
        key = k_bar if proposal == "pool" else mask_logits(k_bar @ k_bar.mT, filled).softmax(-1) @ k_bar
        return Proposals((q_bar + key)[:, :, :, None])
    affinity = mask_logits(q_bar @ k.mT, key_mask)
    mean = q_bar[:, :, :, None] + attended_keys(affinity.softmax(-1), k, uniform)
    return Proposals(mean, q_bar, affinity.logsumexp(-1)) if proposal == "mixture" else Proposals(mean)


def propose_reference(q_bar, k, k_bar, proposal):
    """`propose` as two functions: the centre (B, h, d) of a sample of proposal c, given a uniform (B, h or 1, 1) or
    None; and the densities q_c(omega) of all proposals at omega (B, h, d): (B, h, 1, c).
    """
    if proposal in POOLED:
        centres = q_bar + (k_bar if proposal == "pool" else torch.softmax(k_bar @ k_bar.mT, -1) @ k_bar)
    else:
        pi = torch.softmax(q_bar @ k.mT, -1)
        centres = q_bar + pi @ k

    def centre(c, u):
        if u is None:
            return centres[:, :, c]
        z = (pi[:, :, c].cumsum(-1) <= u).sum(-1)[:, :, None, None]
        return q_bar[:, :, c] + k.gather(2, z.expand(-1, -1, 1, k.shape[-1]))[:, :, 0]

    def densities(omega):
        if proposal == "mixture":
            return (pi * normal(omega[:, :, None, None], q_bar[:, :, :, None] + k[:, :, None])).sum(-1)[:, :, None]
        return normal(omega[:, :, None], centres)[:, :, None]

    return centre, densities


def normal(x, mean):
    """The density N(x; mean, I)."""
    return torch.exp(-((x - mean) ** 2).sum(-1) / 2) / (2 * math.pi) ** (x.shape[-1] / 2)


def own_ratio(log_ratio: Tensor) -> Tensor:
    """Selects each sample's ratio under the proposal that it was drawn from: (B, h, c s, c) -> (B, h, c s)."""
    return log_ratio.unflatten(2, (log_ratio.shape[3], -1)).diagonal(dim1=2, dim2=4).mT.flatten(2)


def log_weights(
    q: Tensor,
    q_bar: Tensor,
    omega: Tensor,
    log_ratio: Tensor,
    weighting: Weighting,
    beta: float,
    key_mask: Tensor | None = None,
    filled: Tensor | None = None,
) -> Tensor:
    """log alpha_nc - log q_c(omega_c) / N(omega_c; 0, I) of every sample, (B, h, N or 1, c s).

    Args:
        q: (B, h, N, d). q_bar: (B, h, c, d). omega: s samples of each proposal, (B, h, c s, d).
        log_ratio: log q_c'(omega) / N(omega; 0, I) of every sample under every proposal, (B, h, c s, c').
        weighting, beta: see `query_weights`; "balance" is the balance heuristic alone (eq. 36).
        key_mask, filled: see `propose`; queries correspond to the last N keys. Proposals that do not count get the
            least finite number, and have it in log_ratio too.
    """
    samples = omega.shape[2] // q_bar.shape[2]
    of_samples = None if filled is None else filled.repeat_interleave(samples, 1)
    if weighting == "balance":  # b_c / q_c is one over the sum of all densities
        return mask_logits(-log_ratio.logsumexp(-1)[:, :, None], of_samples)
    own = own_ratio(log_ratio)
    alpha = query_weights(q, q_bar, omega, log_ratio, own, weighting, beta, key_mask, filled)
    return mask_logits(alpha.clamp(min=MIN_ALPHA * samples).log().to(q.dtype) - own[:, :, None], of_samples)


def query_weights(
    q: Tensor,
    q_bar: Tensor,
    omega: Tensor,
    log_ratio: Tensor,
    own: Tensor,
    weighting: Weighting,
    beta: float,
    key_mask: Tensor | None = None,
    filled: Tensor | None = None,
) -> Tensor:
    """Weights alpha_nc at every sample, (B, h, N, c s): the balance heuristic b plus query-specific terms of sum zero.

    r_nc is the softmax over the queries n of q_n . q_bar_c. "decoupled" (eq. 38): beta (r_nc - mean_c' r_nc').
    "coupled" (eq. 37): b_c (r_nc - sum_c' b_c' r_nc'), with b_c instead of the density q_c(omega_c), which is far below
    b_c at usual d (10^-39 at d = 64); "coupled_density" uses that density, in float64.
    """
    if weighting == "coupled_density":
        omega, log_ratio, own = omega.double(), log_ratio.double(), own.double()
    balance = (own - log_ratio.logsumexp(-1)).exp()[:, :, None]
    r = mask_logits(q @ q_bar.mT, of_grid(key_mask, q.shape[2]), -2).softmax(-2).to(log_ratio.dtype)
    r_own = r[..., None].expand(*r.shape, omega.shape[2] // q_bar.shape[2]).flatten(-2)
    if weighting == "decoupled":
        return balance + beta * (r_own - masked_mean(r.mT, filled)[..., None])
    correction = r_own - r @ log_ratio.softmax(-1).mT
    if weighting == "coupled":
        return balance + balance * correction
    log_normal = -omega.square().sum(-1) / 2 - omega.shape[-1] / 2 * math.log(2 * math.pi)
    return balance + (own + log_normal).exp()[:, :, None] * correction


def weights_reference(omega, density, r, c, weighting, beta, num_samples=1):
    """alpha_nc N(omega; 0, I) / q_c(omega), (B, h, N), at a sample omega (B, h, d) of proposal c, alpha floored.

    Args:
        density: q_c(omega) of all proposals, (B, h, 1, c). r: r_nc of all proposals, (B, h, N, c).
    """
    b, own = density / density.sum(-1, keepdim=True), density[..., c]
    correction = r[..., c] - (b * r).sum(-1)
    alpha = {
        "balance": b[..., c],
        "decoupled": b[..., c] + beta * (r[..., c] - r.mean(-1)),
        "coupled": b[..., c] + b[..., c] * correction,
        "coupled_density": b[..., c] + own * correction,
    }[weighting]
    alpha = alpha if weighting == "balance" else alpha.clamp(min=MIN_ALPHA * num_samples)
    return alpha * normal(omega, 0)[:, :, None] / own
