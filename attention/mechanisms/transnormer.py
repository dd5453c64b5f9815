"""TransNormer (Qin et al. 2022, arXiv:2210.10340): windows, in later layers linear attention without a normaliser.

The first half of the layers, DiagAttention, attends within windows: softmax (t2), or ReLU weights and RMSNorm (t1,
Zhang et al. 2021). The second half, NormAttention, is

    y = RMSNorm(phi(q) (phi(k)^T v)),   phi = elu + 1 (t2) or elu (t1),

without the scale and without the sum of weights, because the division by it lets the gradients of linear attention grow
unbounded. In causal attention the norm compensates for the number of keys, which grows along the sequence.
Cost: 2 N |E| C or 2 N d C multiply-accumulates, in a Diag or a Norm layer; linear in N. C parameters per RMSNorm.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, up_to_side
from ..costs import linear_attention_macs, window_macs
from ..ops.joint_softmax.op import attended_in_window, window_logits
from ..ops.random_features.maps import elu_plus_one, of_both
from ..ops.random_features.op import linear_attention
from ..options import Options, fit_option, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, Layout, Windows, split_prefix
from ..window_options import refuse_layout, window_option, windows_on
from .local import local

Variant = Literal["t1", "t2"]
Norm = Literal["merged", "heads"]
FEATURE_MAPS: dict[Variant, Callable[[Tensor], Tensor]] = {"t1": F.elu, "t2": elu_plus_one}


@full_precision
def transnormer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    *,
    variant: Variant,
    norm: Norm,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """NormAttention. gain: factors of the normalised channels, (h, d)."""
    phi = FEATURE_MAPS[variant]
    y = linear_attention(*of_both(phi, q, k), v, "none", causal=causal, key_mask=key_mask)
    return rms_norm(y, gain, norm)


@full_precision
def rela(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, *, windows: Windows, norm: Norm) -> Tensor:
    """DiagAttention of t1: weights ReLU(q . k / sqrt(d)) within windows."""
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    weights = window_logits(q, k, None, windows).relu()
    y = windows.reverse(weights @ windows.partition(v))
    return rms_norm(y + (q * q.shape[-1] ** -0.5 @ k_prefix.mT).relu() @ v_prefix, gain, norm)


def rms_norm(y: Tensor, gain: Tensor, norm: Norm) -> Tensor:
    """RMSNorm of (B, h, N, d) over a token's merged channels or over each head's, times gain (h, d)."""
    channels = gain.shape if norm == "merged" else gain.shape[1:]
    return (F.rms_norm(y.transpose(1, 2), channels) * gain).transpose(1, 2)


def transnormer_reference(q, k, v, gain, *, variant, norm, causal=False):
    """`transnormer` as a dense matrix of weights."""
    phi_q, phi_k = (F.elu(x) + (1 if variant == "t2" else 0) for x in (q, k))
    kernel = phi_q @ phi_k.mT
    return rms_norm_reference((kernel.tril() if causal else kernel) @ v, gain, norm)


def rela_reference(q, k, v, gain, *, windows, norm):
    """`rela`, query by query."""
    y = torch.zeros_like(q)
    for n in range(q.shape[2]):
        logits, values = attended_in_window(n, q, k, v, windows=windows)
        y[:, :, n] = (logits.relu()[:, :, None] @ values)[:, :, 0]
    return rms_norm_reference(y, gain, norm)


def rms_norm_reference(y, gain, norm):
    """`rms_norm` by its definition."""
    mean_square = y.square().mean((1, 3) if norm == "merged" else 3, keepdim=True)
    return y / (mean_square + torch.finfo(y.dtype).eps).sqrt() * gain[:, None]


class Transnormer(Attention):
    prefix_tokens = "exact"
    size_option = "window_size"

    class Config(Options):
        variant: Variant = option("t2", "t2: softmax in windows, elu + 1; t1: ReLU weights in windows, elu")
        window_size: int = option(
            7, "window side in tokens of the first half's layers; block length where layout is 1d", low=1
        )
        layout: Layout | None = window_option("layout")
        norm: Norm = option("merged", "RMSNorm over all channels of a token, or over those of each head")
        causal: bool = window_option("causal")
        local: bool = local_option()
        fit: bool = fit_option(
            window_size=lambda w, x, config: up_to_side(w, x, config) if x.layer < x.depth // 2 else (w, "")
        )

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.in_windows = context.layer < context.depth // 2
        if self.in_windows:
            refuse_layout(self)
        if not self.in_windows or config.variant == "t1":
            self.gain = nn.Parameter(torch.ones(context.dim))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        C = context.dim
        if context.layer >= context.depth // 2:
            return Cost(C, linear_attention_macs(context, context.head_dim, config.causal, normalised=False))
        return Cost(C if config.variant == "t1" else 0, window_macs(windows_on(config, context.grid), C))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        config, windows = self.config, windows_on(self.config, grid, key_mask)
        if self.in_windows and config.variant == "t2":
            return local(q, k, v, windows=windows)
        gain, norm = self.gain.view(self.num_heads, -1), config.norm
        if self.in_windows:
            return rela(q, k, v, gain, norm=norm, windows=windows).to(v.dtype)
        options = {"variant": config.variant, "norm": norm, "causal": config.causal}
        return transnormer(q, k, v, gain, key_mask=key_mask, **options).to(v.dtype)
