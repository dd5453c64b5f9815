"""Which patches of an image are masked, as in SimMIM (Xie et al., 2022, section 3.2): random squares of a grid."""

import math
from dataclasses import dataclass

import torch
from timm.layers import to_2tuple
from torch import Tensor

from attention import Grid
from engine.schema import Run


@dataclass(frozen=True)
class MaskGenerator:
    """Draws which patches of an image are masked: whole squares, always as many.

    Args:
        squares: (H, W), the grid of squares. patches: along the side of one. count: squares to mask.
        is_training: draw with the random numbers of the image's place (`engine.sampler`); else those of an image depend
            on its index alone, so that all evaluations, of all runs, mask the same.
    """

    squares: Grid
    patches: int
    count: int
    is_training: bool

    def __call__(self, index: int) -> Tensor:
        """The mask of the image with this index in its data set, (H, W) of patches, true where it is masked."""
        generator = None if self.is_training else torch.Generator().manual_seed(index)
        mask = torch.zeros(math.prod(self.squares), dtype=torch.bool)
        mask[torch.randperm(len(mask), generator=generator)[: self.count]] = True
        return mask.view(self.squares).repeat_interleave(self.patches, 0).repeat_interleave(self.patches, 1)


def create_masks(run: Run, is_training: bool) -> MaskGenerator | None:
    """The masks of a run's images; None where it learns classes."""
    if not run.model.get("mask_token"):
        return None
    size = run.simmim.mask_size
    height, width = to_2tuple(run.model["img_size"])
    squares = height // size, width // size
    count = math.ceil(run.simmim.mask_ratio * math.prod(squares))
    return MaskGenerator(squares, size // run.model["patch_size"], count, is_training)
