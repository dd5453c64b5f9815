"""Other libraries' formats: the same images and labels as from class folders, in the same order, resumed to the bit."""

import gzip
import io
import os
import pickle
import random
import re
import tarfile
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from engine.config.schema import Augment, Data, Run, Train
from engine.data import idx, prepare, verify
from engine.data.identity import identify_split
from engine.data.images import BrokenImage
from engine.data.loaders import create_loaders
from engine.data.splits import classes_of, open_split, report_split
from engine.runtime.distributed import World
from tests.engine.test_resume import Runs, choose_kill
from tests.support.launcher import ForkServer
from tests.support.refusals import assert_split_refused

CLASSES = ["0", "1", "2", "3"]
LABELS = np.repeat(range(4), 50)
PIXELS = np.random.default_rng(0).integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_shard(path, samples) -> None:
    """A tar file of `samples`, each a mapping of member -> content."""
    with tarfile.open(path, "w") as tar:
        for name, content in ((name, content) for sample in samples for name, content in sample.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def sample(index: int) -> dict[str, bytes]:
    return {
        f"{index:05d}.png": png(PIXELS[index]),
        f"{index:05d}.cls": b"%d\n" % LABELS[index],
        f"{index:05d}.json": b"{}",
    }


def write_folder(root) -> None:
    for index, label in enumerate(LABELS):
        (root / "train" / str(label)).mkdir(parents=True, exist_ok=True)
        (root / "train" / str(label) / f"{index}.png").write_bytes(png(PIXELS[index]))


def write_wds(root) -> None:
    for shard in range(11):  # the tenth comes after the second
        write_shard(root / f"train-{shard}.tar", map(sample, range(200)[shard * 19 :][:19]))


def write_csv(root) -> None:
    """Files of no telling place, in lines of no telling order."""
    rows = [f"images/{index}.png,{label}" for index, label in enumerate(LABELS)]
    (root / "images").mkdir()
    for index, pixels in enumerate(PIXELS):
        (root / "images" / f"{index}.png").write_bytes(png(pixels))
    random.Random(0).shuffle(rows)
    (root / "train.csv").write_text("\n".join(["file,label", *rows]))


def write_cifar10(root) -> None:
    (root / "cifar-10-batches-py").mkdir()
    for number in range(5):
        part = slice(number * 40, number * 40 + 40)
        data = PIXELS[part].transpose(0, 3, 1, 2).reshape(40, -1)
        entry = {"data": data, "labels": LABELS[part].tolist()}
        (root / "cifar-10-batches-py" / f"data_batch_{number + 1}").write_bytes(pickle.dumps(entry))
    (root / "cifar-10-batches-py" / "test_batch").touch()
    (root / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASSES}))


def write_mnist(root) -> None:
    (root / "MNIST" / "raw").mkdir(parents=True)
    for split in ("train", "t10k"):
        for ending, values in ((idx.IMAGES, PIXELS[..., 0]), (idx.LABELS, LABELS)):
            path = root / "MNIST" / "raw" / f"{split}{ending}"
            idx.write_idx(path, values)
            path.write_bytes(gzip.decompress(path.read_bytes()))


WRITERS = {"folder": write_folder, "csv": write_csv, "wds": write_wds, "torch/cifar10": write_cifar10}


@pytest.fixture(scope="module", params=["csv", "wds", "torch/cifar10"])
def other(request, tmp_path_factory):
    """Options of the same 200 images in another format."""
    root = tmp_path_factory.mktemp("other")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("train_list", "test_list"):  # without the digests of the published files
            patch.setattr(CIFAR10, name, [[file, None] for file, _ in getattr(CIFAR10, name)])
        patch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": None})
        WRITERS[request.param](root)
        yield {"dataset": request.param, "root": str(root)}


@pytest.mark.stress
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 0)])
@pytest.mark.parametrize(("dataset", "write", "classes"), [("wds", write_wds, 4), ("torch/mnist", write_mnist, 10)])
def test_a_killed_run_on_them_ends_in_the_same_bits(
    dataset, write, classes, ranks, workers, tmp_path, figure: Callable
):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    options = {"dataset": dataset, "root": tmp_path / "data", "val_split": "train", "workers": workers}
    overrides = [f"data.{name}={value}" for name, value in options.items()]
    overrides += [f"model.num_classes={classes}", "train.total_batch_size=32"]
    server, rng = ForkServer(), random.Random(f"{dataset} {ranks}")
    try:
        runs = Runs(server, tmp_path / "runs", overrides, ranks)
        for place in ("step", "step", "evaluation", "write"):
            assert -9 in runs.survives(choose_kill(rng, place))
        assert runs.survives(("train.seed_everything", 4, "SIGTERM")) == [75] * ranks
    finally:
        server.close()
    figure("R3", f"{dataset}: 4/4 kills and a stop on {ranks} rank(s), {workers} workers: same bits")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    write_folder(root)
    return {"dataset": "folder", "root": str(root)}


def read_epoch(options, start: int = 0) -> list[torch.Tensor]:
    """Augmented images, and labels, of an epoch from a position on."""
    run = Run(
        model={},
        attention="softmax",
        data=Data(**options, val_split="train", workers=0),
        augment=Augment(mixup=0.0, cutmix=0.0),
        train=Train(total_batch_size=40),
    )
    loader = create_loaders(run, World(torch.device("cpu")), img_size=16, num_classes=4)[0]
    loader.sampler.set_epoch(1, start)
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


def test_an_epoch_is_that_of_the_folders(folder, other):
    images = open_split(Data(**other), "train_split")
    assert classes_of(images) == CLASSES
    assert np.array_equal(np.stack([np.asarray(images[index][0]) for index in range(200)]), PIXELS)
    assert [images[index][1] for index in range(200)] == images.reader.labels.tolist() == LABELS.tolist()
    assert len({*images.reader.filenames()}) == 200
    expected, found, rest = read_epoch(folder), read_epoch(other), read_epoch(other, start=120)
    assert len(found[0]) == 200
    assert all(map(torch.equal, [*found, *rest], [*expected, *(part[120:] for part in expected)]))


def test_their_content_is_known(other):
    """Numbers that stand for the content of images: of the pixels in memory, of the files, or of their sizes."""
    reader = open_split(Data(**other), "train_split").reader
    files = []
    for index in range(200):
        with reader[index][0] as file:
            files.append(file.read())
    numbers = {zlib.crc32: [*map(zlib.crc32, files)], len: [*map(len, files)]}
    measure = len if other["dataset"] in ("csv", "wds") else zlib.crc32
    assert reader.fingerprints().tolist() == numbers[measure]


def test_they_are_verified_prepared_and_chosen_from(other, tmp_path, capsys):
    arguments = [other["root"], "--dataset", other["dataset"], "--splits", "train", "--workers", "0"]
    with pytest.raises(SystemExit) as ended:
        verify.main(arguments)
    assert ended.value.code == 0
    assert "train: 200 images of 4 classes, 0 broken" in capsys.readouterr().out
    prepare.main([*arguments, str(tmp_path), "--short-side", "0"])
    images = open_split(Data(dataset="cache", root=str(tmp_path)), "train_split")
    assert identify_split("train", images) == identify_split("train", open_split(Data(**other), "train_split"))
    assert np.array_equal(np.stack([np.asarray(images[index][0]) for index in range(200)]), PIXELS)
    assert np.bincount(open_split(Data(**other, subset=7), "train_split").reader.labels).tolist() == [7] * 4


def test_classes_without_an_image_are_named(tmp_path, capsys):
    write_shard(tmp_path / "train-0.tar", [sample(0), sample(150)])
    (tmp_path / "names").write_text("zero\none\ntwo\nthree\n")
    data = Data(dataset="wds", root=str(tmp_path), classes=str(tmp_path / "names"))
    report_split(data, "train_split", open_split(data, "train_split"), 16)
    assert "data.train_split: 2 of 4 classes have no image: one, two\n" in capsys.readouterr().err


def write_list(folder, text: str | bytes) -> dict[str, str]:
    """Options of a CSV file beside the images a.png and "b, c.png"."""
    (folder / "train.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    for name in ("a.png", "b, c.png"):
        (folder / name).write_bytes(png(PIXELS[0]))
    return {"dataset": "csv", "root": str(folder)}


@pytest.mark.parametrize(
    "text",
    [
        'file,label\na.png,dog\n"b, c.png",cat\n',
        '\ufefflabel, file\r\ndog ,./a.png\r\n\r\ncat,"b, c.png"',  # as spreadsheets may write it
    ],
)
def test_a_csv_file_labels_files(tmp_path, text):
    images = open_split(Data(**write_list(tmp_path, text)), "train_split")
    assert classes_of(images) == ["cat", "dog"]
    assert [*images.reader.filenames()] == ["b, c.png", "a.png"]
    assert [images[index][1] for index in range(2)] == [0, 1]
    (tmp_path / "a.png").unlink()
    (tmp_path / "a.png").mkdir()
    assert_split_refused("no file 'a.png' in", dataset="csv", root=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"the columns are missing; the first line must be file,label"),
        ("file;label\na.png;dog\n", r"the columns are 'file;label'; the first line must be file,label"),
        ("file,label,age\na.png,dog,3\n", r"the columns are 'file', 'label', 'age'; the first line must be file,label"),
        ("a.png,dog\n", r"the columns are 'a.png', 'dog'; the first line must be file,label, and no other columns"),
        ("file,label\n", r"lists no image; write a line for each"),
        ("file,label\na.png\n", r"line 2: 1 fields; expected file and label"),
        ("file,label\nb, c.png,dog\n", r"line 2: 3 fields; expected file and label, in quotes where they contain"),
        ("file,label\na.png,\n", r"line 2: no label; give one, or remove the line"),
        ("file,label\na.png,dog\n./a.png,cat\n", r"line 3: 'a.png' is in line 2 already; remove one of them"),
        ("file,label\nb/../../a.png,dog\n", r"line 2: '../a.png' is not below '.*'; link to it there"),
        ("file,label\n/a.png,dog\n", r"line 2: '/a.png' is not below '.*'; link to it there"),
        ("file,label\na.png,dog\nx.png,cat\ny.png,cat\n", r"line 3: no file 'x.png' in .* \(2 of 3 are missing\)"),
        ('file,label\n"a.png,dog\n', r"line 2: unexpected end of data"),
        (b"file,label\n\xff\n.png,dog\n", r"line 2: 1 fields"),
    ],
)
def test_a_csv_file_that_cannot_be_honoured_is_refused_with_the_line(tmp_path, text, problem):
    assert_split_refused(f"^data.train_split: '.*train.csv': {problem}", **write_list(tmp_path, text))


def open_wds(root):
    return open_split(Data(dataset="wds", root=str(root)), "train_split")


def assert_shards_refused(root, problem: str) -> None:
    assert_split_refused(problem, dataset="wds", root=str(root))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"00003.cls": None}, "sample '00003' of 'train-0' has no .cls, the number of its class"),
        ({"00003.cls": b"cat"}, r"sample '00003' of 'train-0': its .cls holds b'cat', no number of a class"),
        ({"00003.cls": b"1" * 19}, "holds b'111111111111111111', no number of a class"),
        ({"00003.jpg": b""}, "sample '00003' of 'train-0' has 2 images: png, jpg"),
    ],
)
def test_a_shard_without_labels_is_refused(tmp_path, change, problem):
    samples = [sample(index) for index in range(5)]
    samples[3] = {name: content for name, content in (samples[3] | change).items() if content is not None}
    write_shard(tmp_path / "train-0.tar", samples)
    assert_shards_refused(tmp_path, problem)


def test_a_sample_that_comes_twice_is_refused(tmp_path):
    """The later sample would replace the first."""
    write_shard(tmp_path / "train-0.tar", [sample(1), sample(2), sample(1)])
    assert_shards_refused(tmp_path, "'train-0.tar' holds '00001.png' twice; names of samples must differ")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "a pipe or device, not a regular file"),
        (os.mkdir, "a directory"),
        (lambda path: path.write_bytes(b""), "empty file"),
        (lambda path: path.write_bytes(gzip.compress(bytes(10240))), "(invalid|truncated) header"),
    ],
)
def test_a_shard_that_cannot_be_read_is_named(tmp_path, make, problem):
    write_shard(tmp_path / "train-0.tar", [sample(1)])
    make(tmp_path / "train-1.tar")
    assert_shards_refused(tmp_path, rf"is not a readable wds file \(train-1.tar: .*{problem}\)")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: 4 * 1024 + 100] + b"\x01" + content[4 * 1024 + 101 :],  # a header in the middle
        lambda content: content[: 4 * 1024],  # between two files
        lambda content: content[: 4 * 1024 + 300],  # within a header
        lambda content: content[: 4 * 1024 + 512 + 2],  # within a file
    ],
)
def test_a_damaged_shard_is_refused(tmp_path, damage):
    """tarfile would end its list there without an error."""
    path = tmp_path / "train-0.tar"
    write_shard(path, [{f"{i}.png": b"x", f"{i}.cls": b"1"} for i in range(3)])
    content = path.read_bytes()
    assert len(open_wds(tmp_path)) == 3
    assert content[4 * 1024 :].startswith(b"2.png\0")
    path.write_bytes(damage(content))
    assert_shards_refused(tmp_path, r"\(train-0.tar: (damaged, or cut off, at byte 4,096|unexpected end)")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_a_shard_are_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("1.png"))
        link = tarfile.TarInfo("2.png")
        link.type, link.linkname = kind, "1.png"
        tar.addfile(link)
    assert_shards_refused(tmp_path, "'2.png' is stored as a link, or sparse; make the file with `tar --dereference`")


def test_a_broken_image_of_a_shard_is_named_and_other_files_are_ignored(tmp_path):
    samples = [sample(index) for index in range(4)]
    samples[2]["00002.png"] = b"no image"
    write_shard(tmp_path / "train-0.tar", [*samples, {"notes.txt": b""}])
    images = open_wds(tmp_path)
    assert len(images) == 4
    assert images.reader.ignored == ["train-0/notes.txt"]
    assert isinstance(images[2], BrokenImage)
    assert str(images[2]).startswith("train-0/00002.png: not an image")
    (tmp_path / "train-0.tar").write_bytes((tmp_path / "train-0.tar").read_bytes()[:3000])
    assert_shards_refused(tmp_path, "is not a readable wds file")


def test_hidden_members_of_a_shard_are_no_samples(tmp_path):
    hidden = {"._00001.png": b"", "._00002.png": b"", "__MACOSX/00001.png": b"", "@eaDir/00001.png": b""}
    write_shard(tmp_path / "train-0.tar", [sample(1), sample(2), hidden, {"@eaDir/00001.cls": b"3"}])
    images = open_wds(tmp_path)
    assert [*images.reader.filenames()] == ["train-0/00001.png", "train-0/00002.png"]
    assert {*images.reader.ignored} == {f"train-0/{name}" for name in [*hidden, "@eaDir/00001.cls"]}


@pytest.mark.parametrize(
    ("ending", "content"), [(idx.IMAGES, b""), (idx.LABELS, b"\0\0\x08\x01" + (9).to_bytes(4, "big") + bytes(9))]
)
def test_damaged_files_of_torchvision_are_refused(tmp_path, ending, content):
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / f"train{ending}").write_bytes(content)
    assert_split_refused("not found, or damaged", dataset="torch/mnist", root=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        ({"dataset": "wds"}, "", "no 'train-*.tar' in"),
        ({"dataset": "torch/cifar10"}, "", "not found, or damaged; torchvision.datasets puts it"),
        ({"dataset": "torch/mnist"}, "", "not found, or damaged; torchvision.datasets puts it"),
        ({"dataset": "torch/mnist", "train_split": "test"}, "", "'test' is no split of torchvision's"),
        ({"dataset": "torch/mnist", "root": "no"}, "data.root", "no directory"),
        ({"dataset": "wds", "root": None}, "data.root", "required for data.dataset=wds"),
    ],
)
def test_what_is_missing_is_named(tmp_path, options, key, problem):
    folder = options.get("root", "")
    root = None if folder is None else str(tmp_path / folder)
    assert_split_refused(re.escape(problem), key=key, **(options | {"root": root}))
