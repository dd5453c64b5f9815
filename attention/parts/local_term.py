"""The local term of linear attention: a depthwise convolution of the values, as an image of the grid's tokens."""

import torch.nn.functional as F
from torch import Tensor, nn

from .geometry import Grid, split_prefix
from .masking import mask_tokens


class LocalTerm(nn.Conv2d):
    """One filter per channel, or per channel of a head if heads share filters; zeros beyond the grid."""

    def __init__(self, width: int, size: int, bias: bool = True):
        """width: C for a filter per channel, d for filters that heads share. size: odd side in tokens. bias: True gives
        every filter a bias.
        """
        super().__init__(width, width, size, padding=size // 2, groups=width, bias=bias)

    def convolve(self, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """Convolves values (B, h, P + N, d) -> (B, h, P + N, d); zero at prefix tokens, which are not in the image.

        key_mask: (B, P + N) bool, true for tokens that count; the image is zero at others.
        """
        (B, h, _, d), N = v.shape, grid[0] * grid[1]
        prefix, tokens = split_prefix(mask_tokens(v, key_mask), N)
        images = tokens.mT.reshape(B * h * d // self.in_channels, self.in_channels, *grid)
        return F.pad(self(images).view(B, h, d, N).mT, (0, 0, prefix.shape[2], 0))
