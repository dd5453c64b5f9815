"""Training augmentation of whole batches on the training device (`augment.batched`), with the draws of timm.

A loader worker decodes, crops and flips an image, and draws what timm's transforms would do to it next, by timm's own
objects and so with the same random numbers. The device does these steps: the images of a batch that need the same
operation are one group, whose arguments are a row for every image.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment as timm_ops
from timm.data.loader import fast_collate
from timm.data.transforms import MaybePILToTensor, RandomResizedCropAndInterpolation
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import ColorJitter, Compose, RandomHorizontalFlip, RandomVerticalFlip
from torchvision.transforms.functional import pil_to_tensor

from attention.options import OptionError
from engine.data.batch_operations import OPERATIONS

LEVELS = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
"""An image of all levels."""

CACHED = 2**19
"""Levels of the images that a CPU works on at a time, so that their fp32 copies stay in its cache."""


@dataclass
class Drawn:
    """A cropped image (C, H, W), uint8, and the steps to be done to it: names of `OPERATIONS` and their arguments.

    timm's geometric operations take it instead of a Pillow image: they call `transform` and `rotate`.
    """

    image: Tensor
    steps: list[tuple[str, Sequence[float]]] = field(default_factory=list)

    @property
    def shape(self) -> torch.Size:
        return self.image.shape

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, as of a Pillow image."""
        return self.image.shape[2], self.image.shape[1]

    def add(self, operation: str, *arguments: float) -> "Drawn":
        self.steps.append((operation, arguments))
        return self

    def transform(
        self, size: Any, method: Any, matrix: Sequence[float], resample: int, fillcolor: Sequence[float]
    ) -> "Drawn":
        """Adds an affine map, as Pillow's method of this name does it: `matrix` maps output places to input places."""
        return self.add(Image.Resampling(resample).name.lower(), *matrix, *fillcolor)

    def rotate(self, degrees: float, **options: Any) -> "Drawn":
        return cast(Drawn, Image.Image.rotate(cast(Any, self), degrees, **options))  # Pillow computes the matrix

    def copy(self) -> "Drawn":
        """Stands for what Pillow does at 0 degrees."""
        return self


def tabulate(function: Callable[..., Image.Image], drawn: Drawn, *arguments: float, **options: Any) -> Drawn:
    """Adds timm's `function`, which maps every level on its own, as a table of its results for all 256 levels."""
    levels = function(LEVELS, *arguments, **options)
    return drawn.add("table", *np.asarray(levels).ravel().tolist())


GEOMETRIC: set[Callable[..., Any]] = {
    timm_ops.rotate,
    timm_ops.shear_x,
    timm_ops.shear_y,
    timm_ops.translate_x_rel,
    timm_ops.translate_y_rel,
    timm_ops.translate_x_abs,
    timm_ops.translate_y_abs,
}
"""timm's functions that take `Drawn`."""

POINTWISE: set[Callable[..., Any]] = {timm_ops.invert, timm_ops.solarize, timm_ops.solarize_add, timm_ops.brightness}
"""timm's functions that map every level on its own, besides posterize, see `engine.data.augment`."""


def note(operation: str, drawn: Drawn, *arguments: float, **_: Any) -> Drawn:
    """Adds `operation` with the arguments that timm gives its function."""
    return drawn.add(operation, *arguments)


def desaturate(drawn: Drawn, factor: float, **_: Any) -> Drawn:
    return drawn.add("color", min(1.0, max(0.0, 1.0 - factor)))


def blur_randomly(drawn: Drawn, factor: float, **_: Any) -> Drawn:
    return drawn.add("blur", random.uniform(0.1, 2.0 * factor))


OTHERS: dict[Callable, Callable[..., Drawn]] = {
    timm_ops.auto_contrast: partial(note, "autocontrast"),
    timm_ops.equalize: partial(note, "equalize"),
    timm_ops.color: partial(note, "color"),
    timm_ops.contrast: partial(note, "contrast"),
    timm_ops.sharpness: partial(note, "sharpness"),
    timm_ops.desaturate: desaturate,
    timm_ops.gaussian_blur: partial(note, "blur"),
    timm_ops.gaussian_blur_rand: blur_randomly,
}
"""timm's other functions of an image -> functions of `Drawn` that add their step, with the same random numbers."""


class DrawingTransform:
    """timm's training transform, which crops and flips an image, and draws the rest.

    Args:
        transform: of timm; its policy draws steps from now on and cannot be used on images. posterize: timm's function.
    Raises:
        OptionError: it has an operation that is not known here.
    """

    def __init__(self, transform: Compose, posterize: Callable[..., Image.Image]):
        self.crop, *others = transform.transforms
        self.flips = [other for other in others if isinstance(other, RandomHorizontalFlip | RandomVerticalFlip)]
        self.policies = [other for other in others if other not in self.flips]
        for policy in self.policies:
            match policy:
                case timm_ops.RandAugment(ops=ops):
                    substitute(ops, posterize)
                case timm_ops.AutoAugment(policy=pairs):
                    substitute([op for pair in pairs for op in pair], posterize)
                case ColorJitter(hue=None) | MaybePILToTensor():
                    pass
                case _:
                    _refuse(type(policy).__name__)

    def __call__(self, image: Image.Image) -> Drawn:
        """Draws the augmentation of `image`, from the random states that timm uses, in the same order."""
        cropped = crop(image, self.crop)
        for flip in self.flips:
            cropped = flip(cropped)
        drawn = Drawn(cropped)
        for policy in self.policies:
            if isinstance(policy, ColorJitter):
                draw_jitter(policy, drawn)
            elif not isinstance(policy, MaybePILToTensor):
                policy(drawn)
        return drawn


def substitute(ops: Sequence[timm_ops.AugmentOp], posterize: Callable[..., Image.Image]) -> None:
    """Makes timm's operations `ops` add steps to `Drawn`. OptionError: one is not known here."""
    for op in ops:
        function = cast(Callable[..., Any], op.aug_fn)
        if function in POINTWISE or function is posterize:
            op.aug_fn = cast(Any, partial(tabulate, function))
        elif function in OTHERS:
            op.aug_fn = OTHERS[function]
        elif function not in GEOMETRIC:
            _refuse(op.name)


def _refuse(name: str) -> None:
    raise OptionError("augment.batched", f" = true: timm's {name} has no batched version; set it to false")


def crop(image: Image.Image, how: RandomResizedCropAndInterpolation) -> Tensor:
    """Draws a crop of `image` as timm does, and resizes it in uint8, (C, H, W), which is faster than Pillow.

    Levels differ by at most 2 from those of Pillow, which for some tall crops resizes the height first (Pillow 13).
    Where levels overshoot, they differ by at most 3 in photographs, and by up to 31 in noise.
    """
    top, left, height, width = how.get_params(image, how.scale, how.ratio)
    modes = how.interpolation
    mode = random.choice(modes) if isinstance(modes, tuple) else modes
    pixels = pil_to_tensor(image.crop((left, top, left + width, top + height)))
    return interpolate(pixels[None], how.size, mode=mode.value, antialias=True)[0]


def draw_jitter(jitter: ColorJitter, drawn: Drawn) -> None:
    """Draws the factors of torchvision's colour jitter, and adds its operations in the order that it draws."""
    order, *factors, _ = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    for number in order.tolist():
        factor = factors[number] if number < 3 else None
        if factor is not None and number == 0:
            tabulate(timm_ops.brightness, drawn, factor)
        elif factor is not None:
            drawn.add(("brightness", "contrast", "color")[number], factor)


class Planned(NamedTuple):
    """A batch whose steps are done on the device that it is sent to; few tensors, as each takes a file on the way.

    Attributes:
        images: (b, C, H, W) uint8.
        groups: name of an operation, number of images n, and number a of arguments of each, in the order of the steps.
        rows: the images of all groups in their order, (sum of n,) int64.
        arguments: of all groups, (sum of n * a,) fp32.
    """

    images: Tensor
    groups: list[tuple[str, int, int]]
    rows: Tensor
    arguments: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor:
        """Sends the batch to `device`, and returns the images after all steps; timm's prefetcher calls this."""
        images = self.images.to(device, non_blocking=non_blocking)
        most = len(images) if images.is_cuda else max(1, CACHED // images[0].numel())
        for operation, rows, arguments in self._split(device, non_blocking):
            for some, their in zip(rows.split(most), arguments.split(most), strict=True):
                images[some] = OPERATIONS[operation](images[some], their)
        return images

    def _split(self, device: torch.device, non_blocking: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The operation, the rows (n,) and the arguments (n, a) of every group, on `device`."""
        rows = self.rows.to(device, non_blocking=non_blocking).split([n for _, n, _ in self.groups])
        arguments = self.arguments.to(device, non_blocking=non_blocking).split([n * a for _, n, a in self.groups])
        for (operation, n, a), its_rows, its_arguments in zip(self.groups, rows, arguments, strict=True):
            yield operation, its_rows, its_arguments.view(n, a)


def stack_drawn(samples: Sequence[tuple[Drawn, Any]]) -> tuple[Planned, Tensor]:
    """Makes a batch of drawn images and their targets: first the first steps of all images, then the second ones."""
    images, targets = fast_collate([(drawn.image, target) for drawn, target in samples])
    groups: list[tuple[str, int, int]] = []
    rows: list[int] = []
    arguments: list[np.ndarray] = []
    for number in range(max(len(drawn.steps) for drawn, _ in samples)):
        found: defaultdict[str, list[int]] = defaultdict(list)
        for row, (drawn, _) in enumerate(samples):
            if number < len(drawn.steps):
                found[drawn.steps[number][0]].append(row)
        for operation, its_rows in sorted(found.items()):
            values = np.array([samples[row][0].steps[number][1] for row in its_rows], np.float32)
            groups.append((operation, *values.shape))
            rows += its_rows
            arguments.append(values.ravel())
    joined = np.concatenate([np.empty(0, np.float32), *arguments])
    return Planned(images, groups, torch.tensor(rows, dtype=torch.int64), torch.from_numpy(joined)), targets
