"""Pre-training on masked images, SimMIM (Xie et al., 2022, arXiv:2111.09886)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from attention import Grid
from attention.options import OptionError
from engine.config.objective_options import Simmim
from engine.config.schema import Run
from engine.objectives.objective import Measure, Objective
from engine.objectives.sequences import refuse_options


@dataclass(frozen=True)
class MaskGenerator:
    """Draws the masked patches of an image: a fixed number of whole squares.

    Args:
        squares: (H, W), the grid of squares. patches: along the side of one. count: squares to mask.
        is_training: draw with the random numbers of the image's place (`engine.data.sampler`); otherwise they depend
            on the image's index alone, so that all evaluations of all runs mask the same.
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


def rate_masked(model: nn.Module, images: Tensor, masks: Tensor, rows: list[Tensor] | None) -> list[Tensor]:
    """Computes the `masked_l1` of every image of a batch."""
    return [masked_l1(model(images, masks), images, masks).double()]


def masked_l1(pixels: Tensor, images: Tensor, masks: Tensor) -> Tensor:
    """The loss of every image, (B,): the mean of |pixel - image| over its masked pixels and channels (equation 1).

    As in the paper's code, images are as the model gets them, normalised by `data.mean` and `data.std`. Every image has
    as many masked pixels, so that the mean over images is that over all masked pixels.

    Args:
        pixels, images: (B, C, height, width). masks: (B, H, W) of patches, true where they are masked.
    """
    hidden = F.interpolate(masks[:, None].to(torch.uint8), images.shape[2:]).bool()  # of pixels
    error = (pixels - images).abs().mean(1, keepdim=True)
    return (error * hidden).sum((1, 2, 3)) / hidden.sum((1, 2, 3))


class MaskedImages(Objective):
    """The objective of a run on masked images: the targets of its images are their masks."""

    measure, predicts_classes, takes_targets = Measure(("loss",), rate_masked), False, True

    @staticmethod
    def applies(run: Run) -> bool:
        return bool(run.model.get("mask_token"))

    @staticmethod
    def learns_labels(run: Run) -> bool:
        return False

    @staticmethod
    def check(run: Run) -> None:
        """Refuses squares that are no whole patches or leave nothing to see, labels in a run on masked images, and
        options of `Simmim` in any other run.
        """
        simmim, model = run.simmim, run.model
        if not model.get("mask_token"):
            if simmim != Simmim():
                remedy = "set model.mask_token=true" if "mask_token" in model else f"choose a DeiT, not {model['name']}"
                raise OptionError("simmim", f"given, but the model has no mask token; {remedy}, or leave simmim out")
            return
        sides, patch = to_2tuple(model["img_size"]), model["patch_size"]
        valid = [size for size in range(patch, min(sides) + 1, patch) if not any(side % size for side in sides)]
        size, ratio = simmim.mask_size, simmim.mask_ratio
        of_labels = {"augment": dict.fromkeys(("mixup", "cutmix", "smoothing"), 0)}
        refuse_options(run, of_labels, "masked images have no labels to mix or smooth")
        refuse_options(run, {"augment": {"reprob": 0}}, "erased areas would be targets")
        if (teacher := run.distill.teacher) is not None:
            raise OptionError("distill.teacher", f" = {teacher}: a model with mask_token predicts no classes")
        if size not in valid:
            squares = f"{size} x {size} pixels of a {sides[0]} x {sides[1]} image are no whole patches of {patch}"
            raise OptionError(
                "simmim.mask_size", f" = {size}: {squares} that tile it; valid: {', '.join(map(str, valid))}"
            )
        count = sides[0] * sides[1] // size**2
        if math.ceil(ratio * count) == count:
            problem = f" = {ratio:g} masks all {count} squares; lower it, or simmim.mask_size"
            raise OptionError("simmim.mask_ratio", problem)

    @staticmethod
    def prediction_refusal(source: str, of_metrics: bool) -> str:
        remedy = f"train a classifier from it (init.weights={source}), and name that run"
        return f"pre-trained on masked images, it predicts no classes; {remedy}"

    @staticmethod
    def create_targets(run: Run, is_training: bool) -> MaskGenerator:
        """Creates the generator of the masks of a run's images."""
        size = run.simmim.mask_size
        height, width = to_2tuple(run.model["img_size"])
        squares = height // size, width // size
        count = math.ceil(run.simmim.mask_ratio * math.prod(squares))
        return MaskGenerator(squares, size // run.model["patch_size"], count, is_training)

    def __call__(self, network: Callable[[Tensor, Tensor], Tensor], images: Tensor, masks: Tensor, /) -> Tensor:
        """Computes the loss of a batch, a scalar."""
        return masked_l1(network(images, masks), images, masks).mean()
