"""Spatial-reduction attention (Wang et al. 2022, arXiv:2106.13797): keys and values from a grid shrunk R times.

The reduction of PVT-v2 is an R x R convolution of stride R followed by LayerNorm; then softmax over N / R^2 keys. This
is the convolutional baseline of EVA and LARA (49 keys: R = 8, 4, 2 in PVT-v2's first three stages at 224 pixels).
Cost: N C^2 - 2 (N - N / R^2) C^2 + 2 N^2 C / R^2 multiply-accumulates: the convolution, less what the projection of
keys and values saves, and attention.
Papers: EVA Table 1, LARA Tables 2 and 8 'SRA'.
"""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, total, up_to_side
from ..options import Options, attn_drop_option, fit_option, option
from ..parts.geometry import Grid, split_heads, split_prefix
from ..parts.linear import linear_part
from .softmax import softmax


def sra(x: Tensor, convolution: nn.Module, *, grid: Grid, reduction: int) -> Tensor:
    """Shrinks tokens (B, N, C) by a convolution of side and stride R: (B, ceil(H/R) * ceil(W/R), C).

    Zeros fill the grid up to multiples of R.
    """
    image = F.pad(x.mT.unflatten(2, grid), (0, -grid[1] % reduction, 0, -grid[0] % reduction))
    return convolution(image).flatten(2).mT


def sra_reference(x, convolution, *, grid, reduction):
    """`sra`, token by token."""
    (H, W), R, weight, bias = grid, reduction, convolution.weight, convolution.bias
    reduced = []
    for top in range(0, H, R):
        for left in range(0, W, R):
            covered = [(i, j) for i in range(R) for j in range(R) if top + i < H and left + j < W]
            reduced.append(bias + sum(x[:, (top + i) * W + left + j] @ weight[:, :, i, j].mT for i, j in covered))
    return torch.stack(reduced, 1)


def project_reduced(qkv: nn.Module, x: Tensor, reduced: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of tokens x (B, N, C), keys and values of `reduced` tokens (B, M, C), by the joint projection `qkv`."""
    C = x.shape[-1]
    (q,) = split_heads(linear_part(qkv, x, slice(C)), 1, num_heads)
    k, v = split_heads(linear_part(qkv, reduced, slice(C, None)), 2, num_heads)
    return q, k, v


def side_ratio(context: LayerContext, config: Any) -> int:
    """Reduction R: the option `reduction`, else the pyramid's reduction, else the one that leaves 49 keys."""
    return config.reduction or context.reduction or max(1, round((context.num_tokens / 49) ** 0.5))


def shrunk(grid: Grid, reduction: int) -> Grid:
    """The grid of tokens after a convolution of stride `reduction`."""
    return -(-grid[0] // reduction), -(-grid[1] // reduction)


def reduction_option() -> Any:
    """The field `reduction` of another mechanism."""
    meaning = "side ratio R by which keys and values are shrunk, as by sra; null: 1"
    return option(None, meaning, low=1, chosen=lambda c: 1)


def add_reduction(attn: Any, context: LayerContext, reduction: int) -> None:
    """Gives a layer its `reduction`, and for more than 1 the convolution `sr` and LayerNorm `norm`, else None."""
    attn.reduction = reduction
    attn.sr = reducing_convolution(context.dim, reduction) if reduction > 1 else None
    attn.norm = nn.LayerNorm(context.dim, eps=1e-5) if reduction > 1 else None


def project_shrunk(attn: Any, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
    """Queries (B, h, P + N, d) of tokens (B, P + N, C); keys and values (B, h, P + M, d) of the prefix and of the grid
    shrunk by the modules of `add_reduction`.
    """
    if attn.sr is None:
        return Attention.project(attn, x, grid)
    prefix, tokens = split_prefix(x, grid[0] * grid[1])
    reduced = sra(tokens, attn.sr, grid=grid, reduction=attn.reduction)
    return project_reduced(attn.qkv, x, torch.cat([prefix, attn.norm(reduced)], 1), attn.num_heads)


def reduction_cost(context: LayerContext, reduction: int) -> Cost:
    """Cost of the modules of `add_reduction`, less what the projection of fewer keys and values saves."""
    if reduction == 1:
        return Cost(0, 0)
    N, M, C, R = context.num_tokens, math.prod(shrunk(context.grid, reduction)), context.dim, reduction
    return Cost(R * R * C * C + 3 * C, M * R * R * C * C - 2 * (N - M) * C * C)


def stretched(values: Tensor, grid: Grid, reduction: int) -> Tensor:
    """Values of prefix tokens and of the shrunk grid (B, h, P + M, d) on the grid, as an image: (B, h, P + N, d).

    A shrunk token lies in the middle of the R x R tokens that the convolution took, padding included.
    """
    if reduction == 1:
        return values
    (H, W), small = grid, shrunk(grid, reduction)
    prefix, tokens = split_prefix(values, small[0] * small[1])
    images = tokens.mT.flatten(0, 1).unflatten(2, small)
    padded = small[0] * reduction, small[1] * reduction
    images = F.interpolate(images, padded, mode="bilinear", align_corners=False)[:, :, :H, :W]
    return torch.cat([prefix, images.flatten(2).unflatten(0, values.shape[:2]).mT], 2)


def reducing_convolution(dim: int, side: int) -> nn.Conv2d:
    """A convolution of stride `side`, initialised as in PVT-v2: normal, with a std by the fan-out, and bias 0."""
    conv = nn.Conv2d(dim, dim, side, side)
    nn.init.normal_(conv.weight, std=(2 / (dim * side**2)) ** 0.5)
    nn.init.zeros_(conv.get_parameter("bias"))
    return conv


class Sra(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its convolution shrinks the grid with every token of it"
    size_option = "reduction"
    sr: nn.Module | None

    class Config(Options):
        reduction: int | None = option(
            None, "side ratio R; null: the pyramid's own, or the one that leaves 49 keys", low=1
        )
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(reduction=up_to_side)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        add_reduction(self, context, side_ratio(context, config))

    @classmethod
    def too_large(cls, context: LayerContext, config: Config) -> dict[str, tuple[int, str]]:
        return super().too_large(context, dataclasses.replace(config, reduction=side_ratio(context, config)))

    project = project_shrunk

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        R = side_ratio(context, config)
        macs = 2 * context.num_tokens * math.prod(shrunk(context.grid, R)) * context.dim
        return total(Cost(0, macs), reduction_cost(context, R))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return softmax(q, k, v, self.attn_drop)
