"""Transformer-LS (Zhu et al. 2021, arXiv:2107.02192): a window exactly, and all tokens by r learned averages.

Each head compresses its keys and values by r weightings of the tokens that depend on the input; a query attends to
these (long) and to its window (short) under one softmax:

    k_bar = Pi k, v_bar = Pi v,   Pi = softmax over tokens of Linear(x)
    y_n = [sum_window exp(l_nm) v_m + sum_j exp(q_n . k_bar_j / sqrt(d)) v_bar_j] / [the same without values]

Both kinds of keys and values are normalised over all channels, by a LayerNorm for each kind (DualLN); otherwise their
norms would differ.
Cost: 2 N |E| C + (4 + h) N r C multiply-accumulates, h N r C of them for Linear; linear in N.
Papers: EVA Tables 2, 3, 15 'Long-Short', 'Transformer-LS'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, up_to_side
from ..costs import num_padded, window_cost
from ..ops.joint_softmax.op import attended_in_window, joint_softmax, mix_reference
from ..options import Options, attn_drop_option, fit_option, local_option, option
from ..parts.features import upcast
from ..parts.geometry import Grid, Layout, Windows, merge_heads, split_heads, split_prefix
from ..parts.linear import init_linear
from ..parts.masking import mask_logits
from ..parts.position import BiasKind
from ..window_options import position_bias, window_option, windows_on
from .local import local


def transformer_ls(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    windows: Windows,
    attn_drop: float = 0.0,
) -> Tensor:
    """One softmax over a window's tokens and r weighted averages of all tokens.

    slots: logits of the averages over the tokens of the grid, (B, h, r, N). norm_weight, norm_bias: parameters of the
    LayerNorm of averages, (C,); None without it. Keys and values are normalised already.
    """
    pi = mask_logits(upcast(slots), windows.key_mask).softmax(-1).to(k.dtype)
    k_bar, v_bar = (normalise(pi @ split_prefix(x, q.shape[2])[1], norm_weight, norm_bias) for x in (k, v))
    return joint_softmax(q, k, v, bias, k_bar[:, :, None], v_bar[:, :, None], windows=windows, attn_drop=attn_drop)


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """LayerNorm of (B, h, r, d) over the channels of all heads; x itself if `weight` is None."""
    if weight is None:
        return x
    return split_heads(F.layer_norm(merge_heads(x), weight.shape, weight, bias), 1, x.shape[1])[0]


def transformer_ls_reference(q, k, v, slots, norm_weight=None, norm_bias=None, bias=None, *, windows, attn_drop=0.0):
    """`transformer_ls`, slot by slot and query by query."""
    (B, h, N, d), scale = q.shape, q.shape[-1] ** -0.5
    k_bar, v_bar = [], []
    for j in range(slots.shape[2]):
        weights = slots[:, :, j].exp() * (1 if windows.key_mask is None else windows.key_mask[:, None])
        pi = weights / weights.sum(-1, keepdim=True)
        for x, averages in ((k, k_bar), (v, v_bar)):
            average = (pi[..., None] * x[:, :, -N:]).sum(2)  # (B, h, d)
            if norm_weight is not None:
                all_heads = average.reshape(B, h * d)
                centred = all_heads - all_heads.mean(-1, keepdim=True)
                std = ((centred**2).mean(-1, keepdim=True) + 1e-5) ** 0.5
                average = (centred / std * norm_weight + norm_bias).view(B, h, d)
            averages.append(average)
    k_bar, v_bar, y = torch.stack(k_bar, 2), torch.stack(v_bar, 2), torch.zeros_like(q)
    for n in range(N):
        averages = scale * (q[:, :, n, None] @ k_bar.mT)[:, :, 0], v_bar
        own = attended_in_window(n, q, k, v, bias, windows=windows)
        y[:, :, n] = mix_reference(own, averages, attn_drop=attn_drop)
    return y


class TransformerLs(Attention):
    prefix_tokens = "exact"
    size_option = "num_landmarks"

    class Config(Options):
        num_landmarks: int = option(16, "averages r per head; 0: none (local attention)", low=0)
        window_size: int = option(7, "side of the window in tokens; block length where layout is 1d; 0: none", low=0)
        layout: Layout | None = window_option("layout")
        overlap: int = window_option("overlap")
        dual_norm: bool = option(True, "normalise keys and values by one LayerNorm, and their averages by another")
        position_bias: BiasKind | None = window_option("position_bias")
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(window_size=up_to_side, overlap=up_to_side)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        if config.window_size == config.num_landmarks == 0:
            self.refuse("window_size", 0, "nothing to attend to with num_landmarks: 0; give one of them")
        self.position_bias = position_bias(self, context)
        self.norm_full = nn.LayerNorm(context.dim, eps=1e-5) if config.dual_norm else nn.Identity()
        if config.num_landmarks:
            self.slots = init_linear(nn.Linear(context.dim, self.num_heads * config.num_landmarks))
            self.norm_slots = nn.LayerNorm(context.dim, eps=1e-5) if config.dual_norm else None

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor | None, ...]:
        """(B, N, C) -> queries, normalised keys and values (B, h, N, d); logits of the averages (B, h, r, N)."""
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (split_heads(y, 1, self.num_heads)[0] for y in (q, self.norm_full(k), self.norm_full(v)))
        if not self.config.num_landmarks:
            return q, k, v, None
        return q, k, v, self.slots(split_prefix(x, grid[0] * grid[1])[1]).mT.unflatten(1, (self.num_heads, -1))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, slots = context.num_tokens, context.dim, context.num_heads * config.num_landmarks
        window, queries = window_cost(context, config), num_padded(windows_on(config, context.grid))
        norms = 2 * C * (1 + (slots > 0)) if config.dual_norm else 0
        averages = N * slots * C + 2 * N * config.num_landmarks * C  # Linear; averages of keys and values
        attention = 2 * queries * config.num_landmarks * C
        return Cost(window.parameters + (C + 1) * slots + norms, window.macs + averages + attention)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor | None, grid: Grid, key_mask: Tensor | None = None
    ) -> Tensor:
        windows, bias = windows_on(self.config, grid, key_mask), self.position_bias()
        if slots is None:
            return local(q, k, v, bias, windows=windows, attn_drop=self.attn_drop)
        norm = self.norm_slots
        weights = (None, None) if norm is None else (norm.weight, norm.bias)
        return transformer_ls(q, k, v, slots, weights[0], weights[1], bias, windows=windows, attn_drop=self.attn_drop)
