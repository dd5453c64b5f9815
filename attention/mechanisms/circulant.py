"""Circulant attention (Han et al. 2025, arXiv:2512.21542): weights that depend on the offset of a key alone.

On the grid as a torus, the mean of the logits of all pairs of tokens at the offset o gives the matrix of logits that
is nearest to Q K^T / sqrt(d) of all whose rows are shifts of each other (block circulant, with circulant blocks):

    a_o = mean_n q_n . k_(n+o) / sqrt(d),   y_n = sum_o softmax_o(a) v_(n+o),

times SiLU of a linear map of the layer's input. Both sums are correlations, hence products of Fourier transforms
(equations 15 and 16). As in the paper's models, d is 1 by default: every channel has weights of its own. Prefix tokens
have no place on the torus, and are refused.
Cost: N C^2 + 15 N l C / 2 multiply-accumulates with l = log2 N, the first term for the gate, the second for six
Fourier transforms. By head there are four, and two of one channel per head.

The released code divides sums over tokens by sqrt(N), not by N.
"""

from functools import partial

import torch
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, projections, total
from ..costs import fourier_macs
from ..options import Options, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from ..parts.linear import init_linear
from ..parts.transforms import in_graph


@full_precision
def circulant(q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, by_channel: bool, power: float) -> Tensor:
    """Attention whose weights are shared by all queries. power: of N, by which the logits' sums are divided."""
    if not in_graph() and not q.shape[0]:  # MKL refuses to transform no images
        return q + k + v
    transform, inverse = partial(torch.fft.rfft2, dim=(2, 3)), partial(torch.fft.irfft2, s=grid, dim=(2, 3))
    of_q, of_k, of_v = (transform(x.unflatten(2, grid)) for x in (q, k, v))  # (B, h, H, W // 2 + 1, d)
    products = of_q.conj() * of_k
    if not by_channel:
        products = products.sum(-1, keepdim=True) * q.shape[-1] ** -0.5
    weights = (inverse(products).flatten(2, 3) * q.shape[2] ** -power).softmax(2)
    return inverse(transform(weights.unflatten(2, grid)).conj() * of_v).flatten(2, 3)


def circulant_reference(q, k, v, *, grid, by_channel, power):
    """`circulant`, offset by offset."""
    offsets = [(i, j) for i in range(grid[0]) for j in range(grid[1])]

    def shifted(x, offset):
        return x.unflatten(2, grid).roll([-side for side in offset], (2, 3)).flatten(2, 3)

    logits = []
    for offset in offsets:
        product = (q * shifted(k, offset)).sum(2) / q.shape[2] ** power  # (B, h, d)
        logits.append(product if by_channel else product.sum(-1, keepdim=True) / q.shape[-1] ** 0.5)
    weights = torch.stack(logits).softmax(0)[:, :, :, None]
    return sum(weight * shifted(v, offset) for weight, offset in zip(weights, offsets, strict=True))


class Circulant(Attention):
    has_positions = True
    key_mask_refusal = "a weight belongs to an offset on the whole grid, not to a key"

    class Config(Options):
        by_channel: bool = option(True, "every channel has weights of its own; false: every head")
        power: float = option(1.0, "power of N that divides the sums over tokens; released 0.5", low=0, high=1)
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        linear = nn.Linear(context.dim, context.dim, bias=context.qkv_bias)
        self.gate = nn.Sequential(init_linear(linear), nn.SiLU())

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        C, width = context.dim, context.dim if config.by_channel else context.num_heads
        fourier = 4 * fourier_macs(context.grid, C) + 2 * fourier_macs(context.grid, width)
        return total(projections(context, 1), Cost(0, fourier))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        by_channel, power = self.config.by_channel, self.config.power
        return circulant(q, k, v, grid=grid, by_channel=by_channel, power=power).to(v.dtype)
