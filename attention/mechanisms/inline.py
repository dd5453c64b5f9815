"""InLine attention (Han et al. 2024, arXiv:2412.06590): linear attention that subtracts means in place of dividing.

With means k_bar, v_bar over the N tokens and s = d^(-1/2), weights sum to one, may be negative, and differ for queries
of different norm:

    y_n = v_bar + s q_n . sum_m (k_m - k_bar) (v_m - v_bar)^T / N + local term.

The local term is a depthwise 3 x 3 convolution of the values. Two maps, grouped by head, compute its filters from the
mean of the layer's input. Prefix tokens are ordinary tokens without a local term.
Cost: 2 N d C + 9 N C multiply-accumulates, the last for the local term; 10 d C parameters.

The paper's equations leave out the factor s / N of the released code, which is followed here.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option
from ..parts.features import full_precision
from ..parts.geometry import Grid, split_prefix
from ..parts.transforms import in_graph


@full_precision
def inline(q: Tensor, k: Tensor, v: Tensor, filters: Tensor | None = None, *, grid: Grid) -> Tensor:
    """Attention with weights that a subtraction makes sum to one. filters: (B, C, 3, 3), per image and channel."""
    k_bar, v_bar = k.mean(2, keepdim=True), v.mean(2, keepdim=True)
    scaled = q * (q.shape[-1] ** -0.5 / k.shape[2])
    y = v_bar + linear_attention(scaled, k - k_bar, v - v_bar, "none")
    if filters is None:
        return y
    prefix, tokens = split_prefix(v, grid[0] * grid[1])
    mixed = convolve_each(tokens.mT.flatten(1, 2).unflatten(2, grid), filters)
    return y + F.pad(mixed.flatten(2).unflatten(1, (v.shape[1], -1)).mT, (0, 0, prefix.shape[2], 0))


def convolve_each(images: Tensor, filters: Tensor) -> Tensor:
    """Convolves every channel of images (B, C, H, W) with a filter of its own, filters (B, C, 3, 3): (B, C, H, W)."""
    (B, C, H, W), taps = images.shape, [(i, j) for i in range(3) for j in range(3)]
    if in_graph() or not B:  # a convolution has one group at least, and in a graph a constant number
        images = F.pad(images, (1, 1, 1, 1))
        mixed: Any = sum(filters[:, :, i, j, None, None] * images[:, :, i : i + H, j : j + W] for i, j in taps)
        return mixed
    groups = images.reshape(1, B * C, H, W), filters.reshape(B * C, 1, 3, 3)
    return F.conv2d(*groups, padding=1, groups=B * C).view(B, C, H, W)


def inline_reference(q, k, v, filters=None, *, grid):
    """`inline` as a dense matrix of weights, with filters tap by tap."""
    (H, W), N, h = grid, k.shape[2], q.shape[1]
    logits = q @ k.mT / q.shape[-1] ** 0.5
    y = (logits / N - logits.mean(-1, keepdim=True) / N + 1 / N) @ v
    if filters is None:
        return y
    filters, rows = filters.unflatten(1, (h, -1)), list(y[:, :, : N - H * W].unbind(2))
    for n in range(H * W):
        row = y[:, :, N - H * W + n]
        for a, b in [(n // W + i, n % W + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]:
            if 0 <= a < H and 0 <= b < W:
                tap = filters[..., a - n // W + 1, b - n % W + 1]
                row = row + tap * v[:, :, N - H * W + a * W + b]
        rows.append(row)
    return torch.stack(rows, 2)


class Inline(Attention):
    prefix_tokens = "plain"
    key_mask_refusal = "its filters are made of the mean of all tokens"
    local_size = 0

    class Config(Options):
        local: bool = local_option(True)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        C, h = context.dim, context.num_heads
        maps = nn.Conv1d(C, C, 1, groups=h), nn.GELU(), nn.Conv1d(C, 9 * C, 1, groups=h)
        self.filters = nn.Sequential(*maps) if config.local else None

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        C, d = context.dim, context.head_dim
        local = config.local * (9 * context.num_tokens * C + 10 * C * d)
        return Cost(config.local * 10 * C * (d + 1), 2 * context.num_tokens * d * C + local)

    def project(self, x: Tensor, grid: Grid) -> tuple[Any, ...]:
        means = x.mean(1)[..., None]
        filters = None if self.filters is None else self.filters(means).view(x.shape[0], x.shape[-1], 3, 3)
        return *super().project(x, grid), filters

    def attend(self, q: Tensor, k: Tensor, v: Tensor, filters: Tensor | None, grid: Grid) -> Tensor:
        return inline(q, k, v, filters, grid=grid).to(v.dtype)
