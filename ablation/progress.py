"""Progress of a sweep: runs that are finished, those under way with their last line, and the time that is left."""

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, Self

import torch
from tqdm import tqdm

from ablation.cases import Case
from ablation.settings import Setting, in_order
from attention.options import OptionError
from bench.timing import time_rounds
from bench.workload import Subject, Workload
from engine.config.schema import Data, Run, num_channels
from engine.data.splits import open_split
from engine.objectives import choose_objective
from engine.reporting.metrics import find_records
from engine.runtime.errors import ConfigError, UserError
from engine.runtime.locks import is_locked
from engine.runtime.provenance import device_name
from engine.runtime.reading import open_regular
from engine.runtime.terminal import CONSOLE
from engine.runtime.text import one_line
from models import create_model

ROUNDS = 2
"""Rounds in which a step is timed."""

IMAGES = 8
"""Images of a timed step, at most."""

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


class Estimate:
    """Runs of a sweep that are finished, and the time that the others take.

    A run that has begun goes on at its speed. Others take as long, by epochs, as finished runs of the same row, or else
    of all rows, or else as those that have begun.
    """

    def __init__(self, settings: Sequence[Setting]):
        self.settings, self.cases = settings, in_order(settings)
        self.finals: dict[Path, Mapping[str, Any]] = {}

    def look(self) -> int:
        """Looks which runs have finished, and returns how many."""
        for case in self.cases:
            if case.directory not in self.finals and (final := case.result()):
                self.finals[case.directory] = final
        return len(self.finals)

    def seconds_left(self) -> float | None:
        """Returns the seconds that all unfinished runs take together; None if no run tells."""
        rows = [[(case, self._speed(case)) for case in setting.cases] for setting in self.settings]
        begun = [[(case, speed) for case, speed in row if speed] for row in rows]
        finished = [[pair for pair in row if pair[0].directory in self.finals] for row in begun]
        finished, begun = (
            [[speed.of_epoch(case) for case, speed in row] for row in each] for each in (finished, begun)
        )
        every = [*chain(*finished)] or [*chain(*begun)]
        if not every:
            return None
        total = 0.0
        for setting, row, own in zip(self.settings, rows, finished, strict=True):
            whole = setting.run.schedule.epochs * fmean(own or every)
            total += sum(whole if speed is None else speed.left for _, speed in row)
        return total

    def _speed(self, case: Case) -> "Speed | None":
        """Returns the speed of a run by its records; None if it has made no step."""
        if final := self.finals.get(case.directory):
            return Speed(final["elapsed_seconds"], 0.0) if "elapsed_seconds" in final else None
        records = find_records(case.directory)
        totals = [record["total_steps"] for record in records if record["kind"] == "start" and "total_steps" in record]
        step, elapsed = (records[-1].get(key) for key in ("step", "elapsed_seconds")) if totals else (0, 0)
        if not step or not elapsed:
            return None
        return Speed(elapsed * totals[-1] / step, elapsed * max(0, totals[-1] - step) / step)


class Speed(NamedTuple):
    """Seconds of a run that has begun: of the whole, and of what is left of it."""

    whole: float
    left: float

    def of_epoch(self, case: Case) -> float:
        """Returns the seconds of an epoch."""
        return self.whole / case.run.schedule.epochs


def estimate_sweep(settings: Sequence[Setting], world_size: int) -> str:
    """Returns the lines of a dry run: how many runs, their seeds or folds, and how long they take.

    If no run has made a step, one of the first row is timed, with `world_size` devices as fast as the one here.
    """
    estimate = Estimate(settings)
    finished, (option, values) = estimate.look(), settings[0].replicates
    head = f"{len(estimate.cases)} runs of {len(settings)} rows, {option} {', '.join(map(str, values))};"
    head += f" {finished} are finished."
    if finished == len(estimate.cases):
        return head
    if (seconds := estimate.seconds_left()) is not None:
        speed = "at the speed of the runs so far"
        return f"{head}\nThe others take about {duration(seconds)}, one after the other, {speed}."
    try:
        seconds, how = timed_seconds(settings, world_size)
    except (OptionError, UserError) as error:
        return f"{head}\nNo estimate of their time: {error}"
    return f"{head}\nThey take about {duration(seconds)}, one after the other: {how}."


def timed_seconds(settings: Sequence[Setting], world_size: int) -> tuple[float, str]:
    """Times a step of the first row here, and returns the seconds of all unfinished runs, and how they were found.

    Raises:
        OptionError, UserError: the training images cannot be read, or the model not be trained by a plain step.
    """
    images = 0.0
    for setting in settings:
        runs = sum(not case.result() for case in setting.cases)
        share = setting.costs.macs / settings[0].costs.macs
        images += runs * setting.run.schedule.epochs * count_images(setting.run) * share
    seconds, machine = seconds_per_image(settings[0].run)
    total = images * seconds / world_size
    how = f"a training step of the first row was timed on {machine}"
    return total, f"{how}; other rows in proportion to their multiply-accumulates; without data loading and evaluation"


def count_images(run: Run) -> int:
    """Returns the number of training images of an epoch."""
    if (drawn := choose_objective(run).draw(run, True)) is not None:
        return len(drawn[0])
    return count_files(run.data)


@functools.cache
def count_files(data: Data) -> int:
    """Returns the number of training images in files."""
    return len(open_split(data, "train_split"))


def device_of(run: Run) -> torch.device:
    """Returns the device on which a run would be trained here."""
    return torch.device("cuda" if run.train.device != "cpu" and torch.cuda.is_available() else "cpu")


def machine_of(device: torch.device) -> str:
    """Returns the name of the device, and the number of threads of a processor."""
    threads = torch.get_num_threads()
    return device_name(device) + (f" ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else "")


def seconds_per_image(run: Run) -> tuple[float, str]:
    """Times training steps of random images, and returns the seconds for an image, and the name of the device."""
    device, images, channels = device_of(run), min(IMAGES, run.train.total_batch_size), num_channels(run)

    def example(model: Any, size: Any, batch: int, place: torch.device | str) -> tuple[torch.Tensor]:
        if run.model.get("vocab_size"):
            return (torch.randint(run.model["vocab_size"], (batch, channels, *size), device=place),)
        return (torch.randn(batch, channels, *size, device=place),)

    side = run.model["img_size"]
    size = (side, side) if isinstance(side, int) else tuple(side)
    build = functools.partial(create_model, attention=run.attention, **run.model)
    subject = Subject(str(run.model["name"]), run.train.kernels, lambda size: build(), example)
    try:
        step = Workload(subject, size, images, "train", run.train.amp or "fp32", "eager", device)
    except (RuntimeError, TypeError) as error:  # a model that takes more than images
        raise ConfigError(f"a step cannot be timed: {error}") from None
    seconds = median(time_rounds({"step": step.call}, ROUNDS, device, sample_seconds=0).seconds["step"])
    return seconds / images, f"{machine_of(device)} with {images} images"


def duration(seconds: float) -> str:
    """Formats a duration as 0:12:00."""
    return str(timedelta(seconds=round(seconds)))


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
        """Shows what has changed, if it is time to look; called about once a second."""
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
