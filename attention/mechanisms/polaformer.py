"""PolaFormer's attention (Meng et al. 2025, arXiv:2501.15061): a kernel of equal signs, and one of opposite signs.

Queries and keys x become z = x / softplus(a) with a learned a. With exponents pi = 1 + alpha sigmoid(w), w learned for
each channel, and the positive and negative parts z+ = ReLU(z)^pi and z- = ReLU(-z)^pi, the weights of the first and of
the second half of a head's values are

    q+ . k+ + q- . k-   and   q+ . k- + q- . k+,

each divided by its sum over keys, with 1e-6 added to the mean over keys. First, a learned vector for each token of the
grid (resampled for other grids) is added to the keys. A local term, a depthwise convolution of the values with filters
that heads share, is added to the result, and a linear map of the layer's input multiplies the sum. The output half of a
query whose weights for it are all zero is zero. Prefix tokens have no vector and no local term.
Cost: N C^2 + 4 N d C + 25 N C multiply-accumulates, the first term for the gate; N C parameters for the tokens.

The paper describes coefficients for each kind of sign. This follows the released code, whose gate covers both kinds and
the local term, and which has the scale and the vectors, which the paper's equations lack.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, projections, total
from ..costs import linear_attention_macs
from ..ops.random_features.maps import of_both, powers_by_sign
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from ..parts.linear import init_linear
from ..parts.position import KeyPositions


@full_precision
def polaformer(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, power: Tensor, *, alpha: float, key_mask: Tensor | None = None
) -> Tensor:
    """Attention by channels of equal signs and by channels of opposite signs. scale, power: a and w, (h, d)."""
    scale, power = F.softplus(scale)[:, None], 1 + alpha * power.sigmoid()[:, None]
    phi_q, phi_k = of_both(lambda x: powers_by_sign(x, scale, power), q, k)
    streams = phi_k, phi_k.roll(q.shape[-1], -1)
    halves = v.split([(v.shape[-1] + 1) // 2, v.shape[-1] // 2], -1)
    y = (linear_attention(phi_q, x, half, "mean", key_mask=key_mask) for x, half in zip(streams, halves, strict=True))
    return torch.cat(list(y), -1)


def polaformer_reference(q, k, v, scale, power, *, alpha):
    """`polaformer` as two dense matrices of weights, from products of channels by their signs."""
    q, k = (x / (1 + scale.exp()).log()[:, None] for x in (q, k))
    products = q[:, :, :, None] * k[:, :, None]  # (B, h, N, N, d)
    size = products.abs().where(products != 0, 1) ** (1 + alpha / (1 + (-power).exp()))[:, None, None]
    y, half = [], (v.shape[-1] + 1) // 2
    for weights, values in ((size * (products > 0), v[..., :half]), (size * (products < 0), v[..., half:])):
        kernel = weights.sum(-1)
        y.append(kernel @ values / (kernel.sum(-1, keepdim=True) + 1e-6 * k.shape[2]))
    return torch.cat(y, -1)


class Polaformer(Attention):
    prefix_tokens = "plain"
    has_positions = True  # keys depend on their positions

    class Config(Options):
        alpha: float = option(4.0, "range of the learned exponents, which lie between 1 and 1 + alpha", above=0)
        local: bool = local_option(True)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.key_positions = KeyPositions(context.dim, context.grid)
        self.feature_scale, self.feature_power = (nn.Parameter(torch.zeros(context.dim)) for _ in range(2))
        self.gate = init_linear(nn.Linear(context.dim, context.dim, bias=context.qkv_bias))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C = context.num_tokens, context.dim
        own = Cost(N * C + 2 * C, linear_attention_macs(context, 2 * context.head_dim) + 2 * N * C)
        return total(own, projections(context, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        scale, power = (x.view(self.num_heads, -1) for x in (self.feature_scale, self.feature_power))
        k = self.key_positions(k, grid)
        return polaformer(q, k, v, scale, power, alpha=self.config.alpha, key_mask=key_mask).to(v.dtype)
