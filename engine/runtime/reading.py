"""Reading of files from strangers: regular files only, of bounded size, and any failure of a parser is one line."""

import csv
import errno
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attention.options import OptionError
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error

MAX_TEXT = 2**26
"""Bytes of a text file (JSON, CSV) that is read whole."""


@contextmanager
def parsing(place: str | Path, remedy: str = "", refuse: Callable[[str], Exception] = UserError) -> Iterator[None]:
    """Context of a parser, whose failure becomes one line that begins with `place`.

    A parser of damaged input raises what it likes: RecursionError, OverflowError, MemoryError, csv.Error. Errors that
    are such a line already pass.

    Args:
        remedy: what the user can do. refuse: class of the error.
    """
    try:
        yield
    except (UserError, OptionError):
        raise
    except Exception as error:
        if isinstance(refuse, type) and isinstance(error, refuse):
            raise
        unread = error.strerror if isinstance(error, OSError) else None
        problem = f"cannot be read: {unread}" if unread else f"damaged ({describe_error(error)})"
        raise refuse(f"{place}: {problem}{'; ' * bool(remedy)}{remedy}") from error


def parse_json(content: bytes | str, place: str | Path, remedy: str = "") -> Any:
    """Parses JSON from a stranger. UserError, beginning with `place`: it is none."""
    with parsing(place, remedy):
        return json.loads(content)


def read_csv(path: Path, remedy: str = "") -> list[dict[str, str]]:
    """Reads the rows of a CSV file, column -> text; a cell that a short row lacks is "".

    Raises:
        UserError: it is not there, cannot be parsed, or a row has more cells than the header.
    """
    with parsing(path, remedy):
        text = io.StringIO(read_bounded(path, MAX_TEXT).decode("utf-8-sig"), newline="")
        rows = list(csv.DictReader(text, restval="", strict=True))
        if long := next((number for number, row in enumerate(rows, 2) if None in row), None):
            raise ValueError(f"row {long} has more cells than the header")
        return rows


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
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, 0o666)
    except ValueError:  # a null character, or half of a pair of UTF-16
        raise OSError(errno.EINVAL, "a name that no file has") from None
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise OSError(0, "a directory" if stat.S_ISDIR(kind) else "a pipe or device, not a regular file")
    return descriptor


def read_bounded(path: Path, limit: int | None) -> bytes:
    """Reads a regular file of at most `limit` bytes; None: of any number that fits into memory.

    Raises:
        UserError: it is no such file, or cannot be read. FileNotFoundError: there is none.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read() if limit is None else file.read(limit + 1) if size <= limit else b""
    except FileNotFoundError:
        raise
    except MemoryError:
        raise UserError(f"{path}: larger than memory") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if limit is not None and max(size, len(content)) > limit:
        raise UserError(f"{path}: larger than {limit:,} bytes")
    return content
