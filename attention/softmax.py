"""Softmax attention (Vaswani et al. 2017, arXiv:1706.03762): every query attends to every key, exactly.

    y_n = sum_m softmax_m(q_n . k_m / sqrt(d)) v_m,

through the fused kernels of torch. The reference of every limit.
Cost: 2 N^2 C multiply-accumulates.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from attention.base import Attention, Grid
from attention.options import option


def softmax(q: Tensor, k: Tensor, v: Tensor, attn_drop: float = 0.0) -> Tensor:
    """Scaled dot-product attention of queries (B, h, N, d) over keys and values (B, h, M, d) -> (B, h, N, d)."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=attn_drop)


def softmax_reference(q: Tensor, k: Tensor, v: Tensor, attn_drop: float = 0.0) -> Tensor:
    """`softmax` by its definition."""
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return F.dropout(weights, attn_drop) @ v


class Softmax(Attention):
    """Exact attention over all tokens. Papers: 000, 001 'Softmax'."""

    order_free = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        attn_drop: float = option(0.0, "dropout rate of the attention weights", low=0, high=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return softmax(q, k, v, self.config.attn_drop if self.training else 0.0)
