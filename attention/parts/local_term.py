"""The local term of linear attention: a depthwise convolution of the values, as an image of the grid's tokens."""

import torch.nn.functional as F
from torch import Tensor, nn

from attention.parts.geometry import Grid, split_prefix
from attention.parts.masking import mask_tokens


class LocalTerm(nn.Conv2d):
    """One filter per channel, or per channel of a head where heads share them; zeros beyond the grid."""

    def __init__(self, width: int, size: int, bias: bool = True):
        """width: C for a filter per channel, d for filters that heads share. size: odd side in tokens. bias: whether
        filters have one.
        """
        super().__init__(width, width, size, padding=size // 2, groups=width, bias=bias)

    def convolve(self, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """Values (B, h, P + N, d) -> (B, h, P + N, d): zero at prefix tokens, which the image leaves out.

        key_mask: which tokens count, (B, P + N) bool; the image is zero at others.
        """
        (B, h, _, d), N = v.shape, grid[0] * grid[1]
        prefix, tokens = split_prefix(mask_tokens(v, key_mask), N)
        images = tokens.mT.reshape(B * h * d // self.in_channels, self.in_channels, *grid)
        return F.pad(self(images).view(B, h, d, N).mT, (0, 0, prefix.shape[2], 0))
