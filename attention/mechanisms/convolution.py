"""Depthwise convolution: the local term of linear attention by itself, without any attention.

    y_n = b + sum_{|m - n| <= (p - 1) / 2} w_{m - n} * v_m,

channel by channel, with p x p filters that heads share and zeros beyond the grid. `local: true` adds it to other
mechanisms (FLatten, Han et al. 2023, arXiv:2308.00442, adds it to linear attention). By itself it is a control that
shows the convolution's share of their accuracy. Queries and keys do not exist. Prefix tokens have no place in the
image, and are refused.
Cost: 25 N C - 2 N C^2 multiply-accumulates: the filters, less two projections.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_filter
from ..options import Options, fit_option, option
from ..parts.geometry import Grid
from ..parts.local_term import LocalTerm


def convolution(v: Tensor, filters: LocalTerm, *, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
    """Values (B, h, N, d) under filters (d, 1, p, p) and biases (d,)."""
    return filters.convolve(v, grid, key_mask)


def convolution_reference(v, filters, *, grid):
    """`convolution`, tap by tap."""
    weight, bias = filters.weight, filters.bias
    (H, W), p, y = grid, weight.shape[-1], []
    for n in range(H * W):
        total = bias.expand_as(v[:, :, n])
        for i in range(p):
            for j in range(p):
                row, column = n // W + i - p // 2, n % W + j - p // 2
                if 0 <= row < H and 0 <= column < W:
                    total = total + weight[:, 0, i, j] * v[:, :, row * W + column]
        y.append(total)
    return torch.stack(y, 2)


class Convolution(Attention):
    num_projections = 1
    size_option = "kernel_size"

    class Config(Options):
        kernel_size: int = option(Attention.local_size, "side p in tokens of the filters; odd", low=1)
        fit: bool = fit_option(kernel_size=up_to_filter)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        if config.kernel_size % 2 == 0:
            self.refuse("kernel_size", config.kernel_size, f"must be odd; nearest valid: {config.kernel_size - 1}")
        self.filters = LocalTerm(context.head_dim, config.kernel_size)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        taps = config.kernel_size**2
        return Cost(context.head_dim * (taps + 1), taps * context.num_tokens * context.dim)

    def attend(self, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return convolution(v, self.filters, grid=grid, key_mask=key_mask)
