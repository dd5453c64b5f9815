"""Locks of run directories, and of files that several processes write."""

import errno
import fcntl
import io
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.reading import open_regular
from engine.runtime.text import one_line


@contextmanager
def lock_directory(directory: Path, world: World) -> Iterator[None]:
    """Creates `directory` and locks it: no other run can use it until this process ends, however it ends.

    The lock is a POSIX lock on the file `lock`, whose text names its process. On a network file system it
    holds between nodes if the file system supports that: NFSv4, GPFS, Lustre mounted with `flock`.

    Raises:
        UserError: another process holds the lock, or the directory cannot be written; on every rank.
    """
    file, problem = _lock(directory) if world.is_primary else (None, "")
    try:
        if problem := world.first(problem):
            raise UserError(f"{directory}: {problem}")
        yield
    finally:
        if file is not None:
            file.close()


def _lock(directory: Path) -> tuple[TextIO | None, str]:
    """Returns the open file that holds the lock of `directory`, and a problem ("" if there is none)."""
    file = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = _open_lock(directory / "lock")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return file, f"in use by {lock_holder(directory)}; wait for its end, or choose another directory"
            print(f"{directory}: locks do not work here ({error.strerror}); see that no second run uses it", flush=True)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}\n")
        file.flush()
        for unfinished in directory.glob("*.tmp"):  # left by a killed process
            unfinished.unlink()
    except OSError as error:
        return file, f"cannot be written: {error.strerror}"
    return file, ""


def _open_lock(path: Path) -> TextIO:
    """Opens a lock, which is made if need be; a pipe in its place would block."""
    return io.TextIOWrapper(open_regular(path, os.O_RDWR | os.O_CREAT, "r+b"), errors="replace")


def lock_holder(directory: Path) -> str:
    """Returns the process that the lock of `directory` names, in one printable line; "" if it cannot be read."""
    try:
        with io.TextIOWrapper(open_regular(directory / "lock"), errors="replace") as file:
            return one_line(file.read(200).strip())
    except OSError:
        return ""


@contextmanager
def hold_lock(path: Path, wait: bool) -> Iterator[bool]:
    """Context that locks the file `path` if it is free, or with `wait` as soon as it is.

    Yields:
        Whether this process has the lock; also True if locks do not work.
    Raises:
        UserError: it cannot be opened.
    """
    try:
        lock = _open_lock(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be locked: {error.strerror}") from None
    with lock as file:
        is_held = True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            is_held = error.errno not in (errno.EACCES, errno.EAGAIN)
        yield is_held


def is_locked(directory: Path) -> bool:
    """Returns whether a run in another process holds the lock of `directory`; False if locks do not work."""
    try:
        with open_regular(directory / "lock") as file:
            os.lockf(file.fileno(), os.F_TEST, 0)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False
