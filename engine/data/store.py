"""Files in a store behind a URL, read whole and again until they are right, and a cache of them on a disk of the node.

Processes share the cache by locks of the kernel, which end with their holder: a killed run leaves nothing that blocks
the next one. A cache removes, replaces and counts only files of its own: those in folders that it has claimed, see
`engine.runtime.ownership`, with the names of its shards and of their unfinished files.
"""

import errno
import fcntl
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from engine.data.images import BrokenImage, DataError
from engine.data.layout import LayoutError
from engine.runtime.errors import UserError
from engine.runtime.ownership import claim, owned_files
from engine.runtime.reading import open_regular
from engine.runtime.text import describe_error, one_line

NUM_WRONG = 3
"""Number of times that a file may come with wrong bytes, until it counts as damaged."""

FIRST_SHARE = 1 / 8
"""Share of the patience that the first attempt may take; every further attempt may take twice as long."""

PAUSES = (0.25, 10.0)
"""Time (s) between attempts: at first, doubled each time, and at most."""

POLL = 0.02
"""Time (s) between attempts to lock a file."""

PASSING = (408, 425, 429)
"""HTTP statuses of 400 to 499 that pass: timeout, too early, too many requests."""

KIND = "cache of shards"
"""Kind of the folders that a cache claims."""

ALGORITHMS = ("sha256", "sha1", "blake2b", "md5")
"""Digests of an index that are compared, the strongest first."""

SHARDS, ROOM = "shards", ".room"
"""Names of the folder of shards in a cache, and of the file whose lock allows to count those of all caches."""

T = TypeVar("T")


class File(NamedTuple):
    """A file in a store: its name, its size in bytes, and the digests of its content, algorithm -> hexadecimal."""

    name: str
    size: int
    hashes: dict[str, str]

    def has(self, content: bytes) -> bool:
        """Whether `content` is that of the file, by its size and the strongest digest that hashlib knows."""
        return self._is(BytesIO(content))

    def is_at(self, path: Path) -> bool:
        """Whether the regular file `path` has this content; False if there is none."""
        try:
            with open_regular(path) as file:
                return self._is(file)
        except FileNotFoundError:
            return False

    def _is(self, file: BytesIO | BufferedReader) -> bool:
        if file.seek(0, os.SEEK_END) != self.size:
            return False
        file.seek(0)
        name = next(filter(self.hashes.__contains__, ALGORITHMS), None)
        create = partial(hashlib.new, name or "md5", usedforsecurity=False)
        return name is None or hashlib.file_digest(file, create).hexdigest() == self.hashes[name]


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

    def read(self, name: str, limit: int, parse: Callable[[bytes], T], opening: bool = False) -> T:
        """Reads the file `name`, again and again until it comes whole, and returns what `parse` makes of it.

        Args:
            limit: bytes that are read at most, and one more, which tells that the file is larger.
            parse: function of the content that raises BrokenImage or LayoutError if its bytes are wrong.
            opening: whether a run starts; a file that is not there, or may not be read, is then refused at once.
        Raises:
            DataError: the file has not come in time.
            BrokenImage, LayoutError: it came with wrong bytes, `NUM_WRONG` times.
            UserError: it is not there, or a package for the protocol of the URL is missing.
        """
        url, began, state = f"{self.url}/{name}", time.monotonic(), random.getstate()
        seconds, pause, wrong = self.patience * FIRST_SHARE, PAUSES[0], 0
        try:
            while True:
                left, asked = began + self.patience - time.monotonic(), 0.0
                try:
                    return parse(_read_once(url, limit, min(seconds, left)))
                except (BrokenImage, LayoutError) as error:
                    wrong, reason = wrong + 1, str(error)
                    if wrong == NUM_WRONG:
                        raise
                except UserError:
                    raise
                except Exception as error:  # the library of a protocol may raise anything
                    reason, asked = (
                        "no answer" if isinstance(error, TimeoutError) else describe_error(error),
                        _asked(error),
                    )
                    if opening and _is_refused(error):
                        raise UserError(f"{one_line(url)}: {reason}; see data.root and the name of the split") from None
                pause = max(pause, asked)
                if began + self.patience - time.monotonic() < pause:
                    raise DataError(
                        f"{one_line(url)}: not to be had within {self.patience:.0f} s ({reason}); the last checkpoint"
                        " stands: go on when the store is back, or raise data.timeout_minutes"
                    )
                time.sleep(pause)
                seconds, pause = 2 * seconds, min(2 * pause, PAUSES[1])
        finally:
            random.setstate(state)  # the random numbers of an image must not depend on what it took to read it


def _read_once(url: str, limit: int, seconds: float) -> bytes:
    """Reads at most `limit` bytes of a file, and one more if it is larger.

    Raises:
        UserError: a package for the protocol is missing. Exception: any other that the library raises.
    """
    import fsspec  # here, because most runs read no store

    try:  # not kept: its connections would not outlast the fork of a worker
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        remedy = "pip install 'fsspec[http]' for http, s3fs for s3, gcsfs for gs"
        raise UserError(f"{one_line(url)}: {describe_error(error)}; {remedy}") from None
    if url.lower().startswith(("http://", "https://")):
        return fsspec.asyn.sync(system.loop, _get, system, path, limit, timeout=seconds)
    return system.cat_file(path, end=limit + 1, **({"timeout": seconds} if system.async_impl else {}))


async def _get(system: Any, url: str, limit: int) -> bytes:
    """Reads a file as `_read_once` from an HTTP server, which may send more than was asked for, or pack it."""
    content = bytearray()
    session = await system.set_session()
    headers = system.kwargs.get("headers", {}) | {"Accept-Encoding": "identity"}
    options = system.kwargs | {"headers": headers, "auto_decompress": False}
    async with session.get(system.encode_url(url), **options) as answer:
        system._raise_not_found_for_status(answer, url)
        if (encoding := answer.headers.get("Content-Encoding", "")) not in ("", "identity"):
            raise ValueError(f"sent as Content-Encoding: {encoding}; the server must send files as they are")
        async for part in answer.content.iter_any():
            content += part
            if len(content) > limit:
                break
    return bytes(content[: limit + 1])


def _is_refused(error: Exception) -> bool:
    """Whether to wait would not help."""
    status = getattr(error, "status", 0) or 0
    is_known = isinstance(error, FileNotFoundError | PermissionError | ValueError)
    return is_known or (400 <= status < 500 and status not in PASSING)


def _asked(error: Exception) -> float:
    """Returns the time (s) after which the server wants to be asked again; 0: it does not say."""
    headers = getattr(error, "headers", None)
    value = headers.get("Retry-After", "") if isinstance(headers, Mapping) else ""
    return float(value) if value.isdecimal() else 0.0


class Cache:
    """Shards of a store, and a file about them, that lie on a disk of this node, for all processes of the node.

    Args:
        root: folder of all caches, whose shards together take at most `limit` bytes. key: name of this cache in it.
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
                for path in self._list():
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

    def _list(self) -> Iterator[Path]:
        """Yields the shards of all caches, and the unfinished ones."""
        for folder in sorted(self.root.iterdir()):
            yield from owned_files(folder / SHARDS, KIND)


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
