"""Files in a store behind a URL: each is read whole, again and again until it is right."""

import hashlib
import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine.data.images import BrokenImage, DataError
from engine.data.layout import LayoutError
from engine.runtime.errors import UserError
from engine.runtime.reading import open_regular
from engine.runtime.text import describe_error, one_line

NUM_WRONG = 3
"""Number of times that a file may come with wrong bytes, until it counts as damaged."""

FIRST_SHARE = 1 / 8
"""Share of the patience that the first attempt may take; every further attempt may take twice as long."""

PAUSES = (0.25, 10.0)
"""Time (s) between attempts: at first, doubled each time, and at most."""

PASSING = (408, 425, 429)
"""HTTP statuses of 400 to 499 that pass: timeout, too early, too many requests."""

ALGORITHMS = ("sha256", "sha1", "blake2b", "md5")
"""Digests of an index that are compared, the strongest first."""

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
            limit: most bytes that are read; one more tells that the file is larger.
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
                    reason = "no answer" if isinstance(error, TimeoutError) else describe_error(error)
                    asked = _asked(error)
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
    """Reads a file like `_read_once` from an HTTP server, which may send too much or compress it."""
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
    """Returns whether waiting is useless."""
    status = getattr(error, "status", 0) or 0
    is_known = isinstance(error, FileNotFoundError | PermissionError | ValueError)
    return is_known or (400 <= status < 500 and status not in PASSING)


def _asked(error: Exception) -> float:
    """Returns the server's `Retry-After` (s); 0: it sends none."""
    headers = getattr(error, "headers", None)
    value = headers.get("Retry-After", "") if isinstance(headers, Mapping) else ""
    return float(value) if value.isdecimal() else 0.0
