"""MetaFormer's pooling (Yu et al. 2022, arXiv:2111.11418): the mean of a token's neighbours, less the token.

    y_n = 1/|P_n| sum_{m in P_n} v_m - v_n,

where P_n are the tokens of the p x p square around token n that lie in the grid: a control that mixes
neighbours with fixed weights. The token is subtracted because the network adds it again as a residual. PoolFormer pools
its input and has no projections; here values and output are projected, as in any other mechanism. Queries and keys do
not exist. Prefix tokens have no place in the image, and are refused.
Cost: - 2 N C^2 multiply-accumulates: two projections less; sums are not counted.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_filter
from ..options import Options, fit_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from ..parts.masking import mask_tokens


@full_precision
def pooling(v: Tensor, *, grid: Grid, pool_size: int, key_mask: Tensor | None = None) -> Tensor:
    """Mean of the values (B, h, N, d) of tokens that count in a square of pool_size, less the token's own value."""

    def pooled(x: Tensor, padding_counts: bool) -> Tensor:
        """Means over the squares of images (B, N, channels)."""
        images = x.mT.unflatten(2, grid)
        images = F.avg_pool2d(images, pool_size, 1, pool_size // 2, count_include_pad=padding_counts)
        return images.flatten(2).mT

    tokens = mask_tokens(v, key_mask).transpose(1, 2).flatten(2)  # (B, N, C)
    if key_mask is None:
        means = pooled(tokens, False)
    else:  # both means are over whole squares
        share = pooled(key_mask[..., None].to(v.dtype), True)
        means = pooled(tokens, True) / share.clamp(min=0.5 / pool_size**2)
    return means.unflatten(2, (v.shape[1], -1)).transpose(1, 2) - v


def pooling_reference(v, *, grid, pool_size):
    """`pooling`, square by square."""
    (H, W), reach, y = grid, pool_size // 2, []
    for n in range(H * W):
        rows = range(max(0, n // W - reach), min(H, n // W + reach + 1))
        columns = range(max(0, n % W - reach), min(W, n % W + reach + 1))
        neighbours = [v[:, :, row * W + column] for row in rows for column in columns]
        y.append(sum(neighbours) / len(neighbours) - v[:, :, n])
    return torch.stack(y, 2)


class Pooling(Attention):
    num_projections = 1
    size_option = "pool_size"

    class Config(Options):
        pool_size: int = option(3, "side p in tokens of the square that is averaged; odd", low=1)
        fit: bool = fit_option(pool_size=up_to_filter)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        if config.pool_size % 2 == 0:
            self.refuse("pool_size", config.pool_size, f"must be odd; nearest valid: {config.pool_size - 1}")
        if config.pool_size == 1:
            self.refuse("pool_size", 1, "a token less itself is zero; give 3 or more")

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, 0)

    def attend(self, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return pooling(v, grid=grid, pool_size=self.config.pool_size, key_mask=key_mask).to(v.dtype)
