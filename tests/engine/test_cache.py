"""Scanning a data set and preparing it: exact counts, the same input to the model, and damage that is noticed."""

import os
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from attention.options import OptionError
from engine.config.schema import Augment, Data, Run, Train
from engine.data import prepare, verify
from engine.data.loaders import count_broken, create_loaders, create_val_loader
from engine.runtime.distributed import World, seed_everything

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


def make_run(dataset: str, root, **augment) -> Run:
    data = Data(dataset=dataset, root=str(root), workers=0)
    return Run(model={}, attention="softmax", data=data, augment=Augment(**augment), train=Train(total_batch_size=8))


def read_training(dataset: str, root) -> tuple[torch.Tensor, torch.Tensor]:
    """All augmented batches of an epoch."""
    loader = create_loaders(make_run(dataset, root), CPU, img_size=14, num_classes=2)[0]
    seed_everything(0)
    ((images, labels),) = loader
    return images, labels


def read_validation(dataset: str, root) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    loader = create_val_loader(make_run(dataset, root), CPU, img_size=14, num_classes=2, batch_size=8, skip_broken=True)
    ((images, labels),) = loader
    assert count_broken(loader, 1, CPU) == 1
    return images, labels, loader.broken


def test_validation_is_the_same_to_the_last_bit(root, prepared):
    (images, labels, (broken,)), (cached, cached_labels, (cached_broken,)) = (
        read_validation("folder", root),
        read_validation("cache", prepared[1]),
    )
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
    with pytest.raises(OptionError, match=problem) as caught:
        create_loaders(make_run("cache", tmp_path), CPU, img_size=14, num_classes=2)
    assert caught.value.key == "data.train_split"


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
    assert "val" in output.err  # the progress bar


def test_scan_of_a_whole_split(root):
    with pytest.raises(SystemExit) as ended:
        verify.main([str(root), "--splits", "train", "--workers", "0"])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("main", "arguments", "problem"),
    [
        (verify.main, ["{root}/nowhere"], "data.root: no directory"),
        (verify.main, ["{root}", "--splits", "test"], "no 'test' in"),
        (prepare.main, ["{root}/nowhere", "{out}/new"], "data.root: no directory"),
        (prepare.main, ["{root}", "{out}"], "train.npz: is there already; remove it"),
        (prepare.main, ["{root}", "/dev/null/new"], "/dev/null/new: Not a directory"),
    ],
)
def test_bad_input_is_one_line(root, prepared, capsys, main, arguments, problem):
    with pytest.raises(SystemExit) as ended:
        main([argument.format(root=root, out=prepared[1]) for argument in arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_an_interrupted_preparation_leaves_nothing(root, tmp_path, monkeypatch):
    def full(image, short_side):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "encode", full)
    with pytest.raises(SystemExit):
        prepare.main([str(root), str(tmp_path), "--workers", "0"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_was_not_checked_is_not_kept(root, tmp_path, monkeypatch, capsys, number):
    before = signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGINT

    def interrupt(*arguments):
        assert [file.name for file in sorted(tmp_path.iterdir())] == ["train.unchecked.npz", "train.unchecked.pixels"]
        signal.raise_signal(number)

    monkeypatch.setattr(prepare, "check", interrupt)
    with pytest.raises(SystemExit, match=str(128 + number)):
        prepare.main([str(root), str(tmp_path), "--workers", "0"])
    signal.signal(number, before)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_what_is_not_read_back_is_not_kept(root, tmp_path, monkeypatch, capsys):
    def lose(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".pixels"):
            os.pwrite(descriptor, b"lost", 100)
        fsync(descriptor)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(SystemExit) as ended:
        prepare.main([str(root), str(tmp_path), "--splits", "train", "--workers", "0"])
    assert ended.value.code == 2
    assert "1 images were not read back as they were written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_broken_names_are_printed(root, tmp_path, capsys):
    prepare.main([str(root), str(tmp_path), "--splits", "val", "--workers", "0", "--short-side", "0"])
    output = capsys.readouterr()
    assert output.out == "val: 6 images, 0.000 GB, 1 broken\n"
    assert "broken: b/2.png: not an image" in output.err
    assert output.err.splitlines()[-1] == "val: ignored files: 1 *.heic ('a/3.heic')"
