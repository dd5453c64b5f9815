"""Augmentation: timm's transforms of an image, and its mixup of a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm.data
from PIL import Image
from timm.data import Mixup, auto_augment
from timm.data.mixup import mixup_target
from timm.layers import to_2tuple
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from engine.config.schema import Augment, Run, num_channels, per_channel
from engine.data.images import BrokenImage
from engine.objectives import choose_objective


def posterize(image: Image.Image, bits_to_keep: int, **kwargs: Any) -> Image.Image:
    """timm's posterize, where keeping no bits gives black, as in Pillow before 13, which raises an error.

    timm's increasing policies ask for 0 bits at magnitude 10, which rand-m9-mstd0.5-inc1 reaches for one image in 656.
    """
    if bits_to_keep < 1:
        return image.point(lambda _: 0)
    return auto_augment.posterize(image, bits_to_keep, **kwargs)


# timm looks up its operations by name in this table when it builds a policy, so that replacing entries is enough.
auto_augment.NAME_TO_OP.update(
    {name: posterize for name, op in auto_augment.NAME_TO_OP.items() if op is auto_augment.posterize}
)

BatchAugment = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Images (b, C, H, W) and class indices (b,) -> images and, after mixup, soft targets (b, classes)."""

Size = int | tuple[int, int]
"""Side, or height and width, of images, pixels."""


class PairMixup(Mixup):
    """timm's mixup, for batches of odd size too, which a broken image may cause: the middle image is unmixed."""

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        share = self._mix_batch(images)
        return images, mixup_target(labels, self.num_classes, share, self.label_smoothing)


@dataclass(frozen=True)
class ReadTokens:
    """Transform of a grey image of this (height, width), whose pixels are numbers of tokens: bytes (1, H, W).

    Raises:
        BrokenImage: an image of another size, or a number that is not in the vocabulary.
    """

    size: tuple[int, int]
    vocab_size: int

    def __call__(self, image: Image.Image) -> Tensor:
        tokens = pil_to_tensor(image)
        _, height, width = tokens.shape
        if (height, width) != self.size:
            raise BrokenImage(f"{height} x {width} tokens, but model.img_size = {list(self.size)}")
        if (largest := int(tokens.max())) >= self.vocab_size:
            raise BrokenImage(f"it holds token {largest}, but model.vocab_size = {self.vocab_size}")
        return tokens


def create_transform(run: Run, img_size: Size, is_training: bool, as_bytes: bool) -> Callable[[Image.Image], Any]:
    """timm's transform of an image with the channels that the model takes; tokens stay as they are, bytes (1, H, W).

    Args:
        as_bytes: yields a uint8 tensor (C, H, W), neither normalised nor erased; else fp32, normalised and erased.
    """
    data, augment = run.data, run.augment
    if choose_objective(run).inputs == "tokens":
        return ReadTokens(to_2tuple(img_size), run.model["vocab_size"])
    mean, std = (per_channel(values, num_channels(run)) for values in (data.mean, data.std))
    return timm.data.create_transform(
        img_size,
        is_training=is_training,
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.hflip,
        vflip=augment.vflip,
        color_jitter=augment.color_jitter,
        auto_augment=augment.auto_augment,
        interpolation=augment.interpolation if is_training else data.interpolation,
        re_prob=augment.reprob,
        re_mode=augment.remode,
        mean=mean,
        std=std,
        crop_mode=data.crop_mode,
        crop_pct=data.crop_pct,
        use_prefetcher=as_bytes,
    )


def create_mixup(augment: Augment, num_classes: int) -> Mixup | None:
    """timm's batch-wise mixup and cutmix, either or both; None if both are off."""
    if not augment.mixup and not augment.cutmix:
        return None
    return PairMixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        switch_prob=augment.mixup_switch_prob,
        label_smoothing=augment.smoothing,
        num_classes=num_classes,
    )
