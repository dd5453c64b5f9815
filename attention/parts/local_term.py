"""Depthwise convolutions of tokens as an image of the grid, among them the local term of linear attention."""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from .geometry import Grid, split_prefix
from .masking import mask_tokens


def on_images(convolve: Callable[[Tensor], Tensor], x: Tensor, grid: Grid, width: int) -> Tensor:
    """Applies a convolution of images (B', width, H, W) to tokens (B, h, N, d) -> (B, h, N, d).

    width: d if heads share the filters, or h d. In memory, channels come last in an image as in tokens: a depthwise
    convolution of this layout copies less, and its gradients take less than half of the time on a CPU.
    """
    heads = width // x.shape[-1]  # of an image
    rows = x.unflatten(1, (-1, heads)).transpose(2, 3)  # (B, h / heads, N, heads, d)
    images = rows.reshape(x.shape[0] * x.shape[1] // heads, *grid, width).permute(0, 3, 1, 2)
    y = convolve(images).permute(0, 2, 3, 1).reshape(rows.shape)
    return y.transpose(2, 3).flatten(1, 2)


class LocalTerm(nn.Conv2d):
    """One filter per channel, or per channel of a head if heads share filters; zeros beyond the grid."""

    def __init__(self, width: int, size: int, bias: bool = True):
        """width: C for a filter per channel, d for filters that heads share. size: odd side in tokens. bias: True gives
        every filter a bias.
        """
        super().__init__(width, width, size, padding=size // 2, groups=width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, width, H, W) -> (B, width, H, W); the gradient of the weight has its strides, as DDP's buckets."""
        return self._conv_forward(x, self.weight.squeeze(1).unsqueeze(1), self.bias)

    def convolve(self, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """Convolves values (B, h, P + N, d) -> (B, h, P + N, d); zero at prefix tokens, which are not in the image.

        key_mask: (B, P + N) bool, true for tokens that count; the image is zero at others.
        """
        prefix, tokens = split_prefix(mask_tokens(v, key_mask), math.prod(grid))
        y = on_images(self, tokens, grid, self.in_channels)
        return F.pad(y, (0, 0, prefix.shape[2], 0)) if prefix.shape[2] else y
