"""Synthesizer (Tay et al. 2021, arXiv:2005.00743): learned attention weights, the same for every image.

The factorised random variant,

    y = softmax(R_1 R_2^T) v,   R_1, R_2: N x p for every head, learned.

There are no queries and keys, and no projections for them. The factors have a row for every token of one grid and for
every prefix token; for another grid, the rows of the grid are resampled.
Cost: N^2 C + h p N^2 - 2 N C^2 multiply-accumulates: values, weights (once per batch), less two projections.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..options import Options, attn_drop_option, local_option, option
from ..parts.features import upcast
from ..parts.geometry import Grid, resample


def synthesizer(r_1: Tensor, r_2: Tensor, v: Tensor, attn_drop: float = 0.0) -> Tensor:
    """Factors (h, N, p) and values (B, h, N, d) -> (B, h, N, d). Dropout is the same for all images of a batch."""
    weights = F.dropout(upcast(r_1 @ r_2.mT).softmax(-1), attn_drop)
    return torch.einsum("hnm,bhmd->bhnd", weights.to(v.dtype), v)


def synthesizer_reference(r_1, r_2, v, attn_drop=0.0):
    """`synthesizer`, query by query."""
    y = []
    for n in range(v.shape[2]):
        kernel = (r_1[:, n, None] * r_2).sum(-1).exp()
        weights = F.dropout(kernel / kernel.sum(-1, keepdim=True), attn_drop)
        y.append((weights[..., None] * v).sum(2))
    return torch.stack(y, 2)


class Synthesizer(Attention):
    prefix_tokens = "plain"
    has_positions = True  # weights belong to positions
    key_mask_refusal = "its learned weights are of all positions of the grid, the same for every image"
    num_projections = 1
    size_option = "rank"

    class Config(Options):
        rank: int = option(8, "columns p of a factor", low=1)
        local: bool = local_option()
        attn_drop: float = attn_drop_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        rows = context.num_prefix_tokens + context.grid[0] * context.grid[1]
        self.factors = nn.Parameter(torch.empty(2, self.num_heads, config.rank, rows))
        nn.init.trunc_normal_(self.factors, std=0.02)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, h = context.num_tokens, context.dim, context.num_heads
        return Cost(2 * h * config.rank * N, h * config.rank * N * N + N * N * C)  # weights, values

    def attend(self, v: Tensor, grid: Grid) -> Tensor:
        prefix, tokens = self.factors.tensor_split([self.factors.shape[-1] - self.grid[0] * self.grid[1]], -1)
        r_1, r_2 = torch.cat([prefix, resample(tokens, self.grid, grid)], -1).mT
        return synthesizer(r_1, r_2, v, self.attn_drop)
