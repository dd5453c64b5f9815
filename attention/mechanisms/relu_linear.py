"""ReLU linear attention (Cai et al. 2023, arXiv:2205.14756): the kernel of rectified queries and keys.

    y_n = sum_m ReLU(q_n) . ReLU(k_m) v_m / sum_m ReLU(q_n) . ReLU(k_m),

and 0 where no weight is positive. The length of a query has no effect, nor that of all keys together.
Cost: 2 N d C multiply-accumulates; linear in N.

It is EfficientViT's attention at a single scale, in a transformer's layer: no multi-scale aggregation of queries, keys
and values, biases on the projections, and no batch norm after them.
"""

from dataclasses import dataclass

from torch import Tensor

from attention.base import Attention, Cost, LayerContext
from attention.costs import linear_attention_macs, local_cost, total
from attention.ops.random_features.op import linear_attention
from attention.options import local_option
from attention.parts.features import full_precision
from attention.parts.geometry import Grid


@full_precision
def relu_linear(q: Tensor, k: Tensor, v: Tensor, *, eps: float = 1e-15, key_mask: Tensor | None = None) -> Tensor:
    """Queries, keys and values (B, h, N, d) -> (B, h, N, d), float32 at least; 0 for a query without positive weights.

    eps: added to the sum of a query's weights. key_mask: which keys count, (B, N) bool.
    """
    return linear_attention(q.relu(), k.relu(), v, "sum", eps, key_mask=key_mask)


def relu_linear_reference(q, k, v, *, eps=1e-15):
    """`relu_linear` as a dense matrix of weights."""
    kernel = q.clamp(min=0) @ k.clamp(min=0).mT
    return (kernel / (kernel.sum(-1, keepdim=True) + eps)) @ v


class ReluLinear(Attention):
    """Kernel attention with ReLU features."""

    prefix_tokens = "plain"
    key_mask_refusal = None

    @dataclass(frozen=True, kw_only=True)
    class Config:
        local: bool = local_option()

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        own = Cost(0, linear_attention_macs(context, context.head_dim))
        return total(own, local_cost(cls, context, config))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return relu_linear(q, k, v, key_mask=key_mask).to(v.dtype)
