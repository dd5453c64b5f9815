"""Cache of the shards of a store on a disk of this node, which all of its processes share.

The locks are those of the kernel, which end with their holder: a killed run leaves nothing that blocks the next one. A
cache removes, replaces and counts only files of its own: those in folders that it has claimed, see
`engine.runtime.ownership`, with the names of its shards and of their unfinished files.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from engine.data.images import BrokenImage, DataError
from engine.data.layout import LayoutError
from engine.data.store import PAUSES, File, Store
from engine.runtime.ownership import claim, owned_files
from engine.runtime.reading import open_regular

POLL = 0.02
"""Time (s) between attempts to lock a file."""

KIND = "cache of shards"
"""Kind of the folders that a cache claims."""

SHARDS, ROOM = "shards", ".room"
"""Names of the folder of shards in a cache, and of the file whose lock is held to count the shards of all caches."""


class Cache:
    """Shards of a store, and a file about them, that lie on a disk of this node, for all processes of the node.

    Args:
        root: folder of all caches; their shards take at most `limit` bytes. key: name of this cache in it.
        shards: names of all shards. kept: name of the file about them.
    Raises:
        UserError: a folder of that name holds files that no cache has made. DataError: the disk fails.
    """

    def __init__(self, root: Path, key: str, store: Store, limit: int, shards: Sequence[str], kept: str):
        self.root, self.store, self.limit = root, store, limit
        self.damaged: dict[str, BrokenImage] = {}
        self.folder = root / key
        with self._on_disk():
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / ROOM, self._deadline()):
                for folder, names in ((self.folder, [kept]), (self.folder / SHARDS, shards)):
                    claim(folder, KIND, [*names, *map(_unfinished, names)])

    def keep(self, file: File) -> Path:
        """Returns the path of the file about the shards, which stays, and does not count as a shard.

        A copy that was cut off or changed is fetched again.

        Raises:
            LayoutError: it is damaged in the store. DataError: it cannot be fetched, or not be kept.
        """
        path = self.folder / file.name
        with self._on_disk():
            if not file.is_at(path):
                self._fetch(path, file, file.is_at, LayoutError)
        return path

    @contextmanager
    def open(self, file: File) -> Iterator[BinaryIO]:
        """Opens a shard, which is fetched if it is not there. It stays readable when another process removes it.

        Raises:
            BrokenImage: it is damaged in the store. DataError: it cannot be fetched, not be kept, or not be read.
        """
        path = self.folder / SHARDS / file.name
        if file.name in self.damaged:
            raise self.damaged[file.name]
        with self._on_disk():
            while True:
                try:
                    opened = open_regular(path, os.O_NOFOLLOW)
                    break
                except FileNotFoundError:
                    try:
                        self._fetch(path, file, Path.exists, BrokenImage)
                    except BrokenImage as error:
                        self.damaged[file.name] = error
                        raise
            with opened:
                os.utime(opened.fileno())  # the shard that was not read for longest goes first
                yield opened

    def drop(self, file: File) -> None:
        """Removes a shard that was damaged on the disk."""
        with self._on_disk():
            (self.folder / SHARDS / file.name).unlink(missing_ok=True)

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        """Context in which an error of the disk, or of its locks, becomes a DataError."""
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = f"{'lower data.cache_gb, or ' * is_full}name another data.cache_dir"
            raise DataError(f"{error.filename or self.root}: {error.strerror or error}; {remedy}") from None

    def _deadline(self) -> float:
        return time.monotonic() + self.store.patience

    def _fetch(
        self, path: Path, file: File, is_there: Callable[[Path], bool], refuse: type[BrokenImage | LayoutError]
    ) -> None:
        """Fetches a file of the store to `path`, unless another process has done so meanwhile.

        Raises:
            refuse: it is damaged in the store. DataError: it cannot be fetched, or not be kept.
        """

        def check(content: bytes) -> bytes:
            if not file.has(content):
                raise refuse(f"{file.name}: its bytes are not those of the index")
            return content

        part, deadline = path.with_name(_unfinished(path.name)), self._deadline()
        with _locked(part, deadline) as unfinished:
            try:
                if is_there(path):
                    part.unlink()
                    return
                is_shard = path.parent.name == SHARDS
                if is_shard:
                    self._reserve(unfinished, part, file.size, deadline)
                unfinished.write(self.store.read(file.name, file.size, check, opening=not is_shard))
                unfinished.truncate()
                unfinished.flush()
                with _locked(self.root / ROOM, deadline):  # who counts the shards must meet this one, by either name
                    part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _reserve(self, unfinished: BinaryIO, part: Path, size: int, deadline: float) -> None:
        """Gives the file `part` its `size`, once there is room for it among the shards of all caches."""
        while True:
            with _locked(self.root / ROOM, deadline):
                files: list[tuple[float, int, Path]] = []
                folders = sorted(self.root.iterdir())
                for path in (path for folder in folders for path in owned_files(folder / SHARDS, KIND)):
                    try:
                        if path != part and not (_is_unfinished(path) and _remove_orphan(path)):
                            status = path.stat()
                            files.append((status.st_mtime, status.st_size, path))
                    except FileNotFoundError:
                        continue
                excess = sum(length for _, length, _ in files) + size - self.limit
                for _, length, path in sorted(files):
                    if excess > 0 and not _is_unfinished(path):
                        path.unlink(missing_ok=True)
                        excess -= length
                if excess <= 0:
                    unfinished.truncate(size)
                    return
            if time.monotonic() > deadline:
                problem = "other processes are fetching as much as data.cache_gb has room for"
                raise DataError(f"{self.root}: {problem}; raise it, or lower data.workers or data.shuffle_shards")
            time.sleep(PAUSES[0])


def _unfinished(name: str) -> str:
    return f".{name}.part"


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith(".")  # no shard's name does


def _remove_orphan(part: Path) -> bool:
    """Removes an unfinished file whose process was killed, and returns whether it was one."""
    with open_regular(part, os.O_RDWR | os.O_NOFOLLOW, "r+b") as file:  # locks of NFS need the right to write
        if is_orphan := _try_lock(file):
            part.unlink(missing_ok=True)
        return is_orphan


def _try_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[BinaryIO]:
    """Context in which this process alone has the file `path` locked; the file is made if there is none.

    Raises:
        DataError: another process holds the lock until `deadline` (`time.monotonic`). OSError: it cannot be locked.
    """
    while True:
        with open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, "r+b") as file:
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    problem = "another process holds its lock, and has not fetched the file in time"
                    raise DataError(f"{path}: {problem}; end that process, or raise data.timeout_minutes")
                time.sleep(POLL)
            try:
                is_same = os.fstat(file.fileno()).st_ino == path.stat().st_ino
            except FileNotFoundError:
                is_same = False
            if is_same:  # and not removed or renamed meanwhile
                yield file
                return
