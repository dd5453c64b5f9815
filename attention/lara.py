"""LARA (Zheng, Wang, Kong 2022, arXiv:2204.04667): randomized attention from c proposals that all queries share.

Randomized attention needs samples of each query's own distribution. Linear randomized attention draws omega_c from c
proposals q_c, each centred on one segment of the grid, and combines them for each query by self-normalised multiple
importance sampling (section 4, eq. 10; appendix G.3, Algorithm 3):

    y_n = sum_c a'_nc xi(q_n, omega_c) sum_m xi(k_m, omega_c) v_m / the same without v_m,
    a'_nc = alpha_nc(omega_c) N(omega_c; 0, I) / q_c(omega_c),   sum_c alpha_nc = 1.

Cost: 5 N c C multiply-accumulates, N c C of them for query-specific alpha, and c^2 C for the densities; linear in N.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attention.base import Attention, Grid, Site, merge_heads, split_heads, split_prefix
from attention.features import (
    full_precision,
    log_features,
    mix_features,
    mixture_draws,
    random_seed,
    sample_indices,
    scale,
)
from attention.landmarks import LandmarkTransform, bin_counts, bins, group_mean
from attention.options import option
from attention.ra import gather_keys

Weighting = Literal["balance", "coupled", "coupled_density", "decoupled"]
MIN_ALPHA = 1e-8
"""Floor of query-specific weights alpha, which can turn negative (released code)."""


@full_precision
def lara(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bar: Tensor,
    k_bar: Tensor | None,
    noise: Tensor,
    uniform: Tensor | None = None,
    *,
    proposal: Literal["mixture", "attended_keys", "pool", "pool_mixed"] = "pool_mixed",
    weighting: Weighting = "decoupled",
    beta: float = 2.0,
) -> Tensor:
    """Self-normalised multiple importance sampling with shared proposals (paper 001 eq. 10).

    Args:
        q, k, v: (B, h, N, d). q_bar, k_bar: landmarks (B, h, c, d); k_bar acts with the pool proposals.
        noise: Gaussian part of omega in the features' scale, s samples of each proposal, broadcast to (B, h, c, s, d).
        uniform: in (0, 1), (..., c, s); chooses the mixture's component, whose mean stands in without it.
        proposal: q_c is centred on q_bar_c plus: a key drawn by attention (eq. 32), the mean key by attention (33),
            k_bar_c (34), or k_bar mixed by self-attention among landmarks (35).
        weighting, beta: see `query_weights`; "balance" is eq. 36.
    Returns:
        (B, h, N, d), float32 at least.
    """
    q, k, q_bar = scale(q), scale(k), scale(q_bar)
    if proposal in ("pool", "pool_mixed"):
        key = scale(k_bar)
        key = ((key @ key.mT).softmax(-1) @ key if proposal == "pool_mixed" else key)[:, :, :, None]
    else:
        affinity = q_bar @ k.mT
        pi = affinity.softmax(-1)
        key = (pi @ k)[:, :, :, None] if uniform is None else gather_keys(k, sample_indices(pi, uniform))
    mean = q_bar[:, :, :, None] + key
    omega = mean + noise  # (B, h, c, s, d)
    c, s = omega.shape[2:4]
    omega = omega.flatten(2, 3)
    log_k = log_features(k, omega).mT  # (B, h, c s, M)
    # log q_c'(omega) - log N(omega; 0, I) of every sample under every proposal, (B, h, c s, c').
    if proposal == "mixture":
        mass = log_k.logsumexp(-1, keepdim=True)
        log_ratio = log_features(q_bar, omega).mT + mass - affinity.logsumexp(-1)[:, :, None]
    else:
        log_ratio = log_features(mean[:, :, :, 0], omega).mT
    if weighting == "balance":
        log_weight = -log_ratio.logsumexp(-1)[:, :, None]
    else:
        own = log_ratio.unflatten(2, (c, s)).diagonal(dim1=2, dim2=4).mT.flatten(2)  # of the proposal it came from
        alpha = query_weights(q, q_bar, omega, log_ratio, own, weighting, beta)
        log_weight = alpha.clamp(min=MIN_ALPHA).log().to(q.dtype) - own[:, :, None]
    return mix_features(q @ omega.mT + log_weight, log_k, v)


def query_weights(
    q: Tensor, q_bar: Tensor, omega: Tensor, log_ratio: Tensor, own: Tensor, weighting: Weighting, beta: float
) -> Tensor:
    """alpha_nc at every sample, (B, h, N, c s): the balance heuristic b plus a query-specific term that sums to zero.

    r_nc is the softmax over the queries n of q_n . q_bar_c. "decoupled" (eq. 38): beta (r_nc - mean_c' r_nc').
    "coupled" (eq. 37): b_c (r_nc - sum_c' b_c' r_nc'), with b_c in the place of the density q_c(omega_c), which is
    far below b_c at usual d (10^-39 at d = 64); "coupled_density" has that density, in float64.
    """
    if weighting == "coupled_density":
        omega, log_ratio, own = omega.double(), log_ratio.double(), own.double()
    balance = (own - log_ratio.logsumexp(-1)).exp()[:, :, None]
    r = (q @ q_bar.mT).softmax(-2).to(log_ratio.dtype)
    r_own = r.repeat_interleave(omega.shape[2] // q_bar.shape[2], -1)
    if weighting == "decoupled":
        return balance + beta * (r_own - r.mean(-1, keepdim=True))
    correction = r_own - r @ log_ratio.softmax(-1).mT
    if weighting == "coupled":
        return balance + balance * correction
    log_normal = -omega.square().sum(-1) / 2 - omega.shape[-1] / 2 * math.log(2 * math.pi)
    return balance + (own + log_normal).exp()[:, :, None] * correction


def lara_reference(
    q, k, v, q_bar, k_bar, noise, uniform=None, *, proposal="pool_mixed", weighting="decoupled", beta=2.0
):
    """`lara` by paper 001, Algorithm 3: densities and ratios of sums, one sample at a time."""
    q, k, q_bar = (x * x.shape[-1] ** -0.25 for x in (q, k, q_bar))
    B, h, C, d = q_bar.shape

    def normal(omega, mean):
        return torch.exp(-((omega - mean) ** 2).sum(-1) / 2) / (2 * math.pi) ** (d / 2)

    if proposal in ("pool", "pool_mixed"):
        k_bar = k_bar * d**-0.25
        similarity = torch.exp(k_bar @ k_bar.mT)
        mixed = similarity / similarity.sum(-1, keepdim=True) @ k_bar
        centre = k_bar if proposal == "pool" else mixed
    else:
        pi = torch.exp(q_bar @ k.mT) / torch.exp(q_bar @ k.mT).sum(-1, keepdim=True)
        centre = pi @ k

    def density(c, omega):  # q_c(omega), (B, h)
        if proposal == "mixture":
            return (pi[:, :, c] * normal(omega[:, :, None], q_bar[:, :, c, None] + k)).sum(-1)
        return normal(omega, q_bar[:, :, c] + centre[:, :, c])

    r = torch.exp(q @ q_bar.mT)
    r = r / r.sum(2, keepdim=True)  # (B, h, N, C)
    noise = noise.expand(B, h, C, -1, d)
    numerator = denominator = 0
    for c in range(C):
        for s in range(noise.shape[3]):
            key = centre[:, :, c]
            if uniform is not None:
                u = uniform.expand(B, h, C, noise.shape[3])[:, :, c, s, None]
                z = (pi[:, :, c].cumsum(-1) <= u).sum(-1)
                key = k.gather(2, z[:, :, None, None].expand(-1, -1, 1, d))[:, :, 0]
            omega = q_bar[:, :, c] + key + noise[:, :, c, s]
            densities = torch.stack([density(other, omega) for other in range(C)], -1)[:, :, None]  # (B, h, 1, C)
            b = densities / densities.sum(-1, keepdim=True)
            correction = r[..., c] - (b * r).sum(-1)
            alpha = {
                "balance": b[..., c],
                "decoupled": b[..., c] + beta * (r[..., c] - r.mean(-1)),
                "coupled": b[..., c] + b[..., c] * correction,
                "coupled_density": b[..., c] + densities[..., c] * correction,
            }[weighting]
            if weighting != "balance":
                alpha = alpha.clamp(min=MIN_ALPHA)
            weight = alpha * normal(omega, 0 * omega)[:, :, None] / densities[..., c]
            xi_q = torch.exp(q @ omega[..., None] - (q**2).sum(-1, keepdim=True) / 2)
            xi_k = torch.exp(k @ omega[..., None] - (k**2).sum(-1, keepdim=True) / 2)
            numerator = numerator + weight[..., None] * xi_q * (xi_k * v).sum(2, keepdim=True)
            denominator = denominator + weight[..., None] * xi_q * xi_k.sum(2, keepdim=True)
    return numerator / denominator


class Lara(Attention):
    """Linear randomized attention over segments of the grid. Paper: 001 'LARA'."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_landmarks: int = option(49, "segments of the grid, one proposal each (single: samples)", low=1)
        landmark_transform: Literal["light", "dense", "none"] = option(
            "light", "Linear and LayerNorm of segment means: one for all heads (DeiT), over all channels (PVT), none"
        )
        proposal: Literal["mixture", "attended_keys", "pool", "pool_mixed", "single"] = option(
            "pool_mixed", "proposal distributions: eq. 32, 33, 34, 35; single: one mixture about the mean query"
        )
        weighting: Weighting = option("decoupled", "weights alpha: eq. 36, 37 (b_c for q_c; as printed), 38")
        beta: float = option(2.0, "coefficient of the query-specific term; acts with weighting decoupled", low=0)
        samples_per_proposal: Literal[1, 2] = option(1, "training samples of each proposal")
        antithetic: bool = option(False, "two samples per proposal mirror each other about their mean")
        noise: Literal["unit", "released"] = option(
            "unit", "standard deviation of noise: 1, or released code's d^(-1/4)"
        )

    def __init__(self, site: Site, config: Any):
        super().__init__(site, config)
        self.check(site)
        self.noise_std = 1.0 if config.noise == "unit" else self.head_dim**-0.25
        if config.landmark_transform != "none":
            width = site.dim if config.landmark_transform == "dense" else self.head_dim
            self.landmark_q = LandmarkTransform(width)
            if config.proposal in ("pool", "pool_mixed"):
                self.landmark_k = LandmarkTransform(width)
        if config.proposal == "single":
            self.register_buffer("eval_seed", random_seed())

    def check(self, site: Site) -> None:
        """Refuses options that would not act together, and segments that the grid cannot have."""
        config, unused = self.config, []
        if config.proposal == "single":  # one proposal needs no landmarks, and all its samples weigh the same
            unused = [("weighting", "balance"), ("landmark_transform", "none"), ("samples_per_proposal", 1)]
        else:
            bin_counts(config.num_landmarks, site.grid, "attention(lara).num_landmarks")
        if config.weighting != "decoupled":
            unused.append(("beta", self.Config.beta))
        if config.samples_per_proposal == 1:
            unused.append(("antithetic", False))
        for name, neutral in unused:
            if getattr(config, name) != neutral:
                self.refuse(name, getattr(config, name), f"does not act with these options; set {name}: {neutral}")

    def landmarks(self, x: Tensor, name: str, grid: Grid) -> Tensor:
        """Transformed segment means of tokens (B, h, N, d): (B, h, c, d)."""
        counts = bin_counts(self.config.num_landmarks, grid, "attention(lara).num_landmarks")
        means = group_mean(x, bins(grid, counts, x.device))[:, :, 0]
        if self.config.landmark_transform == "none":
            return means
        transform = getattr(self, name)
        if self.config.landmark_transform == "light":
            return transform(means)
        return split_heads(transform(merge_heads(means)), 1, self.num_heads)[0]

    def draws(self, q: Tensor, num_proposals: int) -> tuple[Tensor, Tensor | None]:
        """Noise (..., c, s, d) and the uniforms (..., c, s) of mixtures.

        Evaluation takes the proposals' means; of the single proposal, where these would all be equal, samples that are
        functions of `eval_seed`, shared over the batch.
        """
        config, (B, h, _, d) = self.config, q.shape
        single = config.proposal == "single"
        if not self.training and not single:
            return q.new_zeros(1, d), None
        samples = config.num_landmarks if single else config.samples_per_proposal // (1 + config.antithetic)
        shape, seed = (h, num_proposals, samples), None if self.training else self.eval_seed
        noise, uniform = mixture_draws((B, *shape) if self.training else shape, q, seed)
        noise = self.noise_std * (torch.cat([noise, -noise], 3) if config.antithetic else noise)
        return noise, uniform if config.proposal in ("mixture", "single") else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        config = self.config
        single = config.proposal == "single"
        q_bar = q.mean(2, keepdim=True) if single else self.landmarks(q, "landmark_q", grid)
        k_bar = self.landmarks(split_prefix(k, q.shape[2])[1], "landmark_k", grid) if config.proposal in ("pool", "pool_mixed") else None
        noise, uniform = self.draws(q, q_bar.shape[2])
        proposal = "mixture" if single else config.proposal
        options = {"proposal": proposal, "weighting": config.weighting, "beta": config.beta}
        return lara(q, k, v, q_bar, k_bar, noise, uniform, **options).to(v.dtype)
