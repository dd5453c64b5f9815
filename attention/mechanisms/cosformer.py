"""cosFormer (Qin et al. 2022, arXiv:2202.08791): ReLU features, with weights that fall with distance as a cosine.

    w_nm = ReLU(q_n) . ReLU(k_m) cos(pi (n - m) / 2N),

which stay non-negative and, because the cosine of a difference is cos cos + sin sin, are a kernel of twice as many
features. On the grid (2d) the factor is cos(pi dy / 2H) cos(pi dx / 2W), with four times as many features. In causal
attention N is still the number of all tokens.
Cost: 4 N d C multiply-accumulates, 8 N d C on the grid; linear in N.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs
from ..ops.random_features.op import linear_attention, weighted_values_reference
from ..options import Options, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, raster, split_prefix
from ..parts.masking import of_grid
from ..window_options import refuse_layout, window_option


@full_precision
def cosformer(
    q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """Attention re-weighted by distance along both axes of the grid; (1, N) for the raster order.

    Prefix tokens have no position, and their weights no factor. Positions and lengths skip rows and columns in which no
    token counts by `key_mask`; in raster order they skip masked tokens. A query without positive weights gets 0.
    """
    phi_q, (k_prefix, phi_k) = q.relu(), split_prefix(k.relu(), q.shape[2])
    mask = of_grid(key_mask, q.shape[2])
    weighted_q, weighted_k = (reweight(x, grid, mask) for x in (phi_q, phi_k))
    if not k_prefix.shape[2]:
        return linear_attention(weighted_q, weighted_k, v, causal=causal, key_mask=key_mask)
    # Features with and without a position are concatenated; a key has only one of the two kinds.
    keys = torch.cat([F.pad(k_prefix, (weighted_k.shape[-1], 0)), F.pad(weighted_k, (0, k.shape[-1]))], 2)
    return linear_attention(torch.cat([weighted_q, phi_q], -1), keys, v, key_mask=key_mask)


def reweight(x: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
    """[x cos(theta), x sin(theta)], theta = pi i / (2 side), along each axis of more than one token.

    x: the tokens (B, h, N, d) of the grid.
    """
    for axis, side in enumerate(grid):
        if side > 1:
            position, step = torch.arange(side, device=x.device), math.pi / 2 / side
            if key_mask is not None:
                lines = key_mask.unflatten(1, grid).any(2 - axis)  # rows or columns, (B, side)
                position = lines.cumsum(1)[:, None] - 1
                step = math.pi / 2 / lines.sum(1).clamp(min=1).to(x.dtype)[:, None, None, None]
            position = position.unsqueeze(-1 - axis).expand(*position.shape[:-1], *grid).flatten(-2)
            theta = position[..., None].to(x.dtype) * step
            x = torch.cat([x * theta.cos(), x * theta.sin()], -1)
    return x


def cosformer_reference(q, k, v, *, grid, causal=False):
    """`cosformer` as a dense matrix of weights."""
    (H, W), n = grid, torch.arange(q.shape[2], dtype=q.dtype)
    y, x = n // W, n % W
    decay_y, decay_x = (torch.cos(math.pi * (a[:, None] - a) / (2 * side)) for a, side in ((y, H), (x, W)))
    kernel = q.relu() @ k.relu().mT
    kernel = kernel * F.pad(decay_y * decay_x, (k.shape[2] - H * W, 0), value=1)
    return weighted_values_reference(kernel, v, causal=causal)


class Cosformer(Attention):
    prefix_tokens = "exact"

    class Config(Options):
        layout: Literal["1d", "2d"] = option("1d", "distance in raster order, or along both axes of the grid")
        causal: bool = window_option("causal")
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        refuse_layout(self)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        axes = sum(side > 1 for side in raster(context.grid, config.layout))
        return Cost(0, linear_attention_macs(context, context.head_dim * 2**axes, config.causal))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        grid, causal = raster(grid, self.config.layout), self.config.causal
        return cosformer(q, k, v, grid=grid, causal=causal, key_mask=key_mask).to(v.dtype)
