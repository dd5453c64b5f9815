"""Mamba-like linear attention (Han et al. 2024, arXiv:2405.16605): linear attention with Mamba's block and rotations.

A linear map, a depthwise 3 x 3 convolution and SiLU make values z from the layer's input x; queries and keys are linear
maps of z. With phi = elu + 1 and rho_n the rotation of all C channels by the row and column of token n (the first half
of them by the row), before heads are split,

    y_n = sum_m rho_n phi(q_n) . rho_m phi(k_m) z_m / (sum_m phi(q_n) . phi(k_m) + 1e-6 N) + local term,

times SiLU of a linear map of x. The local term is a depthwise convolution of z. Rotated weights may be negative, and do
not sum to one; the first half of the heads depends on rows alone, the second on columns. With `block` false, queries,
keys and values are linear maps of x as in other mechanisms, and there is no gate.
Cost: N C^2 + 2 N d C + 18 N C multiply-accumulates, the first term for the gate.

Also called MILA. The convolutions that the paper puts before attention and before the MLP belong to the network. The
released code takes square grids only, and numbers of channels that 4 divides; here, remaining channels are unrotated.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, projections, total
from ..costs import linear_attention_macs
from ..ops.random_features.maps import elu_plus_one
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, merge_heads, split_heads
from ..parts.linear import init_linear, linear_part
from ..parts.local_term import LocalTerm
from ..parts.rotary import rotate, rotate_reference


@full_precision
def mlla(q: Tensor, k: Tensor, v: Tensor, *, grid: Grid) -> Tensor:
    """Linear attention with the features elu + 1, and rotations that the normaliser does not have."""
    return linear_attention(elu_plus_one(q), elu_plus_one(k), v, "mean", rotate=partial(turn, grid=grid))


def turn(x: Tensor, grid: Grid) -> Tensor:
    """The rotation rho: rotates tokens (B, h, N, d) over the channels of all heads."""
    return split_heads(rotate(merge_heads(x), grid, endpoint=False), 1, x.shape[1])[0]


def mlla_reference(q, k, v, *, grid):
    """`mlla` as a dense matrix of weights."""
    B, h, N, d = q.shape
    phi_q, phi_k = (x.exp().where(x < 0, x + 1) for x in (q, k))
    channels = (x.permute(0, 2, 1, 3).reshape(B, N, h * d) for x in (phi_q, phi_k))
    turned = (rotate_reference(x, grid, endpoint=False).view(B, N, h, d).permute(0, 2, 1, 3) for x in channels)
    turned_q, turned_k = turned
    return turned_q @ turned_k.mT / N @ v / ((phi_q @ phi_k.mT).mean(-1, keepdim=True) + 1e-6)


class Mlla(Attention):
    key_mask_refusal = "a convolution of all tokens makes the values of its block"
    local_size = 3
    local_by_head = False

    class Config(Options):
        block: bool = option(True, "Mamba's block: a convolution and SiLU make the values, and the output is gated")
        local: bool = local_option(True)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.convolution = None
        if config.block:
            self.convolution = LocalTerm(context.dim, 3)
            linear = nn.Linear(context.dim, context.dim, bias=context.qkv_bias)
            self.gate = nn.Sequential(init_linear(linear), nn.SiLU())

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C = context.num_tokens, context.dim
        block = total(projections(context, 1), Cost(10 * C, 9 * N * C)) if config.block else Cost(0, 0)
        own = Cost(0, linear_attention_macs(context, context.head_dim))
        return total(own, block)

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        if self.convolution is None:
            return super().project(x, grid)
        of_z, of_x = slice(2 * x.shape[-1]), slice(2 * x.shape[-1], None)
        z = F.silu(self.convolution.convolve(linear_part(self.qkv, x, of_x)[:, None], grid))[:, 0]
        return *split_heads(linear_part(self.qkv, z, of_z), 2, self.num_heads), *split_heads(z, 1, self.num_heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return mlla(q, k, v, grid=grid).to(v.dtype)
