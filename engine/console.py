"""What the console shows of a run, kept in `console.log` of its directory."""

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

CONSOLE = "console.log"
"""File of a run directory."""


def append_line(directory: Path, line: str) -> None:
    """Adds a line to the console log of `directory`; one that cannot be written is left out, as the console has it."""
    with suppress(OSError), (directory / CONSOLE).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{line}\n")


class ConsoleLog:
    """A context in which every line that this process prints, on stdout or stderr, also goes into a file.

    Lines wait until `keep` names the file. Of a line that is drawn over and over, such as a progress bar, it has the
    last state.
    """

    def __enter__(self) -> "ConsoleLog":
        self.directory: Path | None = None
        self.waiting: list[str] = []
        self.streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (Copied(stream, self.add) for stream in self.streams)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.stdout, sys.stderr = self.streams
        if error is not None and not isinstance(error, SystemExit):  # Python shows it later
            self.add("".join(traceback.format_exception(error)).rstrip())

    def keep(self, directory: Path) -> None:
        """Appends what was printed, and what will be, to `CONSOLE` in `directory`."""
        self.directory = directory
        for line in self.waiting:
            self.add(line)

    def add(self, line: str) -> None:
        """Adds a line to the file alone."""
        if self.directory is None:
            self.waiting.append(line)
        else:
            append_line(self.directory, line)


class Copied:
    """The text stream `stream`, whose complete lines also go to `add`."""

    def __init__(self, stream: TextIO, add: Callable[[str], None]):
        self.stream, self.add, self.line = stream, add, ""

    def write(self, text: str) -> int:
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            self.add(line.rpartition("\r")[2])
        self.line = self.line[self.line.rfind("\r") + 1 :]
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
