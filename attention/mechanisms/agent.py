"""Agent attention (Han et al. 2024, arXiv:2312.08874): c agents attend to all tokens, and all tokens to the agents.

Agents a are means of the queries over c bins of the grid. With position biases B, the paper's agent bias,

    V_a = softmax(a K^T / sqrt(d) + B_1) V,   y = softmax(Q a^T / sqrt(d) + B_2) V_a + local term.

For every head and agent a bias is the sum of a 7 x 7 image, stretched over the grid, and of a number for each row and
column, as in the released code; these are resampled for another grid. The local term is a depthwise 3 x 3 convolution
of the values, with a filter for every channel. Prefix tokens are ordinary tokens with a bias of their own, but do not
contribute to agents and have no local term.
With a reduction R > 1, for PVT, agents attend to keys and values of a grid shrunk as by `sra`, of M = N / R^2 tokens;
for the local term its values are stretched over the grid, as an image.
Cost: 4 N c C + 9 N C multiply-accumulates. With R > 1 agents' own attention has 2 M c C, and `sra`'s convolution is
added.

Bins are disjoint here. The released code has equal numbers of rows and columns of bins, and they overlap if they do not
divide the grid.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, total, up_to_side
from ..options import Options, attn_drop_option, fit_option, local_option, option, released_option
from ..parts.geometry import Grid, split_prefix
from ..parts.groups import Groups, group_mean, pools_option, segments, up_to_bins
from ..parts.position import PositionTable
from ..parts.transforms import softmax_attention
from .sra import add_reduction, project_shrunk, reduction_cost, reduction_option, shrunk, stretched


def agent(
    q: Tensor, k: Tensor, v: Tensor, b_1: Tensor, b_2: Tensor, *, grid: Grid, bins: Groups, attn_drop: float = 0.0
) -> Tensor:
    """Attention through agents, the mean queries of the c groups `bins`; keys and values may be fewer than queries.

    b_1, b_2: biases of agents on keys, (h, c, P + N), and of tokens on agents, (h, P + N, c).
    """
    a = group_mean(split_prefix(q, grid[0] * grid[1])[1], bins)[:, :, 0]
    v_a = softmax_attention(a, k, v, b_1[None].to(q.dtype), attn_drop)
    q = q.contiguous()  # otherwise torch loses track of the layout in ONNX export with a mask
    return softmax_attention(q, a, v_a, b_2[None].to(q.dtype), attn_drop)


def agent_reference(q, k, v, b_1, b_2, *, grid, bins, attn_drop=0.0):
    """`agent` from its two matrices of weights."""
    tokens, scale = q[:, :, q.shape[2] - grid[0] * grid[1] :], q.shape[-1] ** -0.5
    members = [index[valid] for index, valid in zip(bins.members[0], bins.valid[0], strict=True)]
    a = torch.stack([tokens[:, :, own].mean(2) for own in members], 2)
    of_agents, of_tokens = (scale * a @ k.mT + b_1).softmax(-1), (scale * q @ a.mT + b_2).softmax(-1)
    return F.dropout(of_tokens, attn_drop) @ (F.dropout(of_agents, attn_drop) @ v)


class Agent(Attention):
    prefix_tokens = "plain"
    has_positions = True  # agents belong to bins, biases to positions
    key_mask_refusal = "its agents average every token of their bins"
    local_size = 3
    local_by_head = False
    reduction: int
    sr: nn.Module | None
    size_option = "num_landmarks"

    class Config(Options):
        num_landmarks: int = option(49, "agents c, the mean queries of as many bins of the grid", low=1)
        reduction: int | None = reduction_option()
        released: bool = released_option()
        released_pools: bool | None = pools_option()
        local: bool = local_option(True)
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(reduction=up_to_side, num_landmarks=lambda c, layer, _: up_to_bins(c, layer.grid))

    def __init__(self, context: LayerContext, config: Any):
        super().__init__(context, config)
        width, (H, W) = 2 * context.num_heads * config.num_landmarks, context.grid
        add_reduction(self, context, config.reduction)
        self.image_positions = PositionTable(width, (7, 7), std=0.02)
        self.row_positions = PositionTable(width, (H, 1), std=0.02)
        self.column_positions = PositionTable(width, (1, W), std=0.02)
        P = context.num_prefix_tokens
        self.prefix_bias = nn.Parameter(nn.init.trunc_normal_(torch.empty(width, P), std=0.02)) if P else None

    def bins(self, grid: Grid, device: torch.device) -> Groups:
        key, config = "attention(agent).num_landmarks", self.config
        return segments(config.num_landmarks, grid, device, key, pooled=config.released_pools)

    project = project_shrunk

    def local_values(self, values: Tensor, grid: Grid) -> Tensor:
        return stretched(values, grid, self.reduction)

    def biases(self, grid: Grid) -> Tensor:
        """Biases between agents and the tokens of a grid for the two softmaxes, (2, h, c, P + N)."""
        images = self.image_positions.table.unflatten(1, (7, 7))[None]
        images = F.interpolate(images, grid, mode="bilinear", align_corners=False)[0]  # (2 h c, H, W)
        rows, columns = self.row_positions.on((grid[0], 1)), self.column_positions.on((1, grid[1]))
        bias = (images + rows[:, :, None] + columns[:, None]).flatten(1)
        bias = bias if self.prefix_bias is None else torch.cat([self.prefix_bias, bias], 1)
        return bias.unflatten(0, (2, self.num_heads, -1))

    @classmethod
    def cost(cls, context: LayerContext, config: Any) -> Cost:
        (H, W), P, c = context.grid, context.num_prefix_tokens, config.num_landmarks
        M = math.prod(shrunk(context.grid, config.reduction))
        own = Cost(2 * context.num_heads * c * (49 + H + W + P), 2 * (context.num_tokens + M) * c * context.dim)
        return total(own, reduction_cost(context, config.reduction))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        b_1, b_2 = self.biases(grid)
        if self.reduction > 1:
            b_1 = self.biases(shrunk(grid, self.reduction))[0]
        return agent(q, k, v, b_1, b_2.mT, grid=grid, bins=self.bins(grid, q.device), attn_drop=self.attn_drop)
