"""Scanning a data set and preparing it: exact counts, the same input to the model, and damage that is noticed."""

import errno
import io
import itertools
import os
import re
import shutil
import signal
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image

from engine.config.schema import Augment, Data, Run, Train
from engine.data import cache, prepare, verify
from engine.data.identity import identify_data
from engine.data.loaders import count_broken, create_loaders, create_val_loader
from engine.data.splits import classes_of, open_split
from engine.runtime.distributed import World, seed_everything
from tests.engine.test_checkpoint import FailAt
from tests.support.partition import chosen
from tests.support.refusals import assert_split_refused, refusal

CPU = World(torch.device("cpu"))
BROKEN = "val/b/2.png"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Noise in two classes: 8 training and 6 validation images, one of them broken, and a file that is no image."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 3)):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (20, 31 + i, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    (root / BROKEN).write_bytes(b"broken")
    (root / "val" / "a" / "3.heic").write_bytes(b"")
    return root


@pytest.fixture(scope="module", params=["0", "16"])
def prepared(root, tmp_path_factory, request):
    """Short side in pixels (0: unchanged), and the data set prepared with it."""
    output = tmp_path_factory.mktemp("prepared") / "below"
    prepare.main([str(root), str(output), "--short-side", request.param, "--workers", "0"])
    return int(request.param), output


def test_copies_of_training_images_are_counted(root, tmp_path, capsys):
    """Two files of the validation have the bytes of a training image; a third has its pixels, in another file."""
    shutil.copytree(root, tmp_path / "data")
    folder, content = tmp_path / "data/val/a", (root / "train/b/1.png").read_bytes()
    for name in ("copy.png", "again.png"):
        (folder / name).write_bytes(content)
    with Image.open(root / "train/b/2.png") as image:
        image.save(folder / "pixels.bmp")
    with pytest.raises(SystemExit):  # an image is broken
        verify.main([str(tmp_path / "data"), "--workers", "0"])
    line = "warning: val: 2 of 8 images are exact copies of images of train"
    assert capsys.readouterr().out.splitlines().count(line) == 1


def make_run(dataset: str, root, **augment) -> Run:
    data = Data(dataset=dataset, root=str(root), workers=0, broken_val="skip")
    return Run(model={}, attention="softmax", data=data, augment=Augment(**augment), train=Train(total_batch_size=8))


def read_training(dataset: str, root) -> tuple[torch.Tensor, torch.Tensor]:
    """All augmented batches of an epoch."""
    loader = create_loaders(make_run(dataset, root), CPU, img_size=14, num_classes=2)[0]
    seed_everything(0)
    ((images, labels),) = loader
    return images, labels


def read_validation(dataset: str, root) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    loader = create_val_loader(make_run(dataset, root), CPU, img_size=14, batch_size=8)
    ((images, labels),) = loader
    assert count_broken(loader, CPU) == 1
    return images, labels, loader.broken


def test_validation_is_the_same_to_the_last_bit(root, prepared):
    images, labels, (broken,) = read_validation("folder", root)
    cached, cached_labels, (cached_broken,) = read_validation("cache", prepared[1])
    assert torch.equal(images, cached)
    assert labels.tolist() == cached_labels.tolist() == [0, 0, 0, 1, 1]
    assert broken.startswith("b/2.png: not an image")
    assert cached_broken == "b/2.png: was broken when the cache was made"


def test_training_is_the_same_at_full_size(root, prepared):
    images, labels = read_training("folder", root)
    cached, cached_labels = read_training("cache", prepared[1])
    assert labels.tolist() == cached_labels.tolist()
    assert torch.equal(images, cached) == (prepared[0] == 0)


def test_sizes(prepared):
    short_side, output = prepared
    reader = create_loaders(make_run("cache", output), CPU, img_size=14, num_classes=2)[0].dataset.dataset.reader
    heights, widths = zip(*(Image.open(reader[i][0]).size[::-1] for i in range(8)), strict=True)
    assert set(heights) == {short_side or 20}
    assert widths[:4] == ((31, 32, 33, 34) if not short_side else (24, 25, 26, 27))


def test_a_run_that_enlarges_prepared_images_says_so(prepared, capsys):
    """Validation at 14 pixels resizes to 14 / 0.875 = 16."""
    short_side, output = prepared

    def told(root, img_size: int) -> list[str]:
        create_loaders(make_run("cache", root), CPU, img_size=img_size, num_classes=2)
        return [line for line in capsys.readouterr().err.splitlines() if "short side" in line]

    lines = [
        f"warning: data.{split}_split: the images were prepared with a short side of 16 pixels, and are enlarged to"
        f" {side}; prepare them with --short-side {side}, or 0, which keeps their size"
        for split, side in (("train", 17), ("val", 19))
    ]
    assert told(output, 14) == []
    assert told(output, 17) == (lines if short_side else [])


@pytest.mark.parametrize("options", ["--short-side 0", "--short-side 20"])
def test_images_that_are_prepared_again_keep_their_short_side(prepared, tmp_path, options):
    prepare.main([str(prepared[1]), str(tmp_path), "--dataset", "cache", "--workers", "0", *options.split()])
    data = Data(dataset="cache", root=str(tmp_path), subset=1)
    assert open_split(data, "train_split").reader.short_side == (prepared[0] or (20 if " 20" in options else 0))


def test_damage_is_noticed(prepared, tmp_path, capsys):
    for path in prepared[1].iterdir():
        shutil.copy(path, tmp_path)
    content = bytearray((tmp_path / "train.pixels").read_bytes())
    content[5000] ^= 1
    (tmp_path / "train.pixels").write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        verify.main([str(tmp_path), "--dataset", "cache", "--workers", "0"])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 8 images of 2 classes, 1 broken"
    assert lines[1].endswith(": damaged in train.pixels: the checksum differs; prepare the cache anew")
    assert lines[2:] == ["val: 6 images of 2 classes, 1 broken", "  b/2.png: was broken when the cache was made"]
    loader = create_loaders(make_run("cache", tmp_path), CPU, img_size=14, num_classes=2)[0]
    ((images, _),) = loader
    assert (len(images), len(loader.broken)) == (7, 1)


def identify(dataset: str, root, **options) -> dict:
    data = Data(dataset=dataset, root=str(root), **options)
    return identify_data(open_split(data, "train_split"), open_split(data, "val_split"))


def identify_train(root) -> bytes:
    """Names and content of a prepared training split."""
    return open_split(Data(dataset="cache", root=str(root)), "train_split").reader.fingerprints().tobytes()


def test_folder_and_cache_of_one_data_set_have_one_identity(root, prepared, tmp_path):
    """A broken image too; images that were made smaller are others."""
    (tmp_path / "classes.txt").write_text("b\na\n")
    for options in ({}, {"subset": 2}, {"classes": str(tmp_path / "classes.txt")}):
        found, expected = identify("cache", prepared[1], **options), identify("folder", root, **options)
        different = {name for name in expected if found[name] != expected[name]}
        assert different == (set() if prepared[0] == 0 else {"train_content", "val_content"})


def test_a_broken_image_keeps_its_class(prepared, tmp_path):
    """Options that choose images by class find it."""
    (tmp_path / "classes.txt").write_text("b\n")
    data = {"dataset": "cache", "root": str(prepared[1]), "train_split": "val"}
    assert open_split(Data(**data, subset=1), "train_split").reader.labels.tolist() == [0, 1]
    only = open_split(Data(**data, classes=str(tmp_path / "classes.txt")), "train_split")
    assert (classes_of(only), only.reader.labels.tolist()) == (["b"], [0, 0, 0])


def bomb(path, arrays) -> None:
    """An index that unpacks to a thousand times its size."""
    np.savez_compressed(path, **(arrays | {"labels": np.zeros(10**6, np.int32)}))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"labels": [0, 0, 0, 0, 1, 1, 1, 2]}, "labels: 2 is none of 2 classes"),
        ({"labels": [0, 0, 0, 0, 1, 1, 1, -1]}, "labels: -1 is none of 2 classes"),
        ({"labels": [0.5] * 8}, "labels: float64 of shape"),
        ({"labels": [[0, 0, 0, 0, 1, 1, 1, 1]]}, "int64 of shape"),
        ({"labels": [0, 0, 0, 0, 1, 1, 1]}, "begins: int64 of shape"),
        ({"labels": 1}, "TypeError"),
        ({"checksums": np.zeros(3, np.uint32)}, "checksums: uint32 of shape"),
        ({"checksums": ["a"] * 8}, "ValueError"),
        ({"fingerprints": [1.0] * 8}, "fingerprints: float64"),
        ({"names": [b"a"]}, "names: "),
        ({"classes": [b"a", b"a"]}, "classes: names that are equal"),
        ({"classes": [{}, {}]}, "Object arrays cannot be loaded"),
        ({"begins": [0, 2**62, *[2**62] * 7]}, "begins: no offsets in order"),
        ({"begins": [0, 2**63 - 1, -(2**63), *[0] * 6]}, "begins: no offsets in order"),
        ({"begins": [5, *[10] * 8]}, "begins: no offsets in order"),
        ({"begins": [0, *[2**20] * 8]}, "train.pixels is missing or has not the 1048576 bytes"),
        (bomb, "its arrays are compressed"),
    ],
)
def test_a_tampered_index_is_refused_in_a_line(prepared, tmp_path, change, problem):
    shutil.copy(prepared[1] / "train.pixels", tmp_path)
    with np.load(prepared[1] / "train.npz") as index:
        arrays = dict(index)
    if callable(change):
        change(tmp_path / "train.npz", arrays)
    else:
        np.savez(tmp_path / "train.npz", **(arrays | {name: np.array(value) for name, value in change.items()}))
    assert_split_refused(problem, dataset="cache", root=str(tmp_path))


def test_an_image_without_end_is_refused(prepared, tmp_path):
    """A sparse file of pixels takes no space on a disk, and all of the memory."""
    with np.load(prepared[1] / "train.npz") as index:
        arrays = dict(index)
    np.savez(tmp_path / "train.npz", **(arrays | {"begins": np.array([0] + [2**40] * 8)}))
    with (tmp_path / "train.pixels").open("wb") as file:
        file.truncate(2**40)
    assert_split_refused(f"at most {cache.MOST_BYTES:,} bytes", dataset="cache", root=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("train.pixels", lambda content: content[:-1], "train.pixels is missing or has not the"),
        ("train.npz", lambda content: content[:-40], "damaged index"),
        ("train.npz", lambda content: b"", "damaged index"),
    ],
)
def test_a_damaged_cache_is_refused(prepared, tmp_path, name, change, problem):
    for path in prepared[1].iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    assert_split_refused(problem, dataset="cache", root=str(tmp_path))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_scan(root, capsys, workers):
    with pytest.raises(SystemExit) as ended:
        verify.main([str(root), "--workers", workers])
    assert ended.value.code == 1
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "train: 8 images of 2 classes, 0 broken",
        "val: 6 images of 2 classes, 1 broken",
        "  b/2.png: not an image, or not one of JPEG, PNG, PPM, GIF, BMP, WEBP, TIFF",
        "  ignored files: 1 *.heic ('a/3.heic')",
    ]


@pytest.mark.parametrize(
    ("main", "arguments", "problem"),
    [
        (verify.main, ["{root}/nowhere"], "data.root: no directory"),
        (verify.main, ["{root}", "--splits", "test"], "--splits: no 'test' in"),
        (verify.main, ["{root}/val/a"], "found there: 3 images in no folder, such as '0.png'"),
        (prepare.main, ["{root}/nowhere", "{out}/new"], "data.root: no directory"),
        (prepare.main, ["{root}", "{out}"], "train.npz: is there already; remove it"),
        (prepare.main, ["{root}", "{out}", "--splits", "x", "val"], "val.npz: is there already; remove it"),
        (prepare.main, ["{root}", "/dev/null/new"], "/dev/null/new: Not a directory"),
    ],
)
def test_bad_input_is_one_line(root, prepared, capsys, main, arguments, problem):
    error = refusal(main, [argument.format(root=root, out=prepared[1]) for argument in arguments], capsys)
    assert problem in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_was_interrupted_is_not_kept(root, tmp_path, monkeypatch, capsys, number):
    before = signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGINT

    def interrupt(*arguments):
        assert [file.name for file in tmp_path.iterdir()] == ["train.pixels"]
        signal.raise_signal(number)

    monkeypatch.setattr(cache, "write_atomically", interrupt)
    with pytest.raises(SystemExit, match=str(128 + number)):
        prepare.main([str(root), str(tmp_path), "--workers", "0"])
    signal.signal(number, before)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.parametrize("where", chosen(["os.fsync", "os.replace", "io.open"], lambda where: where == "os.replace"))
def test_a_split_is_whole_or_absent_whichever_call_fails(root, tmp_path, monkeypatch, capsys, where):
    """Every call of the system fails once; the same command then prepares the split."""
    module, attribute = {"os": os, "io": io}[where[:2]], where[3:]
    command = ["--splits", "train", "--workers", "0"]
    for call in itertools.count(1):
        output = tmp_path / str(call)
        failing = FailAt(call, getattr(module, attribute), errno.EIO)
        with monkeypatch.context() as patch:
            patch.setattr(module, attribute, failing)
            with suppress(SystemExit):
                prepare.main([str(root), str(output), *command])
        error = capsys.readouterr().err
        if failing.num_calls < call:
            break
        assert re.search(r"^error: .*Input/output error$", error, re.MULTILINE)
        if not (output / "train.npz").exists():  # the last flush, of the directory, can fail after the rename
            prepare.main([str(root), str(output), *command])
        assert {file.name for file in output.iterdir()} == {"train.npz", "train.pixels"}
        assert identify_train(output) == identify_train(tmp_path / "1")
    assert call > 1
