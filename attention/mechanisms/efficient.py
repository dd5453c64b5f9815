"""Efficient attention (Shen et al. 2021, arXiv:1812.01243): queries by softmax over channels, keys over tokens.

    y_n = sum_c softmax_c(q_n)_c sum_m softmax_m(k_.c)_m v_m,

so that every channel of the keys pools the values of all tokens, and a query mixes the d pooled values of its head.
Weights are positive and sum to one without a normaliser. Queries and keys are not scaled, and may be narrower than the
values, as in the paper.
Cost: 2 N d C multiply-accumulates; linear in N. Keys of a share C_k / C of the channels take this share of it, and
their projections too.

The released module adds its input to its output; here the network adds the residual.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, split_heads
from ..parts.linear import init_linear
from ..parts.masking import mask_logits


@full_precision
def efficient(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Linear attention with softmax over channels for queries and over tokens for keys."""
    return linear_attention(q.softmax(-1), mask_logits(k, key_mask, -2).softmax(-2), v, "none", key_mask=key_mask)


def efficient_reference(q, k, v):
    """`efficient`, pool by pool."""
    y = 0
    for c in range(k.shape[-1]):
        of_keys = k[..., c].exp() / k[..., c].exp().sum(-1, keepdim=True)  # (B, h, N)
        pool = torch.einsum("bhm,bhmd->bhd", of_keys, v)
        y = y + (q[..., c].exp() / q.exp().sum(-1))[..., None] * pool[:, :, None]
    return y


def key_width(context: LayerContext, config: Any) -> int:
    """Channels C_k of the queries, and of the keys, of all heads."""
    return config.key_dim or context.dim


class Efficient(Attention):
    prefix_tokens = "plain"

    class Config(Options):
        key_dim: int | None = option(None, "channels C_k of the queries, and of the keys, of all heads; null: C", low=1)
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        (C, h), width = (context.dim, context.num_heads), key_width(context, config)
        if width > C or width % h:
            nearest = min(max(width // h * h, h), C)
            self.refuse("key_dim", width, f"expected a multiple of the {h} heads, at most {C}; nearest: {nearest}")
        self.key_width = width
        if width < C:
            self.qkv = init_linear(nn.Linear(C, 2 * width + C, bias=context.qkv_bias))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, width = context.num_tokens, context.dim, key_width(context, config)
        left_out = 2 * (C - width)  # rows of the joint projection
        return Cost(-left_out * (C + context.qkv_bias), 2 * N * width // context.num_heads * C - left_out * N * C)

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """(B, P + N, C) -> queries and keys (B, h, P + N, C_k / h), values (B, h, P + N, d)."""
        width, C = self.key_width, self.num_heads * self.head_dim
        if width == C:
            return super().project(x, grid)
        q, k, v = self.qkv(x).split([width, width, C], -1)
        return tuple(y for part in (q, k, v) for y in split_heads(part, 1, self.num_heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return efficient(q, k, v, key_mask=key_mask).to(v.dtype)
