"""Patches of images: a convolutional patch embedding, and the parts of a grid that padded images fill."""

import itertools
import math

import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed, register_notrace_module
from torch import Tensor, nn

from attention import Grid
from models.block import has_hooks


@register_notrace_module  # fx cannot trace `by_product`
class Patches(PatchEmbed):
    """timm's patch embedding to (B, H, W, dim); on a GPU by a matrix product.

    The convolution, its gradient and their copies take 1.2 of 31 ms of a training step there (DeiT-Tiny/8, 128 images,
    bf16, H100), and 2.9 of 37 ms of DeiT-Small/16 with 256.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Embeds images (B, in_chans, height, width).

        Raises:
            ValueError: they have another size than the model, which has no `dynamic_img_size`, or other axes.
        """
        if x.ndim != 4:
            raise ValueError(f"got images of shape {tuple(x.shape)}, but they are (B, C, height, width)")
        size, own = tuple(x.shape[2:]), self.img_size
        if self.strict_img_size and size != own:
            is_grid = not any(side % patch for side, patch in zip(size, self.patch_size, strict=True))
            remedy = f"build it with dynamic_img_size=True, or with img_size={size}" if is_grid else "resize them"
            raise ValueError(f"model.img_size: got images of {size}, and the model is built for {own}; {remedy}")
        if not self.by_product(x):
            return super().forward(x)
        (h, w), (H, W) = self.patch_size, x.shape[2:]
        patches = x.unflatten(3, (W // w, w)).unflatten(2, (H // h, h)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        return self.norm(F.linear(patches, self.proj.weight.flatten(1), self.proj.bias))

    def by_product(self, x: Tensor) -> bool:
        """True on a GPU for images that timm takes as they are, unless another module or a hook is in use."""
        (h, w), size = self.patch_size, tuple(x.shape[2:])
        fits = self.img_size == size if self.strict_img_size else size[0] % h == size[1] % w == 0
        return x.is_cuda and fits and type(self.proj) is nn.Conv2d and not has_hooks(self.proj)


def conv_stem(in_chans: int, dim: int, patch_size: int) -> nn.Sequential:
    """Convolutional patch embedding (B, in_chans, height, width) -> (B, dim, height / patch_size, width / patch_size).

    [3x3 convolution of stride 2, BatchNorm, GELU] until the grid is reached: twice for patch 4, three times for 8, four
    times for 16; widths double up to dim; then a 1x1 convolution. After Xiao et al., 2021, "Early convolutions help
    transformers see better".
    """
    halvings = int(math.log2(patch_size))
    widths = [in_chans, *(dim >> i for i in reversed(range(halvings)))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv2d(dim, dim, 1))


def unmasked_parts(key_mask: Tensor) -> list[Grid]:
    """The (h, w) of each image's rectangle at the upper left of the grid, in which its mask (B, H, W) is true.

    Raises:
        ValueError: a mask that is true for nothing, or for another shape.
    """
    H, W = key_mask.shape[1:]
    h, w = key_mask.any(2).sum(1), key_mask.any(1).sum(1)
    rows, columns = torch.arange(H, device=h.device) < h[:, None], torch.arange(W, device=w.device) < w[:, None]
    parts: list[Grid] = list(zip(h.tolist(), w.tolist(), strict=True))
    if (0, 0) in parts or not torch.equal(key_mask, rows[:, :, None] & columns[:, None]):
        raise ValueError("key_mask: dynamic_img_size needs masks that are true for a rectangle at the upper left")
    return parts


def pad_positions(pos_embed: Tensor, part: Grid, grid: Grid) -> Tensor:
    """Position embeddings (1, prefix + h w, C) of a part of an (H, W) grid -> (1, prefix + H W, C), 0 elsewhere."""
    num_prefix = pos_embed.shape[1] - math.prod(part)
    prefix, positions = pos_embed[:, :num_prefix], pos_embed[:, num_prefix:].unflatten(1, part)
    padded = F.pad(positions, (0, 0, 0, grid[1] - part[1], 0, grid[0] - part[0]))
    return torch.cat([prefix, padded.flatten(1, 2)], 1)
