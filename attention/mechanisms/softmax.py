"""Softmax attention (Vaswani et al. 2017, arXiv:1706.03762): every query attends to every key, exactly.

    y_n = sum_m softmax_m(q_n . k_m / sqrt(d)) v_m,

computed by torch's fused kernels. It is the reference in every test of a limit.
Cost: 2 N^2 C multiply-accumulates.
Papers: EVA and LARA 'Softmax'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..options import Options, attn_drop_option, causal_option, local_option
from ..parts.geometry import Grid
from ..parts.transforms import softmax_attention


def softmax(
    q: Tensor, k: Tensor, v: Tensor, attn_drop: float = 0.0, *, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Scaled dot-product attention; any number of keys and values, (B, h, M, d)."""
    if key_mask is not None:
        shown = key_mask[:, None, None]
        if causal:  # a masked query attends at least to itself
            earlier = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
            shown = shown & earlier | torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
        return softmax_attention(q, k, v, shown, attn_drop)
    return softmax_attention(q, k, v, dropout_p=attn_drop, is_causal=causal)


def softmax_reference(q: Tensor, k: Tensor, v: Tensor, attn_drop: float = 0.0, *, causal: bool = False) -> Tensor:
    """`softmax` by its definition."""
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return F.dropout(logits.softmax(-1), attn_drop) @ v


class Softmax(Attention):
    prefix_tokens = "plain"

    class Config(Options):
        causal: bool = causal_option()
        local: bool = local_option()
        attn_drop: float = attn_drop_option()

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, 2 * context.num_tokens**2 * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return softmax(q, k, v, self.attn_drop, causal=self.config.causal, key_mask=key_mask)
