"""Origin of a run directory: made on this machine, or brought to it by a copy, an archive or a download."""

import json
from pathlib import Path

from engine.runtime.errors import UserError
from engine.runtime.files import write_atomically
from engine.runtime.reading import parse_json, read_bounded

ORIGIN = "origin.json"
"""File in a run directory that holds the number (inode) that the file system gave the directory."""


def mark_origin(directory: Path) -> None:
    """Marks a run directory that begins as made here: its number stays when it is renamed, and no copy has it."""
    write_atomically(directory / ORIGIN, json.dumps({"directory": directory.stat().st_ino}).encode())


def is_made_here(path: Path) -> bool:
    """Returns whether `path` is a run directory that `mark_origin` has marked, and no copy of one."""
    try:
        there = parse_json(read_bounded(path / ORIGIN, 1000), path)
        return there == {"directory": path.stat().st_ino}
    except (UserError, OSError):
        return False
