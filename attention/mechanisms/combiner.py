"""Combiner (Ren et al. 2021, arXiv:2107.05768): own span of u tokens exactly, every other span by one summary.

This is the variant Fixed with DeepSets-Max: full attention factorised over spans of tokens. A query attends to the
tokens of its own span, and to every other span as a whole: through a summary key k_bar_g that represents the span in
the softmax, and a span value v_bar_g that the span's summary query q_bar_g gathers:

    y_n = [sum_own exp(l_nm) v_m + sum_{g != own} exp(q_n . k_bar_g / sqrt(d)) v_bar_g] / [the same without values]
    v_bar_g = sum_{m in g} softmax_m(q_bar_g . k_m / sqrt(d)) v_m,   q_bar_g = max_{m in g} ReLU(U q_m), k_bar from k

The published bidirectional code also attends to the summary of a query's own span; here no token counts twice.
Cost: 2 N (u + N/u) C + 2 N (1 + d) C multiply-accumulates, the last for the summaries; N^1.5 at u = sqrt(N).
Papers: EVA Tables 2, 3, 15 'Combiner'.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, up_to_side
from ..costs import num_padded, window_cost
from ..ops.joint_softmax.op import attended_in_window, joint_softmax, mix_reference
from ..options import Options, attn_drop_option, fit_option, local_option, option
from ..parts.features import product
from ..parts.geometry import Grid, Layout, Windows, split_prefix
from ..parts.linear import init_linear
from ..parts.position import BiasKind
from ..window_options import position_bias, window_option, windows_on


def combiner(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bar: Tensor,
    k_bar: Tensor,
    bias: Tensor | None = None,
    *,
    windows: Windows,
    attn_drop: float = 0.0,
) -> Tensor:
    """One softmax over the own span's tokens and the other spans' summaries.

    q_bar, k_bar: summaries of the g spans, (B, h, g, d). windows: the spans; if causal, queries attend to no later
    token of their span and to no later span.
    """
    keys, values = (windows.partition(split_prefix(x, q.shape[2])[1]) for x in (k, v))
    inside = product((q_bar * q.shape[-1] ** -0.5)[:, :, :, None], keys.mT)  # (B, h, g, 1, w)
    mask = windows.mask(q.device)
    if mask is not None:
        inside = inside.masked_fill(~mask[..., None, :], torch.finfo(inside.dtype).min)
    v_bar = (inside.softmax(-1).to(v.dtype) @ values)[:, :, None, :, 0]  # (B, h, 1, g, d)
    left_out = torch.eye(k_bar.shape[2], dtype=torch.bool, device=q.device)
    left_out = (torch.ones_like(left_out).triu() if windows.causal else left_out)[:, None]  # (g, 1, g)
    if mask is not None and windows.key_mask is not None:
        left_out = left_out | ~mask.any(-1)[:, :, None, None]  # (B, 1, g, 1, g): spans without a token
    left_out = inside.new_zeros(left_out.shape).masked_fill(left_out, -torch.inf)
    return joint_softmax(q, k, v, bias, k_bar[:, :, None], v_bar, left_out, windows=windows, attn_drop=attn_drop)


def combiner_reference(q, k, v, q_bar, k_bar, bias=None, *, windows, attn_drop=0.0):
    """`combiner`, query by query."""
    scale, y = q.shape[-1] ** -0.5, torch.zeros_like(q)
    keys, values = (split_prefix(x, q.shape[2])[1] for x in (k, v))
    spans = [index[index >= 0] for index in windows.indices(q.device)]
    if windows.key_mask is not None:
        spans = [span[windows.key_mask[0, span]] for span in spans]
    spans = {g: span for g, span in enumerate(spans) if len(span)}
    summaries = {}
    for g, span in spans.items():
        inside = (scale * q_bar[:, :, g, None] @ keys[:, :, span].mT).softmax(-1)
        summaries[g] = inside @ values[:, :, span]
    for n in range(q.shape[2]):
        attended = [attended_in_window(n, q, k, v, bias, windows=windows)]
        for g, span in spans.items():
            if n not in span and (span.min() < n or not windows.causal):
                attended.append((scale * (q[:, :, n] * k_bar[:, :, g]).sum(-1, keepdim=True), summaries[g]))
        y[:, :, n] = mix_reference(*attended, attn_drop=attn_drop)
    return y


class Combiner(Attention):
    prefix_tokens = "exact"
    size_option = "window_size"

    class Config(Options):
        window_size: int = option(7, "side of a span in tokens; its length where layout is 1d", low=1)
        layout: Layout | None = window_option("layout")
        summary: Literal["deepsets", "relu", "identity"] = option(
            "deepsets",
            "pooled features: deepsets: ReLU(U x), with one U for queries and one for keys; relu: ReLU(x); identity: x",
        )
        pool: Literal["max", "mean"] = option("max", "pooling of a span's tokens")
        position_bias: BiasKind | None = window_option("position_bias")
        causal: bool = window_option("causal")
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(window_size=up_to_side)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.position_bias = position_bias(self, context)
        self.summary_q, self.summary_k = self.make_summary(), self.make_summary()

    def make_summary(self) -> nn.Module:
        if self.config.summary != "deepsets":
            return nn.ReLU() if self.config.summary == "relu" else nn.Identity()
        return nn.Sequential(init_linear(nn.Linear(self.head_dim, self.head_dim, bias=False)), nn.ReLU())

    def pool(self, x: Tensor, windows: Windows) -> Tensor:
        """Maximum or mean of tokens (B, h, N, d) over each span: (B, h, g, d); zero for a span without tokens."""
        if self.config.pool == "mean":
            return windows.mean(x)
        spans, mask = windows.partition(x), windows.mask(x.device)
        if mask is None:
            return spans.amax(-2)
        return spans.masked_fill(~mask[..., None], -torch.inf).amax(-2).masked_fill(~mask.any(-1, keepdim=True), 0)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        window, windows = window_cost(context, config), windows_on(config, context.grid)
        N, C, d, queries = context.num_tokens, context.dim, context.head_dim, num_padded(windows)
        transforms = 2 if config.summary == "deepsets" else 0
        summaries = 2 * queries * C + transforms * N * d * C  # values of summaries; ReLU(U x)
        attention = 2 * queries * windows.num_windows * C
        return Cost(window.parameters + transforms * d * d, window.macs + summaries + attention)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        windows, keys = windows_on(self.config, grid, key_mask), split_prefix(k, q.shape[2])[1]
        q_bar, k_bar = self.pool(self.summary_q(q), windows), self.pool(self.summary_k(keys), windows)
        return combiner(q, k, v, q_bar, k_bar, self.position_bias(), windows=windows, attn_drop=self.attn_drop)
