"""Mosaic data shards, in a folder and in a store that fails: the same images, in an order of seed and epoch alone."""

import errno
import fcntl
import http.server
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from attention.options import OptionError
from engine.config.schema import Augment, Data, Run, Train
from engine.data import prepare, shard_cache, store
from engine.data.identity import identify_split
from engine.data.images import BrokenImage, DataError
from engine.data.loaders import create_loaders, create_val_loader
from engine.data.mds import MdsReader
from engine.data.splits import classes_of, open_split
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.ownership import MARKER
from tests.engine.test_formats import LABELS, PIXELS, ends_within, swap_labels_of_table, write_folder
from tests.engine.test_resume import Runs, choose_kill
from tests.support.launcher import ROOT, ForkServer
from tests.support.partition import chosen
from tests.support.refusals import assert_split_refused

CPU = torch.device("cpu")


ZEROS = bytes(2**20)
PACKER = zlib.compressobj(1, wbits=31)
BOMB = b"".join([*(PACKER.compress(ZEROS) for _ in range(2**8)), PACKER.flush()])
"""256 MB in 1 MB of gzip."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends the files of a folder, once the faults that are due for a name have struck."""

    def do_GET(self):
        server = self.server
        name = Path(self.path).name
        server.requests[name] += 1
        server.asked[name] = self.headers
        server.watch()
        fault = server.faults.get(name, [])
        fault = fault.pop(0) if isinstance(fault, list) and fault else fault if isinstance(fault, str) else ""
        path = Path(server.root + self.path)
        if fault == "gone" or not path.is_file():
            return self.send_error(404)
        if fault.isdecimal():
            return self.send_error(int(fault))
        if fault in ("later", "moved"):
            self.send_response(429 if fault == "later" else 302)
            self.send_header(*(("Retry-After", "1") if fault == "later" else ("Location", "http://[")))
            self.send_header("Content-Length", "0")
            return self.end_headers()
        content = path.read_bytes()
        content = {"short": content[: len(content) // 2], "bomb": BOMB}.get(fault, content)  # short: a whole answer
        self.send_response(200)
        if fault == "bomb":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(2**26 if fault == "endless" else len(content)))
        self.end_headers()
        if fault == "cut":
            content = content[: len(content) // 2]
        if fault == "wrong":
            content = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        if fault == "hang":
            self.wfile.write(content[:1000])
            self.wfile.flush()
            time.sleep(30)
        for part in (ZEROS for _ in range(2**6)) if fault == "endless" else ():
            server.sent[name] += self.wfile.write(part)
        for begin in range(0, len(content), 1000):
            self.wfile.write(content[begin : begin + 1000])
            time.sleep(0.002 if fault == "slow" else 0)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(shards):
    """A store on loopback.

    Attributes: url; requests and bytes sent, by name; the last headers; faults: name -> a list of the next ones, or one
    that stays.
    """
    pytest.importorskip("aiohttp", reason="an optional package")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.root, server.requests, server.faults, server.watch = str(shards), Counter(), {}, lambda: None
    server.asked, server.sent, server.handle_error = {}, Counter(), lambda *args: None  # clients that hang up
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """200 images of 4 classes in a dozen shards."""
    root, output = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("shards")
    write_folder(root)
    prepare.main(f"{root} {output} --splits train --format mds --original --shard-mb 0.05 --workers 0".split())
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    write_folder(root)
    return root


def options_at(server, cache, **more) -> Data:
    options = {"dataset": "mds", "root": server.url, "cache_dir": str(cache), "val_split": "train", "shuffle_shards": 2}
    return Data(**options | {"workers": 0, "timeout_minutes": 1.0} | more)


def create(data: Data, world: World | None = None, batch: int = 20):
    plain, train = Augment(mixup=0.0, cutmix=0.0), Train(total_batch_size=batch)
    run = Run(model={}, attention="softmax", data=data, augment=plain, train=train)
    return create_loaders(run, world or World(CPU), img_size=16, num_classes=4)[0]


def read_epoch(data: Data, epoch: int = 1, start: int = 0, batch: int = 20):
    loader = create(data, batch=batch)
    loader.sampler.set_epoch(epoch, start)
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


def shard_of(shards, index: int) -> str:
    return json.loads((shards / "train" / "index.json").read_text())["shards"][index]["raw_data"]["basename"]


def test_shards_have_the_images_of_the_folders(folder, shards):
    reader, original = MdsReader(str(shards / "train")), open_split(Data(root=str(folder)), "train_split")
    images = open_split(Data(dataset="mds", root=str(shards)), "train_split")
    assert len(reader.shards) > 8
    assert classes_of(images) == classes_of(original)
    names = [*reader.filenames()]
    assert sorted(names) == sorted(original.reader.filenames())
    assert names != [*original.reader.filenames()]
    for index, name in enumerate(names):
        number = int(Path(name).stem)
        image, label = images[index]
        assert np.array_equal(image, PIXELS[number])
        assert label == LABELS[number] == reader.labels[index]
        assert reader[index][0].read() == (folder / "train" / name).read_bytes()
    assert np.bincount(reader.labels[: reader.blocks[2]], minlength=4).all(), "the first shards have all classes"


def test_prepared_pixels_go_into_shards_too_and_subsets_come_from_them(folder, tmp_path):
    prepare.main(f"{folder} {tmp_path} --splits train --format mds --short-side 16 --shard-mb 0.05 --workers 0".split())
    images = open_split(Data(dataset="mds", root=str(tmp_path)), "train_split")
    assert {images[index][0].size for index in range(200)} == {(16, 16)}
    part = open_split(Data(dataset="mds", root=str(tmp_path), subset=7), "train_split")
    assert np.bincount(part.reader.labels).tolist() == [7] * 4
    assert part.reader.blocks[-1] == 28


def test_the_identity_is_the_digest_of_the_index(folder, shards, tmp_path):
    def identity(root, output):
        prepare.main(f"{root} {output} --splits train --format mds --original --shard-mb 0.05 --workers 0".split())
        return identify(output)

    def identify(output, **part):
        return identify_split("train", open_split(Data(dataset="mds", root=str(output), **part), "train_split"))

    expected, part = identify(shards), identify(shards, val_fraction=0.1)
    assert identity(folder, tmp_path / "again") == expected
    assert identify(tmp_path / "again", val_fraction=0.1) == part != identify(shards, val_fraction=0.2)
    write_folder(tmp_path / "other")
    content = bytearray((tmp_path / "other" / "train" / "2" / "117.png").read_bytes())
    content[-20] ^= 1
    (tmp_path / "other" / "train" / "2" / "117.png").write_bytes(content)  # of the same size
    assert identity(tmp_path / "other", tmp_path / "changed")["train_content"] != expected["train_content"]
    changed = identify(tmp_path / "changed", val_fraction=0.1)
    assert changed["train_files"] == part["train_files"]
    assert changed["train_content"] != part["train_content"], "a part of them is identified by content too"


def test_another_library_reads_the_shards(shards):
    streaming = pytest.importorskip("streaming.base.format", reason="pins old versions; see docs/data.md")
    index, reader = json.loads((shards / "train" / "index.json").read_text()), MdsReader(str(shards / "train"))
    found = [streaming.reader_from_json(str(shards), "train", entry) for entry in index["shards"]]
    samples = [sample for part in found for sample in part]
    assert [sample["label"] for sample in samples] == reader.labels.tolist()
    assert [sample["image"] for sample in samples] == [reader[number][0].read() for number in range(200)]


def test_an_epoch_from_a_store_is_that_of_the_folder_of_shards(server, shards, tmp_path):
    """With a cold cache and a warm one, from any position; and every shard is fetched once."""
    here = Data(dataset="mds", root=str(shards), val_split="train", shuffle_shards=2, workers=0)
    expected = read_epoch(here)
    for start in (0, 120):
        found = read_epoch(options_at(server, tmp_path), start=start)
        assert all(torch.equal(a, b[start:]) for a, b in zip(found, expected, strict=True))
    assert {name: count for name, count in server.requests.items() if name.endswith(".mds")} == {
        shard.file.name: 1 for shard in MdsReader(str(shards / "train")).shards
    }


def shards_in(cache) -> list[Path]:
    return [path for path in cache.glob("*/shards/*") if path.name != MARKER]


def size_of(cache) -> int:
    """Bytes of all shards, at a moment when none gets room, and a file that is renamed meanwhile counts once."""
    sizes = {}
    with (cache / ".room").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for path in shards_in(cache):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_limit_of_the_cache_holds_and_a_shard_comes_once_in_an_epoch(server, shards, tmp_path, workers):
    sizes = [shard.file.size for shard in MdsReader(str(shards / "train")).shards]
    limit, found = 4 * max(sizes), []
    assert limit < sum(sizes) / 2
    server.watch = lambda: found.append(size_of(tmp_path))
    data = options_at(server, tmp_path, cache_gb=limit / 1e9, workers=workers)
    # Workers are up to four batches apart, here 16 images: less than a block, so that two blocks are enough.
    assert len(read_epoch(data, batch=4)[0]) == 200
    assert limit / 2 < max(found) <= limit
    assert size_of(tmp_path) <= limit
    fetched = {name: count for name, count in server.requests.items() if name.endswith(".mds")}
    assert len(fetched) == len(sizes)
    assert max(fetched.values()) == 1


def test_a_shard_that_is_finished_while_shards_are_counted_counts(tmp_path, monkeypatch):
    file, other = (store.File(f"{name}.mds", 1000, {}) for name in "ab")
    counted, arrived, sizes = threading.Event(), threading.Event(), []

    class Source:
        patience = 30.0

        def read(self, name, limit, parse, opening):
            if name == file.name:
                arrived.set()
                assert counted.wait(30)
            else:
                sizes.append(size_of(tmp_path))
            return parse(bytes(1000))

    def count(part, is_orphan=shard_cache._remove_orphan):
        counted.set()  # the file is in the list of names
        first.join(0.5)  # and is renamed, if it can be
        return is_orphan(part)

    caches = [shard_cache.Cache(tmp_path, "key", Source(), 1500, [file.name, other.name], "table") for _ in range(2)]
    first = threading.Thread(target=lambda: caches[0].open(file).__enter__(), daemon=True)
    first.start()
    assert arrived.wait(30)
    monkeypatch.setattr(shard_cache, "_remove_orphan", count)
    with caches[1].open(other):
        pass
    first.join(30)
    assert sizes == [1000]


def test_a_limit_that_cannot_hold_two_blocks_is_refused(server, tmp_path):
    for options, problem in (
        (options_at(server, tmp_path, cache_gb=1e-6), "data.cache_gb = 1e-06, but two blocks of data.shuffle_shards"),
        (Data(dataset="mds", root=server.url), "a URL needs data.cache_dir"),
        (Data(root=server.url), "only data.dataset=mds is read from a store"),
    ):
        with pytest.raises(OptionError, match=problem):
            open_split(options, "train_split")


@pytest.mark.parametrize("fault", chosen(["slow", "cut", "500", "wrong", "gone", "hang"], "cut".__eq__))
def test_a_fault_that_passes_changes_nothing(server, shards, tmp_path, fault, monkeypatch):
    monkeypatch.setattr(store, "FIRST_SHARE", 1 / 48)
    expected = read_epoch(options_at(server, tmp_path / "first"))
    server.requests.clear()
    names = [shard_of(shards, index) for index in (1, 4, 5)]
    times, num_shards = (1, 1) if fault == "hang" else (2, 3)
    server.faults = {name: [fault] * times for name in names[:num_shards]}
    found = read_epoch(options_at(server, tmp_path / "second", workers=2))
    assert all(map(torch.equal, found, expected))
    assert fault == "slow" or server.requests[names[0]] == times + 1


@pytest.mark.complete
def test_a_shard_of_wrong_bytes_is_broken_images(server, shards, tmp_path):
    """As many as it has, of which data.max_broken decides."""
    name = shard_of(shards, 3)
    server.faults = {name: "wrong"}
    reader = MdsReader(str(shards / "train"))
    images = open_split(options_at(server, tmp_path), "train_split")
    broken = [index for index in range(200) if isinstance(images[index], BrokenImage)]
    assert broken == [*range(reader.blocks[3], reader.blocks[4])]
    assert str(images[broken[0]]).endswith(f"{name}: its bytes are not those of the index")
    assert server.requests[name] == store.NUM_WRONG, "a damaged shard is not fetched for every image"
    with pytest.raises(BrokenImage, match=r"its bytes are not those of the index; too many broken images"):
        read_epoch(options_at(server, tmp_path, max_broken=3))
    assert len(read_epoch(options_at(server, tmp_path, max_broken=40))[0]) == 200 - len(broken)


@pytest.mark.complete
@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_that_is_gone_ends_the_run_in_a_line(server, shards, tmp_path, workers, monkeypatch):
    """The store has 2 s; loader workers have a minute, because they may take seconds to start."""
    monkeypatch.setattr("engine.data.mds.STORE_SHARE", 1 / 30)
    server.faults = {shard_of(shards, 2): "500"}
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        read_epoch(options_at(server, tmp_path, workers=workers))
    assert time.monotonic() - began < 30
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{server.url}/train/{shard_of(shards, 2)}: not to be had within 2 s (")
    assert "500" in str(caught.value)
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"index.json: not to be had within 2 s \((Client|no answer)"):
        open_split(options_at(server, tmp_path), "train_split")


def test_what_is_not_there_is_refused_at_the_first_answer(server, tmp_path):
    """The error is that of a missing file; the error of a store that is gone gives the time of waiting."""
    with pytest.raises(UserError, match=r"/val/index.json: FileNotFoundError.*see data.root and the name of the split"):
        open_split(options_at(server, tmp_path, val_split="val"), "val_split")
    with pytest.raises(UserError, match=r"nothing://x/train/index.json: ValueError: Protocol not known"):
        open_split(Data(dataset="mds", root="nothing://x", cache_dir=str(tmp_path)), "train_split")


def test_a_cache_that_was_damaged_on_the_disk_is_fetched_again(server, shards, tmp_path):
    expected = read_epoch(options_at(server, tmp_path))
    for path in tmp_path.glob("*/shards/*.mds"):
        path.write_bytes(bytes(path.stat().st_size))
    assert all(map(torch.equal, read_epoch(options_at(server, tmp_path)), expected))
    assert max(server.requests[shard.file.name] for shard in MdsReader(str(shards / "train")).shards) == 2


@pytest.mark.complete
def test_a_fetch_that_was_killed_blocks_nothing(server, shards, tmp_path):
    """No lock, no file, and no room in the cache is left of it."""
    server.faults = {shard_of(shards, index): ["hang"] for index in range(3)}
    code = (
        "import sys; from engine.config.schema import Data; from engine.data.splits import open_split\n"
        "images = open_split(Data(dataset='mds', root=sys.argv[1], cache_dir=sys.argv[2]), 'train_split')\n"
        "images[0]"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    child = subprocess.Popen([sys.executable, "-c", code, server.url, str(tmp_path)], env=environment)
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob("*/shards/.*.part")] and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    left = {path.name for path in shards_in(tmp_path)}
    assert left == {f".{shard_of(shards, 0)}.part"}
    server.faults = {}
    limit = 4 * max(shard.file.size for shard in MdsReader(str(shards / "train")).shards)
    began = time.monotonic()
    assert len(read_epoch(options_at(server, tmp_path, cache_gb=limit / 1e9))[0]) == 200
    assert time.monotonic() - began < 20
    assert not [*tmp_path.glob("*/shards/.*.part")]
    assert size_of(tmp_path) <= limit


def write_tree(root, files) -> dict[str, bytes]:
    """Writes `files`, name -> content, all of them older than any shard."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
        os.utime(root / name, (0, 0))
    return files


def test_a_cache_removes_and_counts_nothing_that_it_has_not_made(server, shards, tmp_path):
    """Whatever the names of other files in its folder are."""
    shard, other = shard_of(shards, 0), "0123456789abcdef" * 2
    files = {f"imagenet/shards/{name}": bytes(10**6) for name in ("a.tar", shard, f".{shard}.part", "x.part")}
    files |= {f"{other}/shards/{shard}": b"x", f"{other}/images.safetensors": b"y", "shards/a.tar": b"z", "a.part": b""}
    marker = json.dumps({"kind": "run", "names": [shard]}).encode()
    files |= {f"runs/shards/{MARKER}": marker, f"runs/shards/{shard}": b"x"}
    write_tree(tmp_path, files)
    (tmp_path / "link").symlink_to(tmp_path / "imagenet")
    limit = 4 * max(shard.file.size for shard in MdsReader(str(shards / "train")).shards)
    for _ in range(2):
        assert len(read_epoch(options_at(server, tmp_path, cache_gb=limit / 1e9))[0]) == 200
    others = {"imagenet", other, "runs", "shards", "a.part", "link", ".room"}
    (own,) = {path.name for path in tmp_path.iterdir()} - others
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    assert sum(path.stat().st_size for path in (tmp_path / own / "shards").glob("*.mds")) <= limit


def test_a_folder_with_the_name_of_the_cache_that_it_has_not_made_is_refused(server, shards, tmp_path):
    key = MdsReader(str(shards / "train")).digest[:32]
    files = write_tree(tmp_path, {f"{key}/shards/{shard_of(shards, 0)}": b"x"})
    with pytest.raises(OptionError, match=r"data.cache_dir = '.*holds files that are not of a cache of shards.*; name"):
        open_split(options_at(server, tmp_path), "train_split")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*files, ".room"}
    (tmp_path / key / "shards" / shard_of(shards, 0)).rename(tmp_path / key / MARKER)
    (tmp_path / key / "shards").rmdir()
    assert len(open_split(options_at(server, tmp_path), "train_split")) == 200, "left by a killed process"


class Failing:
    """An open file of which a method fails."""

    def __init__(self, file, method, error):
        self.file, self.method, self.error = file, method, error

    def __getattr__(self, name):
        if name == self.method:
            raise self.error
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EIO, errno.ENOLCK])
@pytest.mark.parametrize(
    "call",
    chosen(
        ["open_regular", "fcntl.flock", "os.utime", "os.scandir", "Path.replace", "truncate", "write", "read", "seek"],
        ("fcntl.flock", "write").__contains__,
    ),
)
def test_an_error_of_this_machine_ends_the_run_and_is_no_broken_image(server, tmp_path, monkeypatch, number, call):
    images = open_split(options_at(server, tmp_path, broken_val="skip"), "train_split")
    error = OSError(number, os.strerror(number))

    def fail(*args, **options):
        raise error

    module, _, name = call.rpartition(".")
    if module or call == "open_regular":
        monkeypatch.setattr({"fcntl": fcntl, "os": os, "Path": Path}.get(module, shard_cache), name, fail)
    else:
        opened = shard_cache.open_regular
        monkeypatch.setattr(shard_cache, "open_regular", lambda *args: Failing(opened(*args), name, error))
    with pytest.raises(DataError, match=rf"{os.strerror(number)}; .*name another data.cache_dir") as caught:
        images[0]
    assert "\n" not in str(caught.value)
    assert ("lower data.cache_gb" in str(caught.value)) == (number == errno.ENOSPC)
    monkeypatch.undo()
    assert not isinstance(images[0], BrokenImage)


@pytest.mark.complete
def test_a_lock_that_another_process_holds_is_not_waited_for_without_end(server, shards, tmp_path):
    images = open_split(options_at(server, tmp_path, timeout_minutes=0.05), "train_split")
    (folder,) = tmp_path.glob("*/shards")
    for path in (folder / f".{shard_of(shards, 0)}.part", tmp_path / ".room"):
        with path.open("ab") as file, ends_within(20):
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(DataError, match="another process holds its lock"):
                images[0]
    assert not isinstance(images[0], BrokenImage)


@pytest.mark.parametrize("fault", chosen(["408", "425", "429", "later", "short"], "408".__eq__))
def test_a_start_waits_for_a_fault_that_passes(server, tmp_path, fault):
    server.faults = {name: [fault] for name in ("index.json", "images.safetensors")}
    began = time.monotonic()
    assert len(open_split(options_at(server, tmp_path), "train_split")) == 200
    assert fault != "later" or time.monotonic() - began > 2


@pytest.mark.parametrize("fault", ["400", "403", "404", "410", "moved", "bomb"])
def test_a_start_does_not_wait_for_a_refusal(server, tmp_path, fault):
    server.faults = {"index.json": fault}
    with pytest.raises(UserError, match=r"index.json: \w+: .*; see data.root and the name of the split") as caught:
        open_split(options_at(server, tmp_path), "train_split")
    assert "pip install" not in str(caught.value)
    assert server.requests["index.json"] == 1


def test_files_are_asked_for_unpacked_and_with_the_options_that_the_user_gave_fsspec(server, tmp_path, monkeypatch):
    monkeypatch.setitem(pytest.importorskip("fsspec").config.conf, "http", {"headers": {"Authorization": "a key"}})
    open_split(options_at(server, tmp_path), "train_split")
    for asked in server.asked.values():
        assert (asked["Authorization"], asked["Accept-Encoding"]) == ("a key", "identity")


@pytest.mark.parametrize("name", chosen(["index.json", "images.safetensors", "shard"], "shard".__eq__))
@pytest.mark.parametrize("fault", ["endless", "bomb"])
def test_a_server_that_sends_more_than_it_should_is_not_listened_to(server, shards, tmp_path, name, fault, monkeypatch):
    """The client hangs up before all of 64 MB are sent, and unpacks nothing of 256 packed MB."""
    monkeypatch.setattr("engine.data.mds.MAX_TEXT", 2**16)
    images = open_split(options_at(server, tmp_path / "first", timeout_minutes=0.02), "train_split")
    name = shard_of(shards, 0) if name == "shard" else name
    server.faults, server.sent = {name: fault}, Counter()
    if name.endswith(".mds") and fault == "endless":
        assert str(images[0]).endswith("its bytes are not those of the index")
    else:
        with pytest.raises((UserError, OptionError), match=r"larger than|bytes are not|Content-Encoding: gzip"):
            images[0] if name.endswith(".mds") else open_split(options_at(server, tmp_path / "second"), "train_split")
    assert server.sent[name] < 2**25


@pytest.mark.parametrize("damage", ["cut", "labels"])
def test_a_copy_in_the_cache_that_has_changed_is_fetched_again(server, shards, tmp_path, damage):
    expected = open_split(options_at(server, tmp_path), "train_split").reader.labels.copy()
    (path,) = tmp_path.glob("*/images.safetensors")
    path.write_bytes(path.read_bytes()[:2000]) if damage == "cut" else swap_labels_of_table(path)
    assert np.array_equal(open_split(options_at(server, tmp_path), "train_split").reader.labels, expected)
    assert server.requests["images.safetensors"] == 2


@pytest.mark.parametrize("start", [0, 60])
def test_every_image_comes_once_at_any_number_of_ranks(shards, start):
    data = Data(dataset="mds", root=str(shards), val_split="train", shuffle_shards=2, workers=0)
    whole = create(data)
    whole.sampler.set_epoch(3, start)
    expected = list(whole.sampler)
    assert sorted(index for index, _, _ in expected) == sorted({index for index, _, _ in expected})
    assert len(expected) == 200 - start
    for ranks in (2, 4, 5):
        places = []
        for rank in range(ranks):
            sampler = create(data, World(CPU, rank, ranks)).sampler
            sampler.set_epoch(3, start)
            places += sampler
        assert sorted(places, key=lambda place: place[2]) == expected
    loaders = [
        create_val_loader(Run(model={}, attention="softmax", data=data), World(CPU, rank, 3), img_size=16, batch_size=7)
        for rank in range(3)
    ]
    labels = torch.cat([labels for loader in loaders for _, labels in loader])
    assert labels.bincount().tolist() == [50] * 4


def shard_named(name: str, size: int = 9) -> dict:
    return {"shards": [{"raw_data": {"basename": name, "bytes": size, "hashes": {}}}]}


def copy_of(shards, root: Path) -> Path:
    """Copies the shards and returns the folder of the copies."""
    shutil.copytree(shards / "train", root / "train")
    return root / "train"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 1}, r"index.json: damaged \(ValueError: version 1\)"),
        ({"short_side": float("inf")}, r"index.json: damaged \(OverflowError"),
        ({"shards": []}, "has no shard"),
        ({"images": {"basename": "../labels", "bytes": 9, "hashes": {}}}, r"a file '../labels' of 9 bytes"),
        (shard_named("/etc/passwd"), "a file '/etc/passwd'"),
        ({"shards": [{"column_encodings": ["pkl", "int"]}]}, "the column 'image' is pkl; write it as one of bytes"),
        ({"shards": [{"compression": "zstd"}]}, "compression 'zstd'; write 'mds' without compression"),
        ({"shards": [{"samples": -1}]}, "sizes that no shard has"),
        ({"shards": [{"samples": 7}]}, "index.json has 7 images, but images.safetensors 200; make them anew"),
        ({"images": None}, "index.json: damaged"),
        ({"images": {"basename": "x", "bytes": 9, "hashes": {"md5": "0"}}}, "has no SHA-256 of 'x'"),
        *(
            (shard_named(name), "a file '.*' of 9 bytes")
            for name in ("a\0b", "a\ud800b", "a\ndb", ".x", "x" * 201, MARKER)
        ),
        (shard_named("x", 2**32), "a file 'x' of 4,294,967,296"),
        ({"images": {"basename": "x", "bytes": 2**40, "hashes": {"sha256": "0"}}}, "a file 'x' of 1,099,511,627,776"),
    ],
)
def test_an_index_from_a_stranger_is_refused_in_a_line(shards, tmp_path, change, problem):
    index = json.loads((shards / "train" / "index.json").read_text())
    entries = [index["shards"][0] | entry for entry in change.pop("shards", [])] if change.get("shards") else None
    index |= change | ({"shards": entries} if entries else {})
    (copy_of(shards, tmp_path) / "index.json").write_text(json.dumps(index))
    assert_split_refused(problem, dataset="mds", root=str(tmp_path))


@pytest.mark.parametrize("length", [0, 4, 30, 200, 2000])
def test_a_damaged_file_of_names_is_refused(shards, tmp_path, length):
    path = copy_of(shards, tmp_path) / "images.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    problem = "images.safetensors is missing or damaged: not the file that index.json describes"
    assert_split_refused(problem, dataset="mds", root=str(tmp_path))


def test_damage_within_a_shard_is_one_broken_image(shards, tmp_path):
    path = copy_of(shards, tmp_path) / shard_of(shards, 2)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    images = open_split(Data(dataset="mds", root=str(tmp_path)), "train_split")
    broken = [str(images[index]) for index in range(200) if isinstance(images[index], BrokenImage)]
    assert len(broken) == 1
    assert broken[0].endswith(f"damaged in {path.name}: the checksum differs")


def overrides_at(server, cache, **more) -> list[str]:
    options = {"dataset": "mds", "root": server.url, "cache_dir": cache, "val_split": "train", "shuffle_shards": 2}
    overrides = [f"data.{name}={value}" for name, value in (options | more).items()]
    return [*overrides, "model.num_classes=4", "train.total_batch_size=32"]


@pytest.mark.complete
@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.stress)])
def test_a_killed_run_on_a_store_ends_in_the_same_bits(server, tmp_path, ranks, workers):
    fork, rng = ForkServer(), random.Random(ranks)
    try:
        runs = Runs(fork, tmp_path / "runs", overrides_at(server, tmp_path / "cache", workers=workers), ranks)
        for place in ("step", "step", "write"):
            assert -9 in runs.survives(choose_kill(rng, place))
    finally:
        fork.close()


@pytest.mark.complete
def test_a_run_whose_store_is_gone_or_locked_says_so_and_goes_on_later(server, shards, tmp_path):
    fork = ForkServer()
    try:
        runs = Runs(fork, tmp_path / "runs", overrides_at(server, tmp_path / "cache", workers=2, timeout_minutes=0.1))
        for path in shards_in(tmp_path / "cache"):
            path.unlink()
        names = [shard.file.name for shard in MdsReader(str(shards / "train")).shards]
        server.faults = dict.fromkeys(names[5:], "gone")
        statuses, job, output = runs.launch()
        assert statuses == [1]
        lines = [line for line in job.text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert "not to be had within 5 s (FileNotFoundError" in lines[0]
        assert "Traceback" not in job.text
        server.faults = {}
        assert runs.launch(output=output)[0] == [0]

        (path,) = (path for path in shards_in(tmp_path / "cache") if path.name == names[0])
        path.unlink()
        part = path.with_name(f".{names[0]}.part")
        command = [*runs.command, "data.workers=0", "data.timeout_minutes=5", "--output", str(tmp_path / "locked")]
        with part.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            job = fork.start(command, tmp_path / "locked.log")
            deadline = time.monotonic() + 60
            while not (tmp_path / "locked" / "metrics.jsonl").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(0.5)
            job.signal("SIGTERM")
            assert job.wait(60) == [75]
        assert "this process has read no batch for" in job.text
        assert "Traceback" not in job.text
    finally:
        fork.close()
