"""Files, written completely or not at all, and results for the user."""

import csv
import errno
import io
import os
import re
import secrets
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.runtime.errors import UserError
from engine.runtime.reading import open_descriptor

TOKEN = f"eav-{secrets.token_hex(16)}"
"""Random part of the names of this process's unfinished files, which no other process knows: they are its own."""


class FailedAfterReplacing(OSError):
    """A failure after a file was replaced: files are whole, but a power cut may undo it. Nothing is rolled back."""


def write_atomically(path: Path, content: bytes | memoryview | Iterator[bytes], sync: bool = True) -> None:
    """Writes `content` to `path` atomically: after a crash or power cut, it has either its new or its old content.

    Args:
        content: all bytes, or parts of them. sync: wait until it is on disk; without it, a power cut may leave neither.

    Raises:
        FailedAfterReplacing: it has its new content, which a power cut may undo. OSError: it could not be written.
    """
    unfinished = path.with_name(f".{TOKEN}.{secrets.token_hex(8)}")
    with naming(path), unfinished.open("xb") as file:  # exclusively: it is nobody else's
        try:
            file.writelines(content if isinstance(content, Iterator) else [content])
            file.flush()
            if sync:
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    if sync:
        sync_directory(path.parent)


def remove_unfinished(directory: Path, token: str) -> None:
    """Removes the files in `directory` that the process whose `TOKEN` this is was writing when it was killed."""
    for path in directory.iterdir():
        if re.fullmatch(rf"\.{re.escape(token)}\.[0-9a-f]{{16}}", path.name):
            path.unlink(missing_ok=True)


def append_whole(path: Path, content: bytes, sync: bool = False) -> None:
    """Adds `content` to the regular file at `path`, all of it or nothing, and makes the file if there is none.

    What a failed write has added is cut off again. If that fails too, or the process is killed, a part may stay.

    Args:
        sync: wait until it is on disk.

    Raises:
        OSError: it could not be written; names the file.
    """
    with naming(path):
        descriptor = open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            end, rest = os.fstat(descriptor).st_size, memoryview(content)
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                if sync:
                    os.fsync(descriptor)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context in which an OSError names `path`."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


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


def check_directory(directory: Path) -> None:
    """Checks in advance, and makes nothing, that the directory that --output names exists or can be made.

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
            raise UserError(f"--output {directory}: cannot be made: {above} is not writable") from None
    except OSError as error:
        raise UserError(f"--output {directory}: cannot be made: {error.strerror}") from None


def make_directory(directory: Path, files: Iterable[str], option: str) -> None:
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


def dicts_to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> bytes:
    """Returns the content of a CSV file with a line for each row, column -> value.

    Args:
        columns: None: those of the first row.
    """
    columns = list(rows[0]) if columns is None else columns
    return to_csv(columns, ([row[name] for name in columns] for row in rows))


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
