"""Pre-training on masked images, SimMIM (Xie et al., 2022, arXiv:2111.09886): its loss, and what is shown of it."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.evaluate import Measure

NUM_SHOWN = 8
"""Images of which TensorBoard shows the reconstruction."""


class MaskedImages:
    """The objective of a run on masked images: the targets of its images are their masks.

    Attributes:
        identity: metadata of checkpoints: none. measure: what an evaluation looks for.
    """

    def __init__(self) -> None:
        self.identity: dict[str, str] = {}
        self.measure = Measure(("loss",), sum_losses)

    def __call__(self, network: Callable[[Tensor, Tensor], Tensor], images: Tensor, masks: Tensor) -> Tensor:
        """The loss of a batch, a scalar."""
        return masked_l1(network(images, masks), images, masks).mean()

    def pictures(self, rows: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Of every evaluation: for each model, by its prefix, what `sum_losses` shows of the first images."""
        return {f"{prefix}reconstruction": strips[0] for prefix, strips in rows.items() if strips}


def sum_losses(model: nn.Module, images: Tensor, masks: Tensor, rows: list[Tensor] | None) -> list[Tensor]:
    """The sum of `masked_l1` over a batch; the first of an evaluation leaves a strip in `rows`.

    It is (n, C, 3 x height, width): images above the same with masked pixels at the mean, and with these reconstructed.
    """
    pixels = model(images, masks)
    if rows is not None and not rows:
        shown, hidden = images[:NUM_SHOWN], to_pixels(masks, images)[:NUM_SHOWN]
        rows.append(torch.cat([shown, shown * ~hidden, torch.where(hidden, pixels[:NUM_SHOWN], shown)], 2))
    return [masked_l1(pixels, images, masks).double().sum()]


def masked_l1(pixels: Tensor, images: Tensor, masks: Tensor) -> Tensor:
    """The loss of every image, (B,): the mean of |pixel - image| over its masked pixels and channels (equation 1).

    As in the paper's code, images are as the model gets them, normalised by `data.mean` and `data.std`. Every image has
    as many masked pixels, so that the mean over images is that over all masked pixels.

    Args:
        pixels, images: (B, C, height, width). masks: (B, H, W) of patches, true where they are masked.
    """
    hidden = to_pixels(masks, images)
    error = (pixels - images).abs().mean(1, keepdim=True)
    return (error * hidden).sum((1, 2, 3)) / hidden.sum((1, 2, 3))


def masked_l1_reference(pixels: Tensor, images: Tensor, masks: Tensor) -> Tensor:
    """`masked_l1`, pixel by pixel."""
    p = images.shape[2] // masks.shape[1]
    losses = []
    for pixel, image, mask in zip(pixels, images, masks, strict=True):
        errors = [
            abs(pixel[c, y, x] - image[c, y, x])
            for c in range(image.shape[0])
            for y in range(image.shape[1])
            for x in range(image.shape[2])
            if mask[y // p, x // p]
        ]
        losses.append(sum(errors) / len(errors))
    return torch.stack(losses)


def to_pixels(masks: Tensor, images: Tensor) -> Tensor:
    """Masks of patches (B, H, W) -> of pixels, (B, 1, height, width) as the images."""
    return F.interpolate(masks[:, None].to(torch.uint8), images.shape[2:]).bool()
