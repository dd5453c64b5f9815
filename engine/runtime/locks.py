"""Locks of run directories, and of files that several processes write."""

import errno
import fcntl
import io
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from engine.runtime.errors import UserError
from engine.runtime.files import TOKEN, remove_unfinished
from engine.runtime.ownership import claim
from engine.runtime.reading import open_regular
from engine.runtime.text import one_line

if TYPE_CHECKING:
    from engine.runtime.distributed import World

POLL_SECONDS = 0.1
"""Interval (s) at which a process that waits for a lock tries again."""


@contextmanager
def lock_directory(directory: Path, world: "World", names: Collection[str] = ()) -> Iterator[None]:
    """Creates `directory`, locks it and claims its files `names`: no other run can use it until this process ends,
    however it ends.

    The lock is a POSIX lock on the file `lock`, whose text names its process. On a network file system it
    holds between nodes if the file system supports that: NFSv4, GPFS, Lustre mounted with `flock`.

    Raises:
        UserError: another process holds the lock, or the directory cannot be written, or has such files of others; on
            every rank.
    """
    file, problem = _lock(directory, names) if world.is_primary else (None, "")
    try:
        if problem := world.first(problem):
            raise UserError(problem)
        yield
    finally:
        if file is not None:
            file.close()


def _lock(directory: Path, names: Collection[str]) -> tuple[TextIO | None, str]:
    """Returns the open file that holds the lock of `directory`, and a problem ("" if there is none)."""
    file = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = _open_lock(directory / "lock")
        is_held = _try_lock(file)
        if is_held is False:
            remedy = "wait for its end, or choose another directory"
            return file, f"{directory}: in use by {lock_holder(directory)}; {remedy}"
        if is_held is None:
            print(f"{directory}: locks do not work here; see that no second run uses it", flush=True)
        if not re.match(r"process \d+ on |$", former := file.read(4096)):  # empty while it is made, and may be cut
            return file, f"{directory / 'lock'}: a file of another program; move it away, or choose another directory"
        claim(directory, names)
        if is_held and (token := re.search(r"^unfinished (\S+)\n", former, re.MULTILINE)):
            remove_unfinished(directory, token[1])
        file.seek(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}\nunfinished {TOKEN}\n")
        file.truncate()
    except UserError as error:
        return file, str(error)
    except OSError as error:
        return file, f"{directory}: cannot be written: {error.strerror}"
    return file, ""


def _open_lock(path: Path) -> TextIO:
    """Opens a lock, which is made if need be; a pipe in its place would block."""
    return io.TextIOWrapper(open_regular(path, os.O_RDWR | os.O_CREAT, "r+b"), errors="replace")


def _try_lock(file: TextIO) -> bool | None:
    """Returns whether this process now has the lock `file`, or another one; None: locks do not work there."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def lock_holder(directory: Path) -> str:
    """Returns the process that the lock of `directory` names, in one printable line; "" if it cannot be read."""
    try:
        with io.TextIOWrapper(open_regular(directory / "lock"), errors="replace") as file:
            return one_line(file.read(200).partition("\n")[0].strip())
    except OSError:
        return ""


@contextmanager
def hold_lock(path: Path, wait: bool, minutes: float = 10.0) -> Iterator[bool]:
    """Context that locks the file `path` if it is free, or with `wait` as soon as it is.

    A signal whose handler raises ends the wait.

    Args:
        minutes: longest wait.
    Yields:
        Whether this process has the lock; also True if locks do not work.
    Raises:
        UserError: it cannot be opened; or another process has held it for the whole wait.
    """
    try:
        lock = _open_lock(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be locked: {error.strerror}") from None
    with lock as file:
        deadline = time.monotonic() + 60 * minutes
        while (is_held := _try_lock(file)) is False and wait:
            if time.monotonic() > deadline:
                remedy = "end that process (`fuser {path}` names it), then run the command again"
                raise UserError(f"{path}: another process has held this lock for {minutes:g} minutes; {remedy}")
            time.sleep(POLL_SECONDS)
        yield is_held is not False


def is_locked(directory: Path) -> bool:
    """Returns whether a run in another process holds the lock of `directory`; False if locks do not work."""
    try:
        with open_regular(directory / "lock") as file:
            os.lockf(file.fileno(), os.F_TEST, 0)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False
