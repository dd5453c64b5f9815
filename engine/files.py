"""Files of a run directory: owned by one process, written whole or not at all, verified by a SHA-256 beside them."""

import errno
import fcntl
import hashlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from attention.options import OptionError
from engine.distributed import World


@contextmanager
def own(directory: Path, world: World) -> Iterator[None]:
    """Makes `directory` and keeps it for this run: no other process can own it until this one ends, however it ends.

    The lock is the system's (POSIX) on the file `lock`, whose text only tells a person who has it. On a network file
    system it holds between nodes where that passes locks on: NFSv4, GPFS, Lustre mounted with `flock`.

    Raises:
        OptionError: another process owns it, or it cannot be written; on every rank.
    """
    file, problem = _lock(directory) if world.is_primary else (None, "")
    try:
        if world.any(bool(problem)):
            raise OptionError(str(directory), problem)
        yield
    finally:
        if file is not None:
            file.close()


def _lock(directory: Path) -> tuple[TextIO | None, str]:
    """The file that locks `directory`, and what forbids to go on."""
    file = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                return file, f"in use by {file.read().strip()}; wait for its end, or choose another directory"
            print(f"{directory}: locks do not work here ({error.strerror}); see that no second run uses it", flush=True)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}\n")
        file.flush()
        for unfinished in directory.glob("*.tmp"):  # of a process that was killed
            unfinished.unlink()
    except OSError as error:
        return file, f"cannot be written: {error.strerror}"
    return file, ""


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes `content` to `path`, which afterwards, power cut or not, is either new and whole or what it was before.

    Raises:
        OSError: it could not be written.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_verified(path: Path, content: bytes | memoryview) -> None:
    """`write_whole`, and before it the SHA-256 of `content` beside `path`: whatever stands there can be verified."""
    write_whole(digest_path(path), f"{hashlib.sha256(content).hexdigest()}  {path.name}\n".encode())
    write_whole(path, content)


def is_intact(path: Path) -> bool:
    """Whether `path` holds the bytes whose SHA-256 stands beside it."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == read_digest(path)
    except OSError:
        return False


def digest_path(path: Path) -> Path:
    """Where the SHA-256 of `path` stands."""
    return path.with_name(path.name + ".sha256")


def read_digest(path: Path) -> str | None:
    """The SHA-256 that stands beside `path`, None where none can be read."""
    try:
        return read_regular(digest_path(path))[:64].decode()
    except (OptionError, UnicodeDecodeError):
        return None


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Opens a file to read, but no pipe, device or directory, which could block or never end.

    Args:
        flags: more of `os.open`'s.

    Raises:
        OSError: no such file, no permission, or not a regular file (behind any symbolic links).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(0, "a directory" if stat.S_ISDIR(mode) else "a pipe or device, not a regular file")
    return open(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """The content of `path`, which must be a file: a link may lead anywhere, a pipe or device may never end.

    Raises:
        OptionError: it is none, or cannot be read.
    """
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:
            return file.read()
    except MemoryError:
        raise OptionError(str(path), "larger than memory") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OptionError(str(path), "a symbolic link; name the file itself") from None
        if error.errno == errno.ENOENT:
            raise OptionError(str(path), "no checkpoint there") from None
        raise OptionError(str(path), f"cannot be read: {error.strerror}") from None
