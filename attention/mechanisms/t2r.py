"""T2R (Kasai et al. 2021, arXiv:2103.13076): m learned ReLU features, for a pretrained transformer made linear.

    phi(x) = ReLU(W x + b),   W: d -> m,

with one map per head, which queries and keys share, in linear attention.
Cost: 4 N m C multiply-accumulates, half of them for the features; linear in N. h (m d + m) parameters.
Papers: EVA Table 5 'T2R' (language).
"""

import torch
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs
from ..ops.random_features.op import linear_attention, weighted_values_reference
from ..options import Options, causal_option, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid


@full_precision
def t2r(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention with learned features: weight (h, m, d), bias (h, m); 0 for a query without positive weights."""
    phi_q, phi_k = ((x @ weight.mT + bias[:, None]).relu() for x in (q, k))
    return linear_attention(phi_q, phi_k, v, causal=causal, key_mask=key_mask)


def t2r_reference(q, k, v, weight, bias, *, causal=False):
    """`t2r`, feature by feature."""
    kernel = 0
    for w, b in zip(weight.unbind(1), bias.unbind(1), strict=True):  # (h, d), (h)
        phi_q, phi_k = (((x * w[:, None]).sum(-1) + b[:, None]).relu() for x in (q, k))
        kernel = kernel + phi_q[..., :, None] * phi_k[..., None, :]
    return weighted_values_reference(kernel, v, causal=causal)


class T2r(Attention):
    prefix_tokens = "plain"
    size_option = "num_features"

    class Config(Options):
        num_features: int = option(32, "features m per head", low=1)
        causal: bool = causal_option()
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.feature_weight = nn.Parameter(torch.empty(self.num_heads, config.num_features, self.head_dim))
        self.feature_bias = nn.Parameter(torch.zeros(self.num_heads * config.num_features))  # a vector: no weight decay
        nn.init.trunc_normal_(self.feature_weight, std=0.02)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        C, m = context.dim, config.num_features
        features = 2 * context.num_tokens * m * C
        return Cost(m * C + context.num_heads * m, features + linear_attention_macs(context, m, config.causal))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        bias, causal = self.feature_bias.view(self.num_heads, -1), self.config.causal
        return t2r(q, k, v, self.feature_weight, bias, causal=causal, key_mask=key_mask).to(v.dtype)
