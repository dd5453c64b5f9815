"""ReLU linear attention (Cai et al. 2023, arXiv:2205.14756): the kernel of rectified queries and keys.

    y_n = sum_m ReLU(q_n) . ReLU(k_m) v_m / sum_m ReLU(q_n) . ReLU(k_m),

and 0 if no weight is positive. The norm of a query has no effect, nor has a common factor of all keys. Each further one
of `scales` adds h heads, whose queries, keys and values come from the original ones by a depthwise convolution and a
linear map of every head's channels; prefix tokens, which are not in the image, have no such heads.
Cost: 2 N d C multiply-accumulates; linear in N. A scale of side s adds N C (C + 3 s^2 + 5 d).

This is EfficientViT's attention in a transformer layer: it has biases, and lacks the batch norm that follows it there.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option, option
from ..parts.features import Normaliser, full_precision
from ..parts.geometry import Grid, merge_heads
from ..parts.linear import init_linear
from ..parts.local_term import LocalTerm


@full_precision
def relu_linear(q: Tensor, k: Tensor, v: Tensor, *, eps: float | None = None, key_mask: Tensor | None = None) -> Tensor:
    """Linear attention with the features ReLU; 0 for a query without positive weights.

    eps: added to the sum of a query's weights; None raises the sum to at least 1e-15.
    """
    normaliser: Normaliser = "clamp" if eps is None else "sum"  # ONNX export drops an addition of 1e-15
    return linear_attention(q.relu(), k.relu(), v, normaliser, eps or 1e-15, key_mask=key_mask)


def relu_linear_reference(q, k, v, *, eps=None):
    """`relu_linear` as a dense matrix of weights."""
    kernel = (q * (q > 0)) @ (k * (k > 0)).mT
    total = kernel.sum(-1, keepdim=True)
    return (kernel / (total.clamp(min=1e-15) if eps is None else total + eps)) @ v


class Scale(nn.Module):
    """Queries, keys and values from a neighbourhood of every token."""

    def __init__(self, dim: int, num_heads: int, size: int):
        super().__init__()
        self.depthwise = LocalTerm(3 * dim, size, bias=False)
        self.pointwise = nn.Conv1d(3 * dim, 3 * dim, 1, groups=3 * num_heads, bias=False)

    def forward(self, qkv: Tensor, grid: Grid, key_mask: Tensor | None) -> Tensor:
        """Maps queries, keys and values, stacked as heads (B, 3h, P + N, d), to new ones. key_mask: see `LocalTerm`."""
        mixed = self.depthwise.convolve(qkv, grid, key_mask).mT.flatten(1, 2)
        return self.pointwise(mixed).unflatten(1, (qkv.shape[1], -1)).mT


class ReluLinear(Attention):
    prefix_tokens = "plain"

    class Config(Options):
        scales: tuple[int, ...] = option((), "sides of further scales in tokens; odd", low=1)
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        for size in config.scales:
            if size % 2 == 0:
                self.refuse("scales", size, f"as many tokens on both sides make it odd; nearest valid: {size - 1}")
        C, count = context.dim, len(config.scales)
        self.scales = nn.ModuleList(Scale(C, context.num_heads, size) for size in config.scales)
        self.proj_scales = init_linear(nn.Linear(count * C, C, bias=False)) if count else None

    @classmethod
    def without_order(cls, config: Any) -> bool:
        return super().without_order(config) and not config.scales

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        C, N, count = context.dim, context.num_tokens, len(config.scales)
        of_scales = [3 * C * (size**2 + context.head_dim) for size in config.scales]
        macs = N * sum(of_scales) + count * N * C * C + (1 + count) * linear_attention_macs(context, context.head_dim)
        local = cls.local_cost(context, config).macs  # scales have heads of their own, with the same filters
        return Cost(sum(of_scales) + count * C * C, macs + count * local)

    def attend_all(self, projected: tuple[Any, ...], grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """Attended values of the heads of all scales, (B, (1 + scales) h, P + N, d)."""
        if self.proj_scales is None:
            return super().attend_all(projected, grid, key_mask)
        qkv = torch.cat(projected, 1)
        scales = [qkv, *(scale(qkv, grid, key_mask) for scale in self.scales)]
        heads = torch.cat([tokens.unflatten(1, (3, -1)) for tokens in scales], 2).unbind(1)
        return super().attend_all(heads, grid, key_mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return relu_linear(q, k, v, key_mask=key_mask).to(v.dtype)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        if self.proj_scales is None:
            return super().output(y, x)
        first, others = merge_heads(y[:, : self.num_heads]), merge_heads(y[:, self.num_heads :])
        return self.proj_drop(self.proj(first) + self.proj_scales(others))
