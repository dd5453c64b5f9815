"""Ownership of files: a program removes only what it made, in a directory that a marker file proves to be its own."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from engine.runtime.errors import UserError
from engine.runtime.files import write_atomically
from engine.runtime.reading import parse_json, read_bounded

MARKER = "made_by_eav.json"
"""Name of the marker file in a directory of our own."""

MAX_MARKER = 2**26
"""Bytes of a marker file."""


def claim(directory: Path, kind: str, names: Iterable[str]) -> None:
    """Makes `directory` one of our own, of this kind, whose files of these names may be removed later.

    The names of an earlier claim of the same kind stay valid.

    Raises:
        UserError: it holds files, and no marker of this kind. OSError: it cannot be made or written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    known = _names(directory, kind)
    if known is None and any(path.name != f"{MARKER}.tmp" for path in directory.iterdir()):  # left by a killed process
        raise UserError(f"{directory}: holds files that are not of a {kind} of this program; name another directory")
    if not (names := {*names}) <= (known or set()) or known is None:
        content = {"kind": kind, "names": sorted(names | (known or set()))}
        write_atomically(directory / MARKER, json.dumps(content).encode())


def owned_files(directory: Path, kind: str) -> list[Path]:
    """Returns the regular files in `directory` that a claim of this kind names; none where there is no such claim."""
    if not (names := _names(directory, kind)):
        return []
    with os.scandir(directory) as entries:  # the claim may name far more files than there are
        return sorted(directory / x.name for x in entries if x.name in names and x.is_file(follow_symlinks=False))


def _names(directory: Path, kind: str) -> set[str] | None:
    """Returns the names that the marker of this kind in `directory` holds; None: there is no such marker."""
    try:
        content = parse_json(read_bounded(directory / MARKER, MAX_MARKER), directory / MARKER)
        if content["kind"] != kind or not all(isinstance(name, str) for name in content["names"]):
            return None
        return {*content["names"]}
    except (UserError, FileNotFoundError, LookupError, TypeError):
        return None
