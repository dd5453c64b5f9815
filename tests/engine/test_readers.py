"""Class folders: classes are the first level, nothing is left out without being listed."""

import hashlib
import os
import random
import re
import tracemalloc

import pytest
from PIL import Image
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.utils.misc import natural_key

from attention.options import OptionError
from engine.config.schema import Data
from engine.data.folders import open_class_folders
from engine.data.identity import identify_split
from engine.data.images import FORMATS, SUFFIXES
from engine.data.layout import classify, describe_files
from engine.data.splits import classes_of, open_split
from tests.support.refusals import assert_split_refused


def write_folder(root, paths, name="train"):
    for path in paths:
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(path)


def split_of(root):
    return open_split(Data(root=str(root)), "train_split")


@pytest.fixture
def open_paths(tmp_path):
    """Writes files whose content is their path, as a split, and opens it."""

    def write_and_open(paths):
        write_folder(tmp_path, paths)
        return split_of(tmp_path)

    return write_and_open


def test_classes_are_the_first_level(open_paths):
    paths = ["a/red/1.png", "b/red/2.png", "b/3.JPEG", "b/notes.txt"]
    images = open_paths(paths)
    assert classes_of(images) == ["a", "b"]
    assert [images.filename(i) for i in range(len(images))] == ["a/red/1.png", "b/3.JPEG", "b/red/2.png"]
    labels = []
    for i in range(len(images)):
        file, label = images.reader[i]
        with file:
            assert images.filename(i) == file.read().decode()
        labels.append(label)
    assert labels == [0, 1, 1]
    assert describe_files(images.reader.ignored) == "ignored files: 1 *.txt ('b/notes.txt')"


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["notes.txt"], r"no images \(files named \*\.jpg"),
        (["a/1.png", "b/2.png", "3.png"], r"images in no class folder: 1, such as '3.png'; move or remove them"),
        (["a/1.png", "b/2.png", "c/3.heic", "c/4.txt"], "the class folder 'c' holds no image; remove it"),
    ],
)
def test_what_makes_no_classes_is_refused(open_paths, paths, problem):
    with pytest.raises(OptionError, match=f"train': {problem}") as caught:
        open_paths(paths)
    assert caught.value.key == "data.train_split"
    assert "\n" not in str(caught.value)


COPIES = [
    *("@eaDir/1.png", ".ipynb_checkpoints/1.png", "__MACOSX/a/._1.png", "._2.png", ".hidden/x/3.png"),  # no classes
    *("a/@eaDir/1.png", "a/.ipynb_checkpoints/1-checkpoint.png", "a/._1.png", "b/__MACOSX/1.png", "b/x/.y/1.png"),
    *("@Recycle/a/1.png", "@Recently-Snapshot/2/a/1.png", "a/#snapshot/1.png", "System Volume Information/1.png"),
]


def test_hidden_files_and_those_of_operating_systems_are_no_data(open_paths):
    """They hold copies of images: thumbnails, checkpoints of notebooks, metadata of macOS."""
    paths = ["a/1.png", "a/@eaDirs/2.png", "b/x/3.png", "b/x.y/4.png"]
    images = open_paths([*paths, *COPIES])
    assert classes_of(images) == ["a", "b"]
    assert {images.filename(i) for i in range(len(images))} == {*paths}
    assert re.fullmatch(r"ignored files: \d+ hidden or of the system \('.*'\)", describe_files(images.reader.ignored))


def test_the_identity_of_data_without_hidden_files_is_what_it_was(tmp_path):
    """SHA-256 of "LABEL PATH" of every image, with a null character behind each."""
    write_folder(tmp_path, ["a/1.png", "b/c.d/2.png"])
    expected = hashlib.sha256(b"0 a/1.png\x001 b/c.d/2.png\x00").hexdigest()
    assert identify_split("train", split_of(tmp_path))["train_files"] == expected
    write_folder(tmp_path, COPIES)
    assert identify_split("train", split_of(tmp_path))["train_files"] == expected


def test_the_order_is_timms(tmp_path):
    """On folders that hold only images, classes and images have timm's order."""
    paths = [
        f"{name}/{name}_{i}.{end}" for name in ("n2", "n10", "N1", "m") for i in (9, 10, 1) for end in ("JPEG", "png")
    ]
    write_folder(tmp_path, paths)
    theirs = ReaderImageFolder(str(tmp_path / "train"))
    ours = open_class_folders(str(tmp_path / "train"))
    assert ours.class_to_idx == theirs.class_to_idx
    assert [(str(tmp_path / "train" / path), label) for path, label in ours.samples] == theirs.samples


def test_names_of_equal_order_are_ordered_too():
    """timm's natural order has "01" equal to "1", so that their order would differ between processes."""
    paths = [f"{name}/{i}.png" for name in ("1", "01", "001", "a", "A") for i in ("7", "07")]
    layouts = [classify(order) for order in (paths, paths[::-1], paths[5:] + paths[:5])]
    first, *others = [(list(layout.samples), layout.class_to_idx) for layout in layouts]
    assert others == [first, first]
    assert list(first[1]) == ["001", "01", "1", "A", "a"]


@pytest.mark.parametrize(("link", "target"), [("a/again", "."), ("a/below/all", "../.."), ("c", "a"), ("a/b", "../b")])
def test_no_folder_counts_twice(tmp_path, link, target):
    """A loop of links, or one folder under two names."""
    write_folder(tmp_path, ["a/1.png", "a/below/2.png", "b/3.png"])
    (tmp_path / "train" / link).symlink_to(target)
    assert_split_refused("are one folder; remove the link$", root=str(tmp_path))


def test_links_to_folders_and_files_elsewhere_are_followed(tmp_path):
    write_folder(tmp_path, ["1.png", "2.png"], "store")
    write_folder(tmp_path, ["a/3.png"])
    (tmp_path / "train" / "b").symlink_to(tmp_path / "store")
    (tmp_path / "train" / "a" / "4.png").symlink_to(tmp_path / "store" / "1.png")
    names = [name for name, _ in split_of(tmp_path).reader.samples]
    assert names == ["a/3.png", "a/4.png", "b/1.png", "b/2.png"]


def test_an_empty_class_folder_is_refused(tmp_path):
    write_folder(tmp_path, ["a/1.png", "b/2.png"])
    (tmp_path / "train" / "a" / "empty").mkdir()
    assert describe_files(split_of(tmp_path).reader.ignored) == ""
    (tmp_path / "train" / "c").mkdir()
    assert_split_refused("the class folder 'c' holds no image; remove it", root=str(tmp_path))


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    def scandir(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    real = os.scandir
    write_folder(tmp_path, ["a/1.png", "b/2.png"])
    monkeypatch.setattr(os, "scandir", scandir)
    assert_split_refused("Permission denied", root=str(tmp_path))


def test_suffixes_are_those_of_the_formats_that_are_decoded():
    known = {suffix for suffix, name in Image.registered_extensions().items() if name in (*FORMATS, "MPO")}
    assert set(SUFFIXES) == known - {".pfm"}  # floating-point levels, which are refused
    assert ".webp" in SUFFIXES
    layout = classify(f"a/{number}{suffix}" for number, suffix in enumerate(map(str.upper, SUFFIXES)))
    assert len(layout.samples) == len(SUFFIXES)


def test_many_ignored_suffixes_are_one_line(tmp_path):
    write_folder(tmp_path, ["a/1.png", "a/x", "a/y", "a/\x1b[0m", *(f"a/{i}.s{i}" for i in range(20))])
    text = describe_files(split_of(tmp_path).reader.ignored)
    assert text.startswith("ignored files: 3 without suffix ('a/\\x1b[0m'), 1 *.s0 ('a/0.s0'), ")
    assert text.endswith("1 *.s8 ('a/8.s8'), ...")


def test_the_order_is_timms_for_any_names():
    """Sorting folder by folder equals sorting whole paths at once."""
    rng = random.Random(0)
    kinds = ["n0144_{}.JPEG", "{}", "IMG-{}", "0{}", "A{}", "a{}", "a{}b", "٣{}", "a-{}", "deep/{}", "deep/a{}/1"]
    for _ in range(40):
        folders, files = rng.sample(kinds, rng.randint(1, 4)), rng.sample(kinds, rng.randint(1, 3))
        names = {
            f"{rng.choice(folders).format(rng.randint(0, 12))}/{rng.choice(files).format(rng.randint(0, 120))}.png"
            for _ in range(60)
        }
        shuffled = rng.sample(sorted(names), len(names))
        assert [path for path, _ in classify(shuffled).samples] == sorted(sorted(names), key=natural_key)


def test_a_listing_is_no_larger_than_its_text():
    """A loader worker copies a page of memory for each Python object that it touches: a listing has none."""
    num_classes, per_class = 10, 200
    paths = [f"n{c:08d}/n{c:08d}_{i}.JPEG" for c in range(num_classes) for i in range(per_class)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        layout = classify(paths)
        size = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(layout.samples) == num_classes * per_class
    assert size < sum(map(len, paths)) + 16 * len(paths) + 10_000
    assert layout.samples[-1] == (paths[-1], num_classes - 1)
    with pytest.raises(IndexError):
        layout.samples[len(paths)]
