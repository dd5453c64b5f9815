"""Performer (Choromanski et al. 2021, arXiv:2009.14794): s random features of the exponential kernel.

EVA and LARA also call it random feature attention, 'RFA' (after Peng et al. 2021, whose own features are `rfa`). The
kernel is estimated at samples omega_s ~ N(0, I) that all queries share,

    exp(q . k) = E xi(q, omega) xi(k, omega),   xi(x, omega) = exp(omega . x - ||x||^2 / 2),

so that all queries share the sums over keys (LARA eq. 2). Unbiased for the kernel; biased but consistent for attention.
Cost: 4 N s C multiply-accumulates (hyperbolic and trigonometric features: 6 N s C); linear in N.
Papers: EVA and LARA 'Performer', 'RFA'.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs, mix_features_macs
from ..ops.kernels import with_fast_path
from ..ops.random_features import fused
from ..ops.random_features.op import linear_attention, mix_features, weighted_values_reference
from ..options import Options, causal_option, local_option, option, released_option
from ..parts.features import CAUSAL, CLAMPED, FEATURE_MAPS, LOG_FEATURE_MAPS, full_precision, scale
from ..parts.geometry import Grid
from ..parts.sampling import OmegaSampling, gaussian, omega_sampling_option

Features = Literal["positive", "hyperbolic", "trigonometric", "relu", "favorp"]


@with_fast_path(fused.performer, fused.covers_performer, triton=fused.TRITON)
@full_precision
def performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    *,
    features: Features | Literal["trigonometric_released", "relu_released"] = "positive",
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention with the estimated kernel.

    Args:
        omega: samples (h, s, d).
        features: positive, hyperbolic: LARA paper appendix C. trigonometric: sines and cosines; a normaliser can be
            negative, its magnitude is kept above 1e-6. relu: ReLU(s^(-1/2) omega . x) + 1e-3, no estimate of softmax.
            favorp: positive features as in the papers' released code, with 1e-4 added and normalisers above 1e-2.
            trigonometric_released, relu_released: all normalisers, negative ones too, are raised to at least 1e-2.
        causal: needs features of `CAUSAL`.
    """
    q, k = scale(q), scale(k)
    if features in LOG_FEATURE_MAPS:
        return mix_features(*LOG_FEATURE_MAPS[features](q, k, omega), v, key_mask, causal=causal)
    feature_map, normaliser, least = FEATURE_MAPS[features]
    phi_q, phi_k = feature_map(q, k, omega)
    return linear_attention(phi_q, phi_k, v, normaliser, least, causal=causal, key_mask=key_mask)


def performer_reference(q, k, v, omega, *, features="positive", causal=False):
    """`performer` as a dense matrix of kernel estimates, normalised by its row sums."""
    q, k = q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25
    half_q, half_k = (q**2).sum(-1, keepdim=True) / 2, (k**2).sum(-1, keepdim=True) / 2
    on_q, on_k = q @ omega.mT, k @ omega.mT
    released = features.endswith("_released")
    least = 1e-2 if released or features == "favorp" else 0.0
    if features == "positive":
        kernel = torch.exp(on_q - half_q) @ torch.exp(on_k - half_k).mT
    elif features == "hyperbolic":
        kernel = sum(torch.exp(sign * on_q - half_q) @ torch.exp(sign * on_k - half_k).mT / 2 for sign in (1, -1))
    elif features.startswith("trigonometric"):
        waves = (on_q[..., :, None, :] - on_k[..., None, :, :]).cos().mean(-1)
        kernel = torch.exp(half_q) * waves * torch.exp(half_k).mT
        largest_q = half_q.amax(-2, keepdim=True) if released else half_q
        least = (least or 1e-6) * torch.exp(largest_q + half_k.amax(-2, keepdim=True)).detach()
    else:
        s = omega.shape[-2]
        if features.startswith("relu"):
            phi_q, phi_k = torch.relu(on_q / s**0.5) + 1e-3, torch.relu(on_k / s**0.5) + 1e-3
        else:
            phi_q = torch.exp(on_q - half_q - on_q.amax(-1, keepdim=True).detach()) / s**0.5 + 1e-4
            phi_k = torch.exp(on_k - half_k - on_k.amax((-2, -1), keepdim=True).detach()) / s**0.5 + 1e-4
        kernel = phi_q @ phi_k.mT
    return weighted_values_reference(kernel, v, "clamp" if released else "floor", least, causal)


class Performer(Attention):
    prefix_tokens = "plain"
    size_option = "num_samples"
    omega: Tensor

    class Config(Options):
        num_samples: int = option(128, "samples omega per head", low=1)
        released: bool = released_option()
        features: Features | None = option(
            None,
            "feature map; favorp: the released code's positive ones; null: positive, as released favorp unless causal",
            chosen=lambda c: "favorp" if c.released and not c.causal else "positive",
        )
        released_clamp: bool | None = option(
            None,
            "raise normalisers of trigonometric and relu features to 1e-2, negative ones too (favorp has it always); "
            "null: as released",
            chosen=lambda c: c.released and c.features in CLAMPED,
        )
        omega_sampling: OmegaSampling = omega_sampling_option()
        eval_omega_sampling: OmegaSampling | None = option(
            None,
            "the same for evaluation; null: as in training, as released orthogonal; acts with feature_redraw redraw",
            chosen=lambda c: "orthogonal" if c.released and c.feature_redraw == "redraw" else c.omega_sampling,
        )
        feature_redraw: Literal["redraw", "fixed", "learnable"] = option(
            "redraw",
            "samples of training: redraw: new ones; fixed: one set; learnable: parameters; evaluation keeps one set",
        )
        local: bool = local_option()
        causal: bool = causal_option()

    def __init__(self, context: LayerContext, config: Any):
        super().__init__(context, config)
        if config.feature_redraw != "redraw":
            neutral = {"eval_omega_sampling": config.omega_sampling}
            self.refuse_unused(neutral, f"nothing is redrawn with feature_redraw: {config.feature_redraw}")
        if config.features not in CLAMPED:
            self.refuse_unused({"released_clamp": False}, f"acts with features {' and '.join(CLAMPED)}")
        if config.causal and config.features not in CAUSAL:
            self.refuse("features", config.features, f"not for causal attention; set one of {', '.join(CAUSAL)}")
        omega = self.sample_omega(config.eval_omega_sampling, self.qkv.weight)
        if config.feature_redraw == "learnable":
            self.omega = nn.Parameter(omega)
        else:
            self.register_buffer("omega", omega)

    def sample_omega(self, sampling: OmegaSampling, like: Tensor) -> Tensor:
        """Samples (h, s, d) on the device of `like`, in its compute dtype."""
        return gaussian(sampling, (self.num_heads, self.config.num_samples, self.head_dim), like)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, s = context.num_tokens, context.dim, config.num_samples
        num_features = 2 * s if config.features in ("hyperbolic", "trigonometric") else s  # each projection serves both
        mixing_macs = mix_features_macs if config.features in LOG_FEATURE_MAPS else linear_attention_macs
        macs = 2 * N * s * C + mixing_macs(context, num_features, config.causal)
        return Cost(s * C * (config.feature_redraw == "learnable"), macs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        fresh, causal = self.training and self.config.feature_redraw == "redraw", self.config.causal
        omega = self.sample_omega(self.config.omega_sampling, q) if fresh else self.omega
        features = self.config.features + "_released" * self.config.released_clamp
        return performer(q, k, v, omega, features=features, causal=causal, key_mask=key_mask).to(v.dtype)
