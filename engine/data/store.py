"""Files in a store behind a URL, read whole and again until they are right, and a cache of them on a disk of the node.

Processes share the cache by locks of the kernel, which end with their holder: a killed run leaves nothing that blocks
the next one.
"""

import fcntl
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from engine.data.images import BrokenImage
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error, one_line

NUM_WRONG = 3
"""Number of times that a file may come with other bytes than those of the index, until it counts as damaged."""

FIRST_SHARE = 1 / 8
"""Share of the patience that the first attempt may take; every further attempt may take twice as long."""

PAUSES = (0.25, 10.0)
"""Time (s) between attempts: at first, doubled each time, and at most."""


class StoreError(UserError):
    """A file of a store that could not be had, or kept. torch puts a worker's traceback in front of the message."""

    def __init__(self, message: str):
        super().__init__(message.strip().rpartition(f"{type(self).__name__}: ")[2])


class File(NamedTuple):
    """A file in a store: its name, its size in bytes, and the digests of its content, algorithm -> hexadecimal."""

    name: str
    size: int
    hashes: dict[str, str]

    def has(self, content: bytes) -> bool:
        """Whether `content` has the size, and the strongest digest that hashlib knows, of the file."""
        known = [name for name in ("sha256", "sha1", "blake2b", "md5") if name in self.hashes][:1]
        return len(content) == self.size and all(
            hashlib.new(name, content, usedforsecurity=False).hexdigest() == self.hashes[name] for name in known
        )


def is_url(root: str) -> bool:
    """Returns whether `root` is the URL of a store, and not a folder."""
    return "://" in root


class Store:
    """The files below `url`, by fsspec.

    Args:
        patience: time (s) within which a file must have come.
    """

    def __init__(self, url: str, patience: float):
        self.url, self.patience = url.rstrip("/"), patience

    def read(self, name: str, has: Callable[[bytes], bool] = lambda content: True, opening: bool = False) -> bytes:
        """Reads the file `name`, again and again until it comes whole.

        Args:
            has: function of the content that tells whether it is the right one.
            opening: whether a run starts; a file that is not there, or may not be read, is then refused at once.
        Raises:
            StoreError: the file has not come in time. BrokenImage: it came with wrong bytes, `NUM_WRONG` times.
            UserError: it is not there, or a package for the protocol of the URL is missing.
        """
        url, began, state = f"{self.url}/{name}", time.monotonic(), random.getstate()
        seconds, pause, wrong = self.patience * FIRST_SHARE, PAUSES[0], 0
        try:
            while True:
                left = began + self.patience - time.monotonic()
                try:
                    content = _read_once(url, min(seconds, left))
                    if has(content):
                        return content
                    wrong, reason = wrong + 1, "its bytes are not those of the index"
                except (ImportError, ValueError) as error:
                    remedy = "pip install 'fsspec[http]' for http, s3fs for s3, gcsfs for gs"
                    raise UserError(f"{one_line(url)}: {describe_error(error)}; {remedy}") from None
                except Exception as error:  # the library of a protocol may raise anything
                    reason = "no answer" if isinstance(error, TimeoutError) else describe_error(error)
                    if opening and _is_refused(error):
                        raise UserError(f"{one_line(url)}: {reason}; see data.root and the name of the split") from None
                if wrong == NUM_WRONG:
                    raise BrokenImage(f"{name}: {reason}")
                if began + self.patience - time.monotonic() < pause:
                    raise StoreError(
                        f"{one_line(url)}: not to be had within {self.patience:.0f} s ({reason}); the last checkpoint"
                        " stands: go on when the store is back, or raise data.timeout_minutes"
                    )
                time.sleep(pause)
                seconds, pause = 2 * seconds, min(2 * pause, PAUSES[1])
        finally:
            random.setstate(state)  # the random numbers of an image must not depend on what it took to read it


def _read_once(url: str, seconds: float) -> bytes:
    import fsspec  # here, because most runs read no store

    system, path = fsspec.core.url_to_fs(url)  # not kept: its connections would not outlast the fork of a worker
    return system.cat_file(path, **({"timeout": seconds} if system.async_impl else {}))


def _is_refused(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError | PermissionError) or 400 <= (getattr(error, "status", 0) or 0) < 500


class Cache:
    """Files of a store that lie on a disk of this node, for all processes of the node.

    Args:
        root: folder of all caches, whose shards together take at most `limit` bytes. key: name of this cache in it.
    """

    def __init__(self, root: Path, key: str, store: Store, limit: int):
        self.root, self.store, self.limit = root, store, limit
        self.damaged: dict[str, BrokenImage] = {}
        self.folder = root / key
        (self.folder / "shards").mkdir(parents=True, exist_ok=True)

    def keep(self, file: File) -> Path:
        """Returns the path of a `file` that stays, and does not count as a shard."""
        path = self.folder / file.name
        if not path.is_file():
            self._fetch(path, file, is_shard=False)
        return path

    def open(self, file: File) -> BinaryIO:
        """Opens a shard, which is fetched if it is not there. It stays readable when another process removes it.

        Raises:
            BrokenImage: it is damaged in the store. StoreError: it cannot be fetched, or not be kept.
        """
        path = self.folder / "shards" / file.name
        if file.name in self.damaged:
            raise self.damaged[file.name]
        while True:
            try:
                opened = path.open("rb", buffering=0)
            except FileNotFoundError:
                self._fetch(path, file, is_shard=True)
            else:
                os.utime(opened.fileno())  # the shard that was not read for longest goes first
                return opened

    def drop(self, file: File) -> None:
        """Removes a shard that was damaged on the disk."""
        (self.folder / "shards" / file.name).unlink(missing_ok=True)

    def _fetch(self, path: Path, file: File, is_shard: bool) -> None:
        part = path.with_name(f".{path.name}.part")
        with _locked(part) as unfinished:
            if path.exists():  # another process has fetched it
                part.unlink()
                return
            try:
                if is_shard:
                    self._reserve(unfinished, part, file.size)
                content = self.store.read(file.name, file.has, opening=not is_shard)
                unfinished.write(content)
                unfinished.flush()
                with _locked(self.root / ".room"):  # who counts the shards must meet this one, by either name
                    part.replace(path)
            except BrokenImage as error:
                self.damaged[file.name] = error
                part.unlink(missing_ok=True)
                raise
            except OSError as error:
                part.unlink(missing_ok=True)
                problem = f"{self.root}: {error.strerror or error}; lower data.cache_gb, or name another data.cache_dir"
                raise StoreError(problem) from None
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _reserve(self, unfinished: BinaryIO, part: Path, size: int) -> None:
        """Gives the file `part` its `size`, once there is room for it among the shards of all caches."""
        while True:
            with _locked(self.root / ".room"):
                files: list[tuple[float, int, Path]] = []
                for path in self.root.glob("*/shards/*"):
                    try:
                        if path != part and not (path.name.endswith(".part") and _remove_orphan(path)):
                            status = path.stat()
                            files.append((status.st_mtime, status.st_size, path))
                    except FileNotFoundError:
                        continue
                excess = sum(length for _, length, _ in files) + size - self.limit
                for _, length, path in sorted(files):
                    if excess > 0 and not path.name.endswith(".part"):
                        path.unlink(missing_ok=True)
                        excess -= length
                if excess <= 0:
                    unfinished.truncate(size)
                    return
            time.sleep(PAUSES[0])  # other processes are fetching as much as may lie here


def _remove_orphan(part: Path) -> bool:
    """Removes an unfinished file whose process was killed, and returns whether it was one."""
    with part.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        part.unlink(missing_ok=True)
        return True


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Context in which this process alone has the file `path` locked; the file is made if there is none."""
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_same = os.fstat(file.fileno()).st_ino == path.stat().st_ino
            except FileNotFoundError:
                is_same = False
            if is_same:  # and not removed or renamed meanwhile
                yield file
                return
