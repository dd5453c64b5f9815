"""Clips of moving digits: the class is the movement, and the splits share no digit."""

import itertools

import numpy as np
import pytest

from engine.data.arrays import DigitsReader
from engine.data.draw import main
from engine.data.idx import IMAGES, IdxReader
from engine.data.moving import draw
from tests.support.refusals import refusal


def steps_of(clip: np.ndarray) -> list[complex]:
    """Columns + i rows from each of the 8 frames to the next: the only small shift that makes them equal."""
    frames, steps = clip.reshape(8, 28, 28), [(y, x) for y in range(-4, 5) for x in range(-4, 5)]
    pairs = itertools.pairwise(frames)
    found = [[complex(x, y) for y, x in steps if (np.roll(a, (y, x), (0, 1)) == b).all()] for a, b in pairs]
    assert {len(each) for each in found} == {1}
    return [step for (step,) in found]


@pytest.mark.parametrize("label", range(10))
def test_the_class_is_the_movement(label):
    for seed in range(3):
        clip, other = (draw(np.random.default_rng(seed), y, DigitsReader("val").images) for y in (label, 0))
        assert (clip[:28] == other[:28]).all()  # the first frame, which is of any class
        way = np.cumsum([0, *steps_of(clip)])
        if label < 8:
            along = way / np.exp(0.25j * np.pi * label)
            assert 14 - 1.5 < along[-1].real < 21 + 1.5
            assert np.abs(along - np.arange(8) * along[-1].real / 7).max() < 2
        else:
            area = (way.conj() * np.roll(way, -1)).imag.sum() / 2  # of an octagon with sides of 2 to 3, 19 to 44
            assert 10 < area * (17 - 2 * label) < 60


def test_files_depend_on_the_arguments_alone_and_share_no_digit(tmp_path):
    for name, count in (("a", 30), ("b", 30), ("more", 40)):
        main(["moving", str(tmp_path / name), "--images", str(count), "20"])
    a, b = (sorted((tmp_path / name).iterdir()) for name in "ab")
    assert [path.read_bytes() for path in a] == [path.read_bytes() for path in b]
    names = ("more/train", "a/train", "a/t10k")
    more, *splits = (IdxReader(f"{tmp_path / name}{IMAGES}.gz") for name in names)
    assert (more.images[:30] == splits[0].images).all()
    for of, split, count in zip(splits, ("train", "val"), (30, 20), strict=True):
        assert of.images.shape == (count, 8 * 28, 28)
        assert of.labels.tolist() == [*range(10)] * (count // 10)
        known = {tuple(sorted(digit[digit > 0] * 255 // 16)) for digit in DigitsReader(split).images.astype(int)}
        assert {tuple(sorted(image[:28][image[:28] > 0])) for image in of.images} <= known


def test_what_cannot_be_drawn_is_refused(tmp_path, capsys):
    for options, problem in (
        (["--tokens", 28], "--tokens is an option of pathfinder alone; leave it out"),
        (["--images", 20, 22], "--images must be multiples of 10, the number of classes, got [20, 22]"),
        (["--images", 200_000, 10], "of 6,272 pixels: 1,254,400,000 bytes; at most 1,073,741,824"),
    ):
        assert problem in refusal(main, ["moving", tmp_path / "x", *options], capsys)
