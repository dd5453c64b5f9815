"""SLAB's attention (Guo et al. 2024, arXiv:2405.11582): linear attention with ReLU features and a local term.

    y = sum_m ReLU(q_n) . ReLU(k_m) v_m / (1e-6 + sum_m ReLU(q_n) . ReLU(k_m)) + local term.

First, a learned vector for each token of the grid (resampled for other grids) is added to the keys. The local term is a
depthwise convolution of the values, with filters that heads share. Prefix tokens have no vector and no local term. This
is `relu_linear` with two more terms, and `focused_linear` at p = 1 without its scale. The paper's other half, a batch
norm instead of LayerNorm, belongs to the network.
Cost: 2 N d C + 25 N C multiply-accumulates; N C parameters for the tokens.

The released code takes square grids only.
"""

from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs
from ..options import Options, local_option
from ..parts.geometry import Grid
from ..parts.position import KeyPositions
from .relu_linear import relu_linear


class Slab(Attention):
    prefix_tokens = "plain"
    has_positions = True  # keys depend on their positions

    class Config(Options):
        local: bool = local_option(True)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.key_positions = KeyPositions(context.dim, context.grid)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(context.num_tokens * context.dim, linear_attention_macs(context, context.head_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return relu_linear(q, self.key_positions(k, grid), v, eps=1e-6, key_mask=key_mask).to(v.dtype)
