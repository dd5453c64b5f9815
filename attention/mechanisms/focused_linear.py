"""Focused linear attention (Han et al. 2023, arXiv:2308.00442): powers make queries and keys point along few channels.

With t = (ReLU(x) + 1e-6) / softplus(a) over all C channels and a learned a, the features of queries and keys are

    phi(x) = |t| t^p / |t^p|,   y = sum_m phi(q_n) . phi(k_m) v_m / sum_m phi(q_n) . phi(k_m) + local term,

head by head. First, a learned vector for each token of the grid (resampled for other grids) is added to the keys. The
local term is a depthwise convolution of the values, with filters that heads share. Prefix tokens have neither.
Cost: 2 N d C + 25 N C multiply-accumulates; N C parameters for the tokens.

Norms over all C channels, the floor 1e-6, softplus(a) and the vectors follow the released code; the paper's equations
are per head and lack all four. The released code's spatial reduction of keys and values is left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs, local_cost, total
from ..ops.random_features.maps import focused, of_both
from ..ops.random_features.op import linear_attention, weighted_values_reference
from ..options import Options, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from ..parts.position import KeyPositions


@full_precision
def focused_linear(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, *, power: float, key_mask: Tensor | None = None
) -> Tensor:
    """Attention with focused features, by the scale a (h, d) and the power p."""
    phi_q, phi_k = of_both(lambda x: focus(x, scale, power), q, k)
    return linear_attention(phi_q, phi_k, v, "mean", key_mask=key_mask)


def focus(x: Tensor, scale: Tensor, power: float) -> Tensor:
    """The feature map phi of tokens (..., h, N, d), which keeps their norm over all heads."""
    return focused(x, F.softplus(scale)[:, None], power=power)


def focused_linear_reference(q, k, v, scale, *, power):
    """`focused_linear` as a dense matrix of weights."""
    features = []
    for x in (q, k):
        t = (x.relu() + 1e-6) / (1 + scale.exp()).log()[:, None]
        raised = t**power
        features.append(raised * ((t**2).sum((1, 3), True) / (raised**2).sum((1, 3), True)) ** 0.5)
    kernel = features[0] @ features[1].mT
    return weighted_values_reference(kernel, v, "mean")


class FocusedLinear(Attention):
    prefix_tokens = "plain"
    ignores_order = False  # keys depend on their positions

    class Config(Options):
        power: float = option(3.0, "exponent p of the features", low=1)
        local: bool = local_option(True)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.key_positions = KeyPositions(context.dim, context.grid)
        self.feature_scale = nn.Parameter(torch.zeros(context.dim))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C = context.num_tokens, context.dim
        own = Cost(N * C + C, linear_attention_macs(context, context.head_dim))
        return total(own, local_cost(cls, context, config))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        scale = self.feature_scale.view(self.num_heads, -1)
        k = self.key_positions(k, grid)
        return focused_linear(q, k, v, scale, power=self.config.power, key_mask=key_mask).to(v.dtype)
