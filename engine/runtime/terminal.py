"""The terminal: the progress bar, and the console log in a run directory."""

import functools
import math
import os
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from engine.runtime.files import append_whole
from engine.runtime.text import one_line

# tqdm's own lock is a semaphore between processes. Since Python 3.14, a process that ends by an error leaves it to a
# tracker, which prints a warning after the error.
tqdm.set_lock(threading.RLock())

CONSOLE = "console.log"
"""File of a run directory."""

LINE_SECONDS = 30.0
"""Time (s) between two lines of progress where no bar can be redrawn."""

INDENT = " " * 7
"""Beginning of every line but the first of a line that a terminal has no room for."""


@functools.cache
def warn_once(text: str) -> None:
    """Prints a warning in one printable line on stderr, once for every text."""
    print(f"warning: {one_line(text)}", file=sys.stderr, flush=True)


class ConsoleLog:
    """Context in which every line that this process prints, on stdout or stderr, also goes into a file.

    Lines wait until `keep` names the file. Progress bars do not go into it.
    """

    def __enter__(self) -> "ConsoleLog":
        self.directory: Path | None = None
        self.waiting: list[str] = []
        self.streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (Copied(stream, self.add, bars=self.streams[1]) for stream in self.streams)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = self.streams
        if error is not None and not isinstance(error, SystemExit):  # Python prints it later
            self.add("".join(traceback.format_exception(error)).rstrip())

    def keep(self, directory: Path) -> None:
        """Appends all earlier and later output to `CONSOLE` in `directory`."""
        self.directory = directory
        for line in self.waiting:
            self.add(line)

    def add(self, line: str) -> None:
        """Adds a line to the file only."""
        if self.directory is None:
            self.waiting.append(line)
        else:
            with suppress(OSError):  # the console shows it anyway
                append_whole(self.directory / CONSOLE, f"{line}\n".encode(errors="backslashreplace"))


class Copied:
    """The text stream `stream`, whose complete lines also go to `add`, except lines that are redrawn: foreign bars.

    Args:
        bars: stream that shows the progress bars. They make way for every line.
    """

    def __init__(self, stream: TextIO, add: Callable[[str], None], bars: TextIO):
        self.stream, self.add, self.bars, self.line, self.unshown = stream, add, bars, "", ""

    def write(self, text: str) -> int:
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            if "\r" not in (line := line.removesuffix("\r")):
                self.add(line)
        complete, newline, rest = (self.unshown + text).rpartition("\n")
        self.unshown = rest
        self.show(complete + newline)
        return len(text)

    def flush(self) -> None:
        text, self.unshown = self.unshown, ""
        self.show(text)

    def show(self, text: str) -> None:
        """Writes `text` to the stream alone."""
        if text:
            with tqdm.external_write_mode(file=self.bars):
                self.stream.write(text)
                self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def print_fields(line: str) -> None:
    """Prints a line of fields, which two spaces separate; a terminal shows it on several lines if it is too long.

    A console log has it as one line.
    """
    stream = sys.stdout
    shown = break_line(line, (os.get_terminal_size(stream.fileno()).columns or 80) - 1) if stream.isatty() else line
    if isinstance(stream, Copied):
        stream.add(line)
        stream.show(f"{shown}\n")
    else:
        print(shown, flush=True)


def break_line(line: str, width: int) -> str:
    """Breaks a line between fields into lines of at most `width` characters, where that is possible."""
    first, *fields = line.split("  ")
    lines = [first]
    for field in fields:
        if len(lines[-1]) + 2 + len(field) <= width:
            lines[-1] += f"  {field}"
        else:
            lines.append(f"{INDENT}{field.lstrip()}")
    return "\n".join(lines)


def progress_bar(title: str, total: int, *, initial: int = 0) -> tqdm:
    """Returns a bar that counts `total` images, as wide as the terminal, which leaves nothing on the screen.

    It shows the title, the share done, the time left, images per second, and last what `set_postfix_str` adds. It is
    hidden if stderr is no terminal, or stdout is a pipe: `tee` would write its lines over the bar.
    """
    return tqdm(
        desc=title,
        total=total,
        initial=initial,
        leave=False,
        file=sys.stderr.bars if isinstance(sys.stderr, Copied) else sys.stderr,
        disable=_is_pipe(sys.stdout) or None,  # None: unless the file is a terminal
        dynamic_ncols=True,
        unit=" images",
        unit_scale=True,
        bar_format="{l_bar}{bar}| ETA {remaining}, {rate_noinv_fmt}{postfix}",
    )


def progress(title: str, total: int | None, unit: str, hidden: bool = False) -> tqdm:
    """Returns a bar that disappears at the end; for a pipe or a log, lines of progress."""
    kind: type[tqdm] = ProgressLines if not hidden and (_is_pipe(sys.stdout) or not sys.stderr.isatty()) else tqdm
    return kind(desc=title, total=total, unit=f" {unit}", leave=False, disable=hidden, dynamic_ncols=True)


class ProgressLines(tqdm):
    """Progress as a line on stderr every `LINE_SECONDS`, however long a single update takes."""

    def __init__(self, **options: Any):
        form = "{desc}: {n_fmt} of {total_fmt}{unit} in {elapsed}, {remaining} left{postfix}"
        super().__init__(**options, bar_format=form, delay=math.inf)
        self.ended = threading.Event()
        threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        while not self.ended.wait(LINE_SECONDS):
            print(self, file=sys.stderr, flush=True)

    def display(self, *_: Any, **__: Any) -> None:
        """Shows nothing: the thread does. There is nothing to clear either."""

    clear = display

    def close(self) -> None:
        self.ended.set()
        super().close()


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except OSError:  # it is no file
        return False
