"""LARA (Zheng, Wang, Kong 2022, arXiv:2204.04667): randomized attention from c proposals that all queries share.

Randomized attention needs samples of each query's own distribution. Linear randomized attention draws omega_c from c
proposals q_c, each centred on one segment of the grid, and combines them for each query by self-normalised multiple
importance sampling (section 4, eq. 10; appendix G.3, Algorithm 3):

    y_n = sum_c a'_nc xi(q_n, omega_c) sum_m xi(k_m, omega_c) v_m / the same without v_m,
    a'_nc = alpha_nc(omega_c) N(omega_c; 0, I) / q_c(omega_c),   sum_c alpha_nc = 1.

Hyperbolic features, xi(x, omega) and xi(x, -omega), have a target that is even in omega (corollary C.1). Proposals then
are even too, (q_c(omega) + q_c(-omega)) / 2; one half of each is sampled, since every term of the sums is even.
Cost: 5 N c C multiply-accumulates, N c C of them for query-specific alpha, and c^2 C for the densities; linear in N.
Hyperbolic features: 7 N c C and 2 c^2 C.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, total
from ..costs import landmark_cost
from ..ops.group_values.op import group_mean
from ..ops.kernels import with_fast_path
from ..ops.random_features import fused, proposals
from ..ops.random_features.op import mix_features
from ..options import Options, fit_option, local_option, option, released_option
from ..parts.features import LOG_FEATURE_MAPS, full_precision, scale
from ..parts.geometry import Grid, split_prefix
from ..parts.groups import Groups, pools_option, segments, up_to_bins
from ..parts.linear import LandmarkTransform
from ..parts.masking import mask_logits, masked_mean, of_grid
from ..parts.sampling import Noise, mixture_noise, noise_option, random_seed, scale_noise

Features = Literal["positive", "hyperbolic"]


@with_fast_path(fused.lara, fused.covers_lara, triton=fused.TRITON)
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
    proposal: proposals.Proposal = "pool_mixed",
    weighting: proposals.Weighting = "decoupled",
    beta: float = 2.0,
    features: Features = "positive",
    key_mask: Tensor | None = None,
    filled: Tensor | None = None,
) -> Tensor:
    """Self-normalised multiple importance sampling with shared proposals (LARA paper eq. 10).

    Args:
        q_bar, k_bar: landmarks (B, h, c, d); k_bar acts with the pool proposals.
        noise: Gaussian part of omega in the features' scale, s samples of each proposal, broadcast to (B, h, c, s, d).
        uniform, proposal: see `propose`. weighting, beta: form of alpha, see `query_weights`; "balance" is eq. 36.
        features: hyperbolic makes proposals even (corollary C.1).
        filled: (B, c) bool, true for segments with tokens that count.
    """
    q, k, q_bar = scale(q), scale(k), scale(q_bar)
    k_bar = None if k_bar is None else scale(k_bar)
    drawn = proposals.propose(q_bar, k, k_bar, uniform, proposal, key_mask, filled)
    omega = (drawn.mean + noise).flatten(2, 3)  # (B, h, c s, d)
    log_q, log_k = LOG_FEATURE_MAPS[features](q, k, omega)
    log_k = mask_logits(log_k, key_mask)  # (B, h, c s, M), or (B, h, 2 c s, M) with features at -omega
    count = omega.shape[2]
    log_ratio = drawn.log_ratio(omega, log_k[:, :, :count])
    if features == "hyperbolic":
        log_ratio = torch.logaddexp(log_ratio, drawn.log_ratio(-omega, log_k[:, :, count:])) - math.log(2)
    log_ratio = mask_logits(log_ratio, filled)
    log_weight = proposals.log_weights(q, q_bar, omega, log_ratio, weighting, beta, key_mask, filled)
    log_weight = torch.cat([log_weight] * (log_k.shape[2] // count), -1)
    return mix_features(log_q + log_weight, log_k, v)


def lara_reference(
    q,
    k,
    v,
    q_bar,
    k_bar,
    noise,
    uniform=None,
    *,
    proposal="pool_mixed",
    weighting="decoupled",
    beta=2.0,
    features="positive",
):
    """`lara` by the paper's Algorithm 3: densities and ratios of sums, one sample at a time."""
    q, k, q_bar = (x * x.shape[-1] ** -0.25 for x in (q, k, q_bar))
    (B, h, C, d), kernel = q_bar.shape, 0
    centre, densities = proposals.propose_reference(q_bar, k, k_bar if k_bar is None else k_bar * d**-0.25, proposal)
    r = torch.softmax(q @ q_bar.mT, 2)  # over queries, (B, h, N, C)
    noise, signs = noise.expand(B, h, C, -1, d), (1, -1) if features == "hyperbolic" else (1,)
    for c, s in ((c, s) for c in range(C) for s in range(noise.shape[3])):
        u = uniform if uniform is None else uniform.expand(B, h, C, -1)[:, :, c, s, None]
        omega = centre(c, u) + noise[:, :, c, s]
        density = sum(densities(sign * omega) for sign in signs) / len(signs)
        weight = proposals.weights_reference(omega, density, r, c, weighting, beta, noise.shape[3])
        for sign in signs:
            xi_q, xi_k = (torch.exp(sign * x @ omega[..., None] - (x**2).sum(-1, keepdim=True) / 2) for x in (q, k))
            kernel = kernel + weight[..., None] * xi_q * xi_k.mT / len(signs)
    return kernel @ v / kernel.sum(-1, keepdim=True)


class Lara(Attention):
    prefix_tokens = "exact"
    size_option = "num_landmarks"
    takes_clips = True
    eval_seed: Tensor | None

    class Config(Options):
        num_landmarks: int = option(49, "segments of the grid, one proposal each (single: samples)", low=1)
        landmark_transform: Literal["light", "dense", "none"] | None = option(
            None,
            "Linear and LayerNorm of segment means: light: shared by the heads (DeiT); dense: over all channels "
            "(PVT); null: light; with proposal single: none",
            chosen=lambda c: "none" if c.proposal == "single" else "light",
        )
        proposal: Literal["mixture", "attended_keys", "pool", "pool_mixed", "single"] = option(
            "pool_mixed", "proposal distributions: eq. 32, 33, 34, 35; single: one mixture about the mean query"
        )
        weighting: proposals.Weighting | None = option(
            None,
            "weights alpha: eq. 36, 37 (b_c for q_c; as printed), 38; null: decoupled; single: balance",
            chosen=lambda c: "balance" if c.proposal == "single" else "decoupled",
        )
        beta: float = option(2.0, "coefficient of the query-specific term; acts with weighting decoupled", low=0)
        samples_per_proposal: Literal[1, 2] = option(1, "training samples of each proposal; 2 double the released beta")
        features: Features = option(
            "positive", "positive: xi(x, omega); hyperbolic: also xi(x, -omega), with proposals symmetric about 0"
        )
        antithetic: bool = option(False, "two samples per proposal mirror each other about their mean")
        released: bool = released_option()
        noise: Noise | None = noise_option()
        released_pools: bool | None = pools_option(lambda c: c.proposal != "single")
        local: bool = local_option()
        fit: bool = fit_option(
            num_landmarks=lambda c, layer, config: (c, "") if config.proposal == "single" else up_to_bins(c, layer.grid)
        )

    def __init__(self, context: LayerContext, config: Any):
        super().__init__(context, config)
        self.single = config.proposal == "single"
        neutral: dict[str, Any] = {"antithetic": False} if config.samples_per_proposal == 1 else {}
        neutral |= {"beta": self.Config.beta} if config.weighting != "decoupled" else {}
        if self.single:  # one proposal needs no landmarks, and all its samples have equal weights
            neutral |= {"weighting": "balance", "landmark_transform": "none", "samples_per_proposal": 1}
            neutral |= {"released_pools": False}
        self.refuse_unused(neutral, "does not act with these options")
        if len(context.grid) == 3:
            self.refuse_unused({"released_pools": False}, "pools rows and columns of images")
        width = {"light": self.head_dim, "dense": context.dim}.get(config.landmark_transform)
        self.landmark_q = LandmarkTransform(width) if width else nn.Identity()
        if config.proposal in proposals.POOLED:
            self.landmark_k = LandmarkTransform(width) if width else nn.Identity()
        self.register_buffer("eval_seed", random_seed() if self.single else None)

    def segments(self, grid: Grid, device: torch.device) -> Groups:
        """The segments of this grid."""
        config, key = self.config, "attention(lara).num_landmarks"
        return segments(config.num_landmarks, grid, device, key, pooled=config.released_pools, fit=config.fit)

    def sample_noise(self, q: Tensor, num_proposals: int) -> tuple[Tensor, Tensor | None]:
        """Noise (..., c, s, d), and uniforms (..., c, s) for mixtures.

        Evaluation uses the proposals' means; for a single proposal, whose means are equal, samples by `eval_seed`.
        """
        config, seed = self.config, None if self.training else self.eval_seed
        if not self.training and seed is None:
            return q.new_zeros(1, self.head_dim), None
        samples = config.num_landmarks if self.single else config.samples_per_proposal // (1 + config.antithetic)
        noise, uniform = mixture_noise((self.num_heads, num_proposals, samples), q, seed)
        noise = scale_noise(torch.cat([noise, -noise], 3) if config.antithetic else noise, config.noise)
        return noise, uniform if self.single or config.proposal == "mixture" else None

    @classmethod
    def cost(cls, context: LayerContext, config: Any) -> Cost:
        N, C, h, c = context.num_tokens, context.dim, context.num_heads, config.num_landmarks
        halves = 2 if config.features == "hyperbolic" else 1
        own = Cost(0, (2 + 2 * halves) * N * c * C)  # features; sums, means
        if config.proposal == "single":
            return total(own, Cost(0, (N + halves * c) * C))  # the proposal's weights of keys, its density at c samples
        width = {"light": context.head_dim, "dense": C, "none": 0}[config.landmark_transform]
        landmarks = landmark_cost(context, width, 2 if config.proposal in proposals.POOLED else 1, c)
        sampling = {"pool": 0, "pool_mixed": 2 * c * c * C}.get(config.proposal, 2 * N * c * C)
        alpha = {"balance": 0, "decoupled": N * c * C}.get(config.weighting, N * c * (C + c * h))
        return total(own, landmarks, Cost(0, sampling + halves * c * c * C + alpha))  # c^2 C for the densities

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        config, k_bar, filled, mask = self.config, None, None, of_grid(key_mask, q.shape[2])
        if self.single:
            q_bar = masked_mean(q, mask)[:, :, None]
        else:
            segments, k_grid = self.segments(grid, q.device).masked(mask), split_prefix(k, q.shape[2])[1]
            filled = None if mask is None else segments.num_members()[:, 0, 0] > 0
            q_bar = self.landmark_q(group_mean(q, segments).flatten(2, 3))
            if config.proposal in proposals.POOLED:
                k_bar = self.landmark_k(group_mean(k_grid, segments).flatten(2, 3))
        options = {"weighting": config.weighting, "beta": config.beta, "key_mask": key_mask, "filled": filled}
        options |= {"proposal": "mixture" if self.single else config.proposal, "features": config.features}
        return lara(q, k, v, q_bar, k_bar, *self.sample_noise(q, q_bar.shape[2]), **options).to(v.dtype)
