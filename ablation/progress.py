"""Progress of a sweep: runs that are finished, those under way with their last line, and the time that is left."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tqdm import tqdm

from ablation.estimate import Estimate, duration
from ablation.settings import Setting
from engine.runtime.locks import is_locked
from engine.runtime.reading import open_regular
from engine.runtime.terminal import CONSOLE
from engine.runtime.text import one_line

LOOK_SECONDS = 2.0
"""Interval at which a terminal shows the runs under way."""

LEFT_SECONDS = 10.0
"""Interval at which a terminal shows the time left."""

REPORT_SECONDS = 600.0
"""Interval at which the runs under way are printed where there is no terminal."""

MOST_LINES = 8
"""Most runs under way that are shown."""

TAIL = 4096
"""Bytes at the end of a console log that are searched for its last line."""


class Progress:
    """Context that shows the progress of a sweep: in a terminal, lines at its bottom; elsewhere, lines now and then.

    Args:
        announces: print when runs begin and end, as worker processes write into logs of their own.
    """

    def __init__(self, settings: Sequence[Setting], announces: bool = False):
        self.estimate, self.announces = Estimate(settings), announces
        self.is_live = sys.stderr.isatty() and sys.stdout.isatty()
        self.finished, self.left, self.shown = self.estimate.look(), None, set[Path]()
        self.looked = self.reckoned = self.reported = -1e9
        self.lines: list[tqdm] = []

    def __enter__(self) -> Self:
        self.reported = time.monotonic()
        if self.is_live:
            self.lines = [tqdm(total=0, bar_format="{desc}", leave=False, dynamic_ncols=True)]
            self.tick()
        return self

    def __exit__(self, *error: object) -> None:
        for line in reversed(self.lines):
            line.close()
        self.lines = []

    def write(self, text: str, error: bool = False) -> None:
        """Prints `text`, above the lines at the bottom of a terminal."""
        stream = sys.stderr if error else sys.stdout
        if self.is_live:
            tqdm.write(text, file=stream)
        else:
            print(text, file=stream, flush=True)

    def tick(self) -> None:
        """Shows changes at intervals of `LOOK_SECONDS`; called about once a second."""
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS or not (self.is_live or self.announces):
            return
        self.looked, before = now, self.finished
        under_way = self.under_way()
        if self.announces:
            self.announce(under_way)
        if self.finished != before or now - self.reckoned > LEFT_SECONDS:
            self.reckoned, self.left = now, self.reckon(len(under_way))
        if self.is_live:
            self.draw([f"run {self.number(case)}: {last_line(case)}" for case in under_way])
        elif self.finished != before or now - self.reported > REPORT_SECONDS:
            self.reported = now
            self.write(self.summary())
            for directory in under_way[:MOST_LINES]:
                self.write(f"  run {self.number(directory)}: {last_line(directory)}")

    def end_run(self) -> None:
        """Prints, where there is no terminal, how many runs are finished."""
        self.finished = self.estimate.look()
        if not self.is_live:
            self.left = self.reckon(1)
            self.write(self.summary())

    def under_way(self) -> list[Path]:
        """Returns the directories of the runs that any process trains, and looks which have finished."""
        self.finished = self.estimate.look()
        waiting = (case.directory for case in self.estimate.cases if case.directory not in self.estimate.finals)
        return [directory for directory in waiting if is_locked(directory)]

    def announce(self, under_way: Sequence[Path]) -> None:
        """Prints runs that have begun or finished since the last look."""
        for directory in under_way:
            if directory not in self.shown:
                self.write(f"run {self.number(directory)}: {directory}")
        for directory in self.shown - {*under_way}:
            final = self.estimate.finals.get(directory)
            top1 = f", top-1 {final['top1']:.2f} %" if final and final.get("top1") is not None else ""
            self.write(f"run {self.number(directory)} " + (f"is finished{top1}" if final else "has ended unfinished"))
        self.shown = {*under_way}

    def number(self, directory: Path) -> str:
        """Returns the number of a run of all: "3/18"."""
        directories = [case.directory for case in self.estimate.cases]
        return f"{directories.index(directory) + 1}/{len(directories)}"

    def reckon(self, under_way: int) -> float | None:
        """Returns the seconds that the sweep still takes with so many runs at the same time."""
        seconds = self.estimate.seconds_left()
        return None if seconds is None else seconds / max(1, under_way)

    def summary(self) -> str:
        """Returns "3 of 18 runs finished, about 0:12:00 left"."""
        left = "" if self.left is None else f", about {duration(self.left)} left"
        return f"{self.finished} of {len(self.estimate.cases)} runs finished{left}"

    def draw(self, texts: Sequence[str]) -> None:
        """Draws the lines at the bottom of the terminal."""
        texts = [self.summary(), *texts[:MOST_LINES]]
        while len(self.lines) < len(texts):
            self.lines.append(tqdm(total=0, bar_format="{desc}", leave=False, dynamic_ncols=True))
        texts += [""] * (len(self.lines) - len(texts))
        for line, text in zip(self.lines, texts, strict=True):
            line.set_description_str(text)


def last_line(directory: Path) -> str:
    """Returns the last line of a run's console log, with single spaces; "starting" if there is none."""
    try:
        with open_regular(directory / CONSOLE) as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        lines = []
    lines = [line for line in lines if line.strip()]
    return one_line(" ".join(lines[-1].split())) if lines else "starting"
