"""What measures the loader: the same images from every source, and ratios that are what they say."""

import math

import numpy as np
import pytest

from bench import loading
from engine.distributed import seed_everything
from engine.images import decode


def test_every_source_gives_the_same_images(tmp_path):
    sources = loading.open_sources(loading.write_jpegs(tmp_path / "made", 3), tmp_path, 2)
    assert [len(images) for images in sources.values()] == [2] * 3
    plain, full, short = sources.values()
    for i in range(2):
        assert draw(short, i).shape == (3, 224, 224)
        assert draw(short, i).dtype == np.uint8
        assert np.array_equal(draw(plain, i), draw(full, i))
    assert min(decode(short.reader[0][0]).size) == 256


def draw(images, index: int) -> np.ndarray:
    seed_everything(0)
    return np.asarray(images[index][0])


def test_the_table_takes_ratios_within_a_round():
    table = loading.table(
        {"plain": [0.004, 0.008, 0.004], "fast": [0.002, 0.004, 0.001], "noisy": [0.004, 0.001, 0.016]}
    )
    _, plain, fast, noisy = table.splitlines()
    assert plain.split() == ["plain", "250", "4.00", "1.00", "+-0.00"]
    assert fast.split()[:4] == ["fast", "500", "2.00", "2.00"]
    assert noisy.endswith("too noisy, repeat")


@pytest.mark.parametrize(("values", "expected"), [([1.0, 2, 3, 4, 5], 1.0), ([2.0, 2], 0.0), ([1.0], math.inf)])
def test_spread(values, expected):
    assert loading.half_range(values) == expected


def test_the_command_runs(capsys):
    loading.main(["--images", "2", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:26].strip() for line in lines[-3:]] == [
        "JPEG",
        "prepared, full size",
        "prepared, short side 256",
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [(["/nowhere"], "data.root: no directory"), (["--rounds", "0"], "must be at least 1")],
)
def test_bad_input_is_refused(capsys, arguments, problem):
    with pytest.raises(SystemExit) as ended:
        loading.main(arguments)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
