"""Training augmentation: timm's policies run on this Pillow, posterize included."""

import numpy as np
import PIL
import pytest
import timm.data
from PIL import Image, ImageOps
from timm.data.auto_augment import AugmentOp

from engine import data
from engine.distributed import seed_everything
from engine.schema import Augment


@pytest.fixture
def image():
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("bits", [0, -4])
def test_posterize_to_no_bits_is_black(image, bits):
    black = data.posterize(image, bits)
    assert (black.mode, black.size) == (image.mode, image.size)
    assert not np.asarray(black).any()


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterize_keeps_the_leading_bits(image, bits):
    kept = np.asarray(data.posterize(image, bits))
    assert (kept == np.asarray(image) >> (8 - bits) << (8 - bits)).all()
    assert (kept == np.asarray(ImageOps.posterize(image, bits))).all()


@pytest.mark.parametrize(
    ("name", "magnitude"), [("PosterizeIncreasing", 10), ("PosterizeIncreasing", 20), ("Posterize", 0)]
)
def test_policies_posterize_to_black_at_the_end_of_their_range(image, name, magnitude):
    op = AugmentOp(name, prob=1.0, magnitude=magnitude, hparams={"magnitude_max": 20})
    assert not np.asarray(op(image)).any()


def augment_all(image, monkeypatch, num_images: int) -> str:
    """Under the recipe's RandAugment one image in 656 asks posterize for 0 bits: two layers, 1 / 15 of the operations,
    applied half the time, at a magnitude of 10 or more (2.3 % of N(9, 0.5))."""
    blacks = []

    def counting(image, bits_to_keep, **kwargs):
        blacks.append(bits_to_keep < 1)
        return data.posterize(image, bits_to_keep, **kwargs)

    monkeypatch.setitem(timm.data.auto_augment.NAME_TO_OP, "PosterizeIncreasing", counting)
    augment = Augment()
    transform = timm.data.create_transform(
        24, is_training=True, auto_augment=augment.auto_augment, re_prob=augment.reprob, re_mode=augment.remode
    )
    seed_everything(0)
    for _ in range(num_images):
        assert transform(image).shape == (3, 24, 24)
    assert sum(blacks) == pytest.approx(num_images / 656, abs=4 * (num_images / 656) ** 0.5)
    assert sum(blacks) >= 1
    return f"{num_images} images augmented with Pillow {PIL.__version__}, {sum(blacks)} of them posterized to black"


def test_5000_augmented_images_pass(image, monkeypatch, figure):
    figure("A1", augment_all(image, monkeypatch, 5000))


@pytest.mark.stress
def test_50000_augmented_images_pass(image, monkeypatch, figure):
    figure("A1", augment_all(image, monkeypatch, 50_000))
