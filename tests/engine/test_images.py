"""Image files of every kind are shown as a viewer shows them or refused; broken ones are skipped and counted."""

import errno
import io
import os
import re

import numpy as np
import pytest
import torch
from PIL import Image

from engine.config.schema import Augment, Data, Run, Train
from engine.data import verify
from engine.data.images import BrokenImage, DataError, decode
from engine.data.loaders import check_broken, count_broken, create_loaders, create_val_loader
from engine.data.splits import classes_of, open_split
from engine.runtime.distributed import World, seed_everything
from tests.support.image_files import IMAGE_FILES, WHITE
from tests.support.refusals import refusal

SHOWN = [name for name, file in IMAGE_FILES.items() if not isinstance(file.shown, str)]
REFUSED = [name for name in IMAGE_FILES if name not in SHOWN]

PIPE = "a pipe or device"
SPECIAL = {"pipe.jpg": PIPE, "device.jpg": PIPE, "nowhere.jpg": "No such file", "linked.jpg": None}
"""Special files -> reason of their refusal; the last is a link to a whole image."""

WHOLE = {*SHOWN, "linked.jpg"}
BROKEN = {*REFUSED, *SPECIAL} - WHOLE
NUM = len(WHOLE) + len(BROKEN)
CPU = World(torch.device("cpu"))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", SHOWN)
def test_shown(name, mode):
    """In grey, grey levels are kept, and colours become their luma."""
    image = decode(io.BytesIO(IMAGE_FILES[name].content), mode)
    assert (image.mode, image.size) == (mode, (16, 8))
    pixels = np.asarray(image).astype(int)
    expected = np.array(IMAGE_FILES[name].shown).reshape(2, 2, 3)
    expected = expected if mode == "RGB" else expected @ [0.299, 0.587, 0.114]
    exact = mode == "L" and (expected == np.round(expected)).all() and not name.endswith("jpg")
    tolerance = 8 if name.endswith("jpg") else 1  # what JPEG loses; rounding of alpha
    assert np.abs(pixels[2:8:4, 4:16:8] - expected).max() <= (1e-9 if exact else tolerance)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_refused(name, mode):
    with pytest.raises(BrokenImage, match=IMAGE_FILES[name].shown) as caught:
        decode(io.BytesIO(IMAGE_FILES[name].content), mode)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("kind", ["TIFF", "PNG", "PPM"])
def test_16_bits_have_the_range_of_their_format(kind):
    every, file = np.arange(65536), io.BytesIO()
    Image.fromarray(every[None].astype(np.uint16)).save(file, kind)
    assert np.asarray(decode(file, "L")).ravel().tolist() == ((every + 128) // 257).tolist()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Directory whose training and validation splits hold all image files, each in its own class, and special files."""
    root = tmp_path_factory.mktemp("image_files")
    for split in ("train", "val"):
        for name, file in IMAGE_FILES.items():
            (root / split / name).mkdir(parents=True)
            (root / split / name / name).write_bytes(file.content)
        for name in SPECIAL:
            (root / split / name).mkdir()
        os.mkfifo(root / split / "pipe.jpg" / "pipe.jpg")
        (root / split / "device.jpg" / "device.jpg").symlink_to("/dev/zero")
        (root / split / "nowhere.jpg" / "nowhere.jpg").symlink_to(root / "nowhere")
        (root / split / "linked.jpg" / "linked.jpg").symlink_to(root / split / "rgb.jpg" / "rgb.jpg")
        (root / split / "rgb.png" / "notes.txt").write_text("no image")
    return root


def make_run(root, max_broken: int, workers: int = 0, batch_size: int = 4, **augment) -> Run:
    data, train = Data(root=str(root), workers=workers, max_broken=max_broken), Train(total_batch_size=batch_size)
    return Run(model={}, attention="softmax", data=data, augment=Augment(**augment), train=train)


def names_of(images, batches) -> list[str]:
    """The files in batches: every file is a class."""
    classes = classes_of(images)
    return [classes[label] for _, labels in batches for label in labels]


# Python 3.12 warns of fork, Linux's way to start workers there, where the operating system counts torch's idle threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("size", "workers"), [(1, 0), (1, 2), (2, 0)])
def test_training_skips_and_counts(root, capsys, size, workers):
    """Every rank has the order without the broken images, in as many batches as with them."""
    batch_size = 18 * size
    epoch, seen, reported = NUM // batch_size * batch_size, [], set()
    for rank in range(size):
        run, world = make_run(root, NUM, workers, batch_size), World(CPU.device, rank, size)
        loader, _, augment = create_loaders(run, world, img_size=16, num_classes=NUM)
        classes = classes_of(loader.dataset.dataset)
        order = [classes[index] for index, _, _ in loader.sampler]  # a class and its file have the same number
        seed_everything(0)
        batches = [(images, labels.clone()) for images, labels in loader]
        assert len(batches) == len(loader) == epoch // batch_size
        assert [len(labels) for _, labels in batches] == [
            sum(name in WHOLE for name in order[i : i + 18]) for i in range(0, len(order), 18)
        ]
        assert names_of(loader.dataset.dataset, batches) == [name for name in order if name in WHOLE]
        assert [line.split("/")[0] for line in loader.broken] == [name for name in order if name in BROKEN]
        assert count_broken(loader, CPU) == len(loader.broken)
        for images, labels in batches:
            mixed, targets = augment(images, labels)
            assert len(mixed) == len(targets)
        seen += order
        told = capsys.readouterr().err.splitlines()
        reported |= {line[9:].split("/")[0] for line in told if line.startswith("skipped: ")}
        ignored = [f"data.{split}_split: ignored files: 1 *.txt ('rgb.png/notes.txt')" for split in ("train", "val")]
        assert [line for line in told if not line.startswith("skipped: ")] == (ignored if rank == 0 else [])
    assert len(seen) == len(set(seen)) == epoch
    assert reported == BROKEN & set(seen)


def test_training_stops_above_the_limit(root):
    loader = create_loaders(make_run(root, NUM, 0, NUM), CPU, img_size=16, num_classes=NUM)[0]
    (batch,) = loader
    assert (len(batch[1]), len(loader.broken)) == (len(WHOLE), len(BROKEN))
    assert count_broken(loader, CPU) == len(BROKEN)
    with pytest.raises(BrokenImage, match=rf"^{len(BROKEN)} images of this epoch are broken, more than"):
        check_broken(count_broken(loader, CPU), len(BROKEN) - 1)
    for max_broken in (0, len(BROKEN) - 1):
        loader = create_loaders(make_run(root, max_broken, 0, NUM), CPU, img_size=16, num_classes=NUM)[0]
        with pytest.raises(BrokenImage, match=rf"data.max_broken = {max_broken} of an epoch"):
            list(loader)


def test_training_stops_at_a_batch_of_nothing(root):
    loader = create_loaders(make_run(root, NUM, 0, 1), CPU, img_size=16, num_classes=NUM)[0]
    with pytest.raises(BrokenImage, match="too many broken images"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_validation_refuses(root, workers):
    loader = create_loaders(make_run(root, NUM, workers), CPU, img_size=16, num_classes=NUM)[1]
    with pytest.raises(BrokenImage, match=r"^16_bit_clear\.png/.*: .*refused in validation.*data.broken_val=skip"):
        list(loader)


@pytest.mark.parametrize(("size", "batch_size"), [(1, 1), (1, 7), (1, 64), (3, 7)])
def test_validation_leaves_out_on_demand(root, size, batch_size, figure):
    whole, broken = [], []
    for rank in range(size):
        run = Run(model={}, attention="softmax", data=Data(root=str(root), workers=0, broken_val="skip"))
        loader = create_val_loader(run, World(CPU.device, rank, size), img_size=16, batch_size=batch_size)
        for _ in range(2):  # plain weights and averaged ones
            names = names_of(loader.dataset, loader)
            assert len(names) + count_broken(loader, CPU) == len(range(rank, NUM, size))
        whole += names
        broken += loader.broken
    assert sorted(whole) == sorted(WHOLE)
    reasons = {name: IMAGE_FILES[name].shown for name in REFUSED} | SPECIAL
    assert sorted(line.split("/")[0] for line in broken) == sorted(BROKEN)
    for line in broken:
        name, _, reason = line.partition("/")
        assert re.search(reasons[name], reason), line
    figure("I1", f"{NUM} files on {size} ranks: {len(whole)} shown, {len(broken)} refused, each by name and reason")


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_white_lies_under_what_is_clear(mode):
    image = Image.new(mode, (3, 2)).convert("RGBA" if mode == "RGB" else "LA")
    image.putalpha(0)
    file = io.BytesIO()
    image.save(file, "PNG")
    assert decode(file).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["open", "read"])
def test_an_error_of_this_machine_is_no_broken_image(tmp_path, monkeypatch, capsys, number, call):
    """In a folder; it ends the commands with a line, too."""
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / name / "1.png")
    images = open_split(Data(root=str(tmp_path)), "train_split")

    class Failing(io.BytesIO):
        def read(self, *args):
            raise OSError(number, os.strerror(number))

    def fail(path):
        if call == "read":
            return Failing()
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("engine.data.folders.open_regular", fail)
    with pytest.raises(DataError, match=f"{os.strerror(number)}: an error of this machine"):
        images[0]
    error = refusal(verify.main, [tmp_path, "--splits", "train", "--workers", "0"], capsys)
    assert error.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in error
