"""Measurements that a directory keeps, so that the same command continues after an interruption."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.runtime.errors import UserError
from engine.runtime.files import append_whole, explain_unwritten
from engine.runtime.reading import MAX_TEXT, parse_json, read_bounded


class Measurements:
    """File of measurements with a line of JSON for each. Several processes may append to it.

    The key of a measurement is everything that it depends on, the code included.

    Args:
        path: the file, which need not exist. basis: values that all measurements of this process depend on.
    """

    def __init__(self, path: Path, basis: Mapping[str, Any]):
        self.path, self.basis = path, basis
        self.added: dict[str, dict[str, Any]] = {}

    def key(self, **question: Any) -> str:
        """Returns a digest, of 16 digits, of a question and of all that its answer depends on."""
        text = json.dumps({**self.basis, **question}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def find(self, key: str) -> Any:
        """Returns the values of the measurement `key`, None if there is none; a UserError: the file cannot be read."""
        if key in self.added:
            return self.added[key]
        lines = read_bounded(self.path, MAX_TEXT).splitlines() if self.path.exists() else []
        for line in lines:
            with suppress(UserError):  # the part of a line that a killed process has written
                entry = parse_json(line, self.path)
                if isinstance(entry, dict) and entry.get("key") == key:
                    return entry.get("values")
        return None

    def add(self, key: str, values: Mapping[str, Any]) -> None:
        """Adds a measurement; a UserError if it cannot be written."""
        with explain_unwritten(self.path):
            append_whole(self.path, f"{json.dumps({'key': key, 'values': values})}\n".encode())
        self.added[key] = dict(values)
