"""Efficient attention (Shen et al. 2021, arXiv:1812.01243): queries by softmax over channels, keys over tokens.

    y_n = sum_c softmax_c(q_n)_c sum_m softmax_m(k_.c)_m v_m,

so that every channel of the keys pools the values of all tokens, and a query mixes the d pooled values of its head.
Weights are positive and sum to one without a normaliser. Queries and keys are not scaled.
Cost: 2 N d C multiply-accumulates; linear in N.

In the paper, queries and keys may be narrower than the values. The released module adds its input to its output; here
the network adds the residual.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option
from ..parts.features import full_precision
from ..parts.geometry import Grid
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


class Efficient(Attention):
    prefix_tokens = "plain"

    class Config(Options):
        local: bool = local_option()

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, 2 * context.num_tokens * context.head_dim * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return efficient(q, k, v, key_mask=key_mask).to(v.dtype)
