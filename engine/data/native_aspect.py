"""Images in their native aspect ratio, as in NaViT (Dehghani et al., 2023, arXiv:2307.06304)."""

import math
from typing import Any, cast

import torch
from PIL import Image
from timm.data.transforms import str_to_interp_mode
from timm.layers import to_2tuple
from torch import nn
from torchvision.transforms.functional import resize

from attention import Grid, OptionError
from engine.config.schema import Run
from engine.data.images import BrokenImage
from models import create_model


def native_grid(height: int, width: int, num_patches: int) -> Grid:
    """The (H, W) of at most so many patches whose aspect ratio is nearly that of an image.

    The sides of exactly `num_patches` in the ratio of the image are rounded down, to 1 at least, as in Pix2Struct (Lee
    et al., 2023, arXiv:2210.03347).
    """
    sides = ((height, width), (width, height))
    rows, columns = (max(1, min(num_patches, math.isqrt(num_patches * side // other))) for side, other in sides)
    return rows, columns


class NativeAspect:
    """Transform of an image that resizes it to the whole patches of `native_grid`; in a pyramid, of the first stage.

    Args:
        run: its model takes images of any size. img_size: images for which the model has `num_patches`.
    Raises:
        BrokenImage: an image so narrow that the attention does not take its grid.
    """

    def __init__(self, run: Run, img_size: int | tuple[int, int]):
        with torch.device("meta"):  # no memory, and nothing is computed
            self.model = cast(Any, create_model(attention=run.attention, **run.model).eval())
        for stage in [module for module in self.model.modules() if hasattr(module, "blocks")]:
            kinds = {str(block.attn): block for block in stage.blocks}
            stage.blocks = nn.ModuleList(kinds.values())  # the others take the same grids
        self.patch_size: int = self.model.feature_info[0]["reduction"]
        self.num_patches = math.prod(math.ceil(side / self.patch_size) for side in to_2tuple(img_size))
        self.interpolation = str_to_interp_mode(run.data.interpolation)
        self.problems: dict[Grid, str] = {}

    def __call__(self, image: Image.Image) -> Image.Image:
        grid = native_grid(image.height, image.width, self.num_patches)
        if problem := self.find_problem(grid):
            raise BrokenImage(f"data.crop_mode = native makes {grid[0]} x {grid[1]} patches of it: {problem}")
        return resize(image, [side * self.patch_size for side in grid], self.interpolation)

    def find_problem(self, grid: Grid) -> str:
        """Returns why the model takes no images of a grid, "" if it does; tries every grid once."""
        if grid not in self.problems:
            sides = (side * self.patch_size for side in grid)
            try:
                with torch.no_grad():
                    self.model(torch.empty(1, self.model.in_chans, *sides, device="meta"))
                self.problems[grid] = ""
            except OptionError as error:
                self.problems[grid] = str(error)
        return self.problems[grid]
