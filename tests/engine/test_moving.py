"""Clips of moving digits: the class is the movement, and the splits share no digit."""

import itertools

import numpy as np
import pytest

from engine.data.arrays import DigitsReader
from engine.data.draw import main
from engine.data.idx import IMAGES, IdxReader
from engine.data.moving import draw
from tests.support.refusals import refusal


@pytest.mark.parametrize("label", range(10))
def test_the_class_is_the_movement(label):
    shifts = [(y, x) for y in range(-4, 5) for x in range(-4, 5)]
    for seed in range(3):
        clip, other = (draw(np.random.default_rng(seed), y, DigitsReader("val").images) for y in (label, 0))
        assert (clip[:28] == other[:28]).all()  # the first frame is of any class
        pairs, way = itertools.pairwise(clip.reshape(8, 28, 28)), [0]
        for a, b in pairs:
            ((y, x),) = (shift for shift in shifts if (np.roll(a, shift, (0, 1)) == b).all())
            way.append(way[-1] + complex(x, y))
        if label < 8:
            along = np.array(way) / np.exp(0.25j * np.pi * label)
            assert 14 - 1.5 < along[-1].real < 21 + 1.5
            assert np.abs(along - np.arange(8) * along[-1].real / 7).max() < 2
        else:
            area = (np.conj(way) * np.roll(way, -1)).imag.sum() / 2  # an octagon of sides 2 to 3 has 19 to 44
            assert 10 < area * (17 - 2 * label) < 60


def test_files_depend_on_the_arguments_alone_and_share_no_digit(tmp_path, capsys):
    for name, count in (("a", 30), ("b", 30), ("more", 40)):
        main(["moving", str(tmp_path / name), "--images", str(count), "20"])
    a, b = ([path.read_bytes() for path in sorted((tmp_path / name).iterdir())] for name in "ab")
    assert a == b
    more, *splits = (IdxReader(f"{tmp_path / name}{IMAGES}.gz") for name in ("more/train", "a/train", "a/t10k"))
    assert (more.images[:30] == splits[0].images).all()
    for of, split in zip(splits, ("train", "val"), strict=True):
        assert of.labels.tolist() == [*range(10)] * (len(of.images) // 10)
        known = {tuple(sorted(digit[digit > 0] * 255 // 16)) for digit in DigitsReader(split).images.astype(int)}
        assert {tuple(sorted(image[:28][image[:28] > 0])) for image in of.images} <= known
    assert "--tokens is an option of pathf" in refusal(main, ["moving", tmp_path, "--tokens", 28], capsys)
    assert "of 6,272 pixels: 1,254,400" in refusal(main, ["moving", tmp_path, "--images", 200_000, 10], capsys)
