"""Tables with a column for every token, on another grid than the one they were made for."""

import torch.nn.functional as F
from torch import Tensor

from attention.base import Grid
from attention.features import upcast


def resample(table: Tensor, old: Grid, grid: Grid) -> Tensor:
    """Interpolates the columns (..., H*W) of the grid `old` to those of `grid`, as images: bilinear, antialiased."""
    if old == grid:
        return table
    images = upcast(table).flatten(0, -2).unflatten(1, old)[None]
    images = F.interpolate(images, grid, mode="bilinear", antialias=True, align_corners=False)
    return images[0].flatten(1).unflatten(0, table.shape[:-1]).to(table.dtype)
