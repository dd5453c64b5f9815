"""Reading of files from strangers: regular files only, of bounded size."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

from engine.runtime.errors import UserError


def open_regular(path: str | Path, flags: int = 0, mode: str = "rb") -> Any:
    """Opens a regular file, by default for reading; a pipe or device could block or never end.

    Args:
        flags: further flags of `os.open`. mode: mode of `open`.
    Raises:
        OSError: no such file, no permission, or not a regular file (behind any symbolic links).
    """
    return open(open_descriptor(path, flags), mode)


def open_descriptor(path: str | Path, flags: int = 0) -> int:
    """Returns a descriptor of a regular file; arguments and errors are those of `open_regular`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, 0o666)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise OSError(0, "a directory" if stat.S_ISDIR(kind) else "a pipe or device, not a regular file")
    return descriptor


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
