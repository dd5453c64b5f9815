"""Files, written completely or not at all: locks of run directories, files with a SHA-256, results for the user."""

import csv
import errno
import fcntl
import hashlib
import io
import os
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from engine.runtime.distributed import World
from engine.runtime.errors import UserError
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
        if world.any(bool(problem)):
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
                file.seek(0)
                holder = one_line(file.read(200).strip())
                return file, f"in use by {holder}; wait for its end, or choose another directory"
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


class FailedAfterReplacing(OSError):
    """A failure after a file was replaced: files are whole, but a power cut may undo it. Nothing is rolled back."""


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Writes `content` to `path` atomically: after a crash or power cut, it has either its new or its old content.

    Raises:
        FailedAfterReplacing: it has its new content, which a power cut may undo. OSError: it could not be written.
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
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Waits until the names in `directory` are on disk, where its file system can do that.

    Raises:
        FailedAfterReplacing: the disk reports an error.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise FailedAfterReplacing(error.errno, error.strerror, str(directory)) from error


def check_output(path: Path, option: str, suffixes: Collection[str]) -> None:
    """Checks in advance that `write_file` could write to the `path` that an option names.

    Raises:
        UserError: it ends in none of `suffixes`, or cannot be written.
    """
    if path.suffix not in suffixes:
        raise UserError(f"{path}: {option} writes {' or '.join(suffixes)}; name such a file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: no directory {str(path.parent)!r}")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def check_directory(directory: Path, option: str = "--output") -> None:
    """Checks in advance, and makes nothing, that the directory that an option names exists or can be made.

    Raises:
        UserError: it is a file, its name is too long, or the directory above it cannot be written.
    """
    try:
        if not os.path.lexists(directory):
            directory.stat()  # says why
        elif not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except FileNotFoundError:
        above = next(parent for parent in directory.absolute().parents if parent.exists())
        if not os.access(above, os.W_OK | os.X_OK):
            raise UserError(f"{option} {directory}: cannot be made: {above} is not writable") from None
    except OSError as error:
        raise UserError(f"{option} {directory}: cannot be made: {error.strerror}") from None


def make_output(directory: Path, files: Iterable[str], option: str = "--output") -> None:
    """Makes the directory that an option names, and checks that these files can be written in it.

    Raises:
        UserError: it cannot be made, or a file cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {directory}: cannot be made: {error.strerror}") from None
    for file in files:
        check_output(directory / file, option, [Path(file).suffix])


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """Returns the content of a CSV file; names of files keep their bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")


def write_file(path: Path, content: bytes) -> None:
    """Writes `content`, a result for the user, to `path` atomically.

    Raises:
        UserError: it cannot be written; an existing file is unchanged.
    """
    with explain_unwritten(path):
        write_atomically(path, content)


@contextmanager
def explain_unwritten(path: Path) -> Iterator[None]:
    """Context in which a failure to write `path` becomes a UserError."""
    try:
        yield
    except FailedAfterReplacing as error:
        raise UserError(f"{path}: replaced, but perhaps not on the disk: {error.strerror}; write it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}; what was there is unchanged") from error


def write_together(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes all of `files`, or none if one cannot be written."""
    with (
        explain_unwritten(directory),
        tempfile.TemporaryDirectory(dir=directory.parent, ignore_cleanup_errors=True) as unfinished,
    ):
        for name, content in files.items():
            write_atomically(Path(unfinished, name), content)
        directory.mkdir(exist_ok=True)
        if folders := [name for name in files if (directory / name).is_dir()]:
            raise IsADirectoryError(errno.EISDIR, f"{folders[0]} is a directory")
        for number, name in enumerate(files):
            digest_path(directory / name).unlink(missing_ok=True)  # the digest of a replaced file
            try:
                os.replace(Path(unfinished, name), directory / name)
            except OSError as error:
                if number == 0:
                    raise
                raise FailedAfterReplacing(error.errno, f"{name}: {error.strerror}") from error
        sync_directory(directory)


def write_verified(path: Path, content: bytes | memoryview) -> None:
    """Writes `content` to `path`, and its SHA-256 beside it.

    While a file is replaced, the digests of its old and its new content both stand beside it: after an interruption or
    a failure at any time, `path` has one of the two, and is intact. Errors are those of `write_atomically`.
    """
    new, old, known = hashlib.sha256(content).hexdigest(), _sha256(path), read_digests(path)
    valid = [old] if old and (old in known or not known) else []
    _write_digests(path, [new, *valid])
    write_atomically(path, content)
    if valid:
        with suppress(OSError):  # the old digest may stay: the file is there
            _write_digests(path, [new])


def _write_digests(path: Path, digests: Sequence[str]) -> None:
    """Writes `digests` beside `path`, in the format of sha256sum."""
    write_atomically(digest_path(path), "".join(f"{digest}  {path.name}\n" for digest in digests).encode())


def _sha256(path: Path) -> str | None:
    """Returns the SHA-256 of `path`, None if it cannot be read."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def is_intact(path: Path) -> bool:
    """Returns whether the SHA-256 of `path` stands beside it."""
    return _sha256(path) in read_digests(path)


def digest_path(path: Path) -> Path:
    """Returns the path of the file with the SHA-256 of `path`."""
    return path.with_name(path.name + ".sha256")


def read_digests(path: Path) -> list[str]:
    """Returns the SHA-256 beside `path`: none if it cannot be read, two while `path` is replaced."""
    try:
        text = read_regular(digest_path(path), 1024).decode(errors="replace")
    except UserError:
        return []
    return [line[:64] for line in text.split("\n")]


def open_regular(path: str | Path, flags: int = 0, mode: str = "rb") -> Any:
    """Opens a regular file, by default for reading; a pipe or device could block or never end.

    Args:
        flags: further flags of `os.open`. mode: mode of `open`.
    Raises:
        OSError: no such file, no permission, or not a regular file (behind any symbolic links).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, 0o666)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise OSError(0, "a directory" if stat.S_ISDIR(kind) else "a pipe or device, not a regular file")
    return open(descriptor, mode)


def read_bounded(path: Path, limit: int) -> bytes:
    """Reads a regular file of at most `limit` bytes.

    Raises:
        UserError: it is no such file, or cannot be read. FileNotFoundError: there is none.
    """
    try:
        with open_regular(path) as file:
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise UserError(f"{path}: larger than {limit:,} bytes")
    return content


def read_regular(path: Path, limit: int = -1) -> bytes:
    """Reads `path`, which must be a regular file: a link may lead anywhere, a pipe or device may never end.

    Args:
        limit: bytes to read at most; -1: all.

    Raises:
        UserError: it is not a regular file, or cannot be read.
    """
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:
            return file.read(limit)
    except MemoryError:
        raise UserError(f"{path}: larger than memory") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path}: a symbolic link; name the file itself") from None
        if error.errno == errno.ENOENT:
            raise UserError(f"{path}: no checkpoint there") from None
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
