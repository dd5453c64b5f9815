"""IDX files: the pixels and labels that were written, whatever the file is called; a stranger's file costs nothing."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from engine.config.schema import Data
from engine.data import sample
from engine.data.identity import identify_split
from engine.data.splits import classes_of, open_split
from tests.support.refusals import assert_split_refused, refusal

REFERENCE = Path(__file__).parents[2] / "reference"
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 3, 5), dtype=np.uint8)
LABELS = np.array([7, 2, 7, 5, 2, 5], np.uint8)
IMAGES_HEADER, LABELS_HEADER = struct.pack(">4I", 2051, 6, 3, 5), struct.pack(">2I", 2049, 6)


def write(root, images: bytes | None = None, labels: bytes | None = None, ending: str = "") -> None:
    """Writes a split by hand, with the given files or sound ones."""
    pack = gzip.compress if ending else bytes
    (root / f"train-images-idx3-ubyte{ending}").write_bytes(images or pack(IMAGES_HEADER + PIXELS.tobytes()))
    (root / f"train-labels-idx1-ubyte{ending}").write_bytes(labels or pack(LABELS_HEADER + LABELS.tobytes()))


def open_train(root):
    return open_split(Data(dataset="idx", root=str(root)), "train_split")


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_images_and_labels_are_those_of_the_files(tmp_path, ending):
    write(tmp_path, ending=ending)
    images = open_train(tmp_path)
    images.mode = "L"
    assert classes_of(images) == ["2", "5", "7"]  # the labels that occur, as the folders that are there
    assert [images[i][1] for i in range(len(images))] == [2, 0, 2, 1, 0, 1]
    assert np.array_equal(np.stack([np.asarray(images[i][0]) for i in range(len(images))]), PIXELS)
    assert list(images.reader.filenames())[1] == "0/1.pgm"


def test_drawings_of_one_size_are_different_data(tmp_path):
    """The names of the images are numbers; the content tells two drawings apart, of which one pixel differs."""
    (tmp_path / "other").mkdir()
    write(tmp_path)
    write(tmp_path / "other", ending=".gz")
    first, same = (identify_split("train", open_train(root)) for root in (tmp_path, tmp_path / "other"))
    assert first == same
    pixels = PIXELS.copy()
    pixels[4, 1, 1] ^= 1
    write(tmp_path / "other", images=gzip.compress(IMAGES_HEADER + pixels.tobytes()), ending=".gz")
    other = identify_split("train", open_train(tmp_path / "other"))
    assert other["train_files"] == first["train_files"]
    assert other["train_content"] != first["train_content"]


def test_a_packed_file_may_have_unpacked_labels(tmp_path):
    write(tmp_path, ending=".gz")
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(LABELS_HEADER + LABELS.tobytes())
    assert len(open_train(tmp_path)) == 6


PACKED = gzip.compress(IMAGES_HEADER + PIXELS.tobytes())


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        ({"images": b"\x89PNG" + bytes(40)}, "'train-images-idx3-ubyte' begins with 89504e47, not with 00000803"),
        ({"images": LABELS_HEADER + LABELS.tobytes()}, "begins with 00000801, not with 00000803"),
        ({"images": IMAGES_HEADER[:9]}, "'train-images-idx3-ubyte': 0 bytes by its header; 1 to 1,073,741,824 can be"),
        ({"images": b"\0"}, "begins with 00, not"),
        ({"images": struct.pack(">4I", 2051, *[2**32 - 1] * 3)}, "79,228,162,458,924,105,385,300,197,375 bytes by its"),
        ({"images": IMAGES_HEADER + PIXELS.tobytes()[:-1]}, "'train-images-idx3-ubyte' ends after 89 of the 90 bytes"),
        ({"images": IMAGES_HEADER + PIXELS.tobytes() + b"x"}, "'train-images-idx3-ubyte' goes on after the 90 bytes"),
        ({"labels": LABELS_HEADER + LABELS.tobytes()[:-1]}, "'train-labels-idx1-ubyte' ends after 5 of the 6 bytes"),
        ({"labels": struct.pack(">2I", 2049, 5) + bytes(5)}, "6 images, but 5 labels in 'train-labels-idx1-ubyte'"),
        ({"labels": struct.pack(">2I", 2049, 0)}, "'train-labels-idx1-ubyte': 0 bytes by its header"),
        ({"ending": ".gz", "images": PACKED[:-9]}, r"train-images-idx3-ubyte.gz: damaged \(EOFError: .*marker"),
        ({"ending": ".gz", "images": PACKED[:-8] + bytes(8)}, r"damaged \(BadGzipFile: CRC check failed"),
        ({"ending": ".gz", "images": PACKED[:30] + b"\xff" * 40}, r"damaged \("),
        ({"ending": ".gz", "images": b"no gzip"}, r"damaged \(BadGzipFile: Not a gzipped file"),
        ({"ending": ".gz", "labels": gzip.compress(LABELS_HEADER + bytes(10**6))}, "goes on after the 6 bytes"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damaged, problem):
    write(tmp_path, **damaged)
    assert_split_refused(problem, dataset="idx", root=str(tmp_path))


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path, ending=".gz")
    data = {"dataset": "idx", "root": str(tmp_path)}
    problem = "no 'val-images-idx3-ubyte' in .*: train-images-idx3-ubyte.gz; in training, data.val_fraction=0.2 holds"
    assert_split_refused(problem, "val", **data)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    assert_split_refused(r"no 'train-labels-idx1-ubyte' \(or .gz\) beside it", **data)


def test_a_sample_holds_the_first_of_each_class(tmp_path, capsys):
    write(tmp_path, ending=".gz")
    options = [str(tmp_path), str(tmp_path / "sample"), "--split", "train", "--per-class"]
    sample.main([*options, "1"])
    assert capsys.readouterr().out.endswith("sample: 3 images of 3 classes\n")
    images = open_train(tmp_path / "sample")
    assert classes_of(images) == ["2", "5", "7"]
    assert images.reader.labels.tolist() == [2, 0, 1]
    assert np.array_equal(images.reader.images, PIXELS[[0, 1, 3]])
    assert all(path.read_bytes()[4:8] == bytes(4) for path in (tmp_path / "sample").iterdir())  # no time: gzip's MTIME
    assert "train-images-idx3-ubyte.gz: is there already" in refusal(sample.main, [*options, "2"], capsys)
    (tmp_path / "plain").mkdir()
    write(tmp_path / "plain")
    options = [str(tmp_path), str(tmp_path / "plain"), "--split", "train", "--per-class", "1"]
    assert "train-images-idx3-ubyte: is there already" in refusal(sample.main, options, capsys)
    options = [str(tmp_path), str(tmp_path / "sample"), "--split", "train", "--per-class"]
    for path in list((tmp_path / "sample").iterdir()):
        path.unlink()
    error = refusal(sample.main, [*options, "3"], capsys)
    assert "class 2 of train has 2 images; --per-class is 3" in error
    error = refusal(sample.main, [tmp_path, "/dev/null/sample", *options[2:], "1"], capsys)
    assert "output /dev/null/sample: cannot be made: Not a directory" in error


def test_the_shipped_sample_is_balanced():
    images = open_split(Data(dataset="idx", root=str(REFERENCE), val_split="t10k"), "val_split")
    assert classes_of(images) == list("0123456789")
    assert np.bincount(images.reader.labels).tolist() == [200] * 10
    assert images.reader.images.shape == (2000, 28, 28)
