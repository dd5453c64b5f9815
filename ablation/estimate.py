"""Time that the runs of a sweep take: by finished runs, by those that have begun, or by a timed step."""

import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

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
from engine.runtime.provenance import device_name
from models import create_model

ROUNDS = 2
"""Rounds in which a step is timed."""

IMAGES = 8
"""Images of a timed step, at most."""


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
    """Seconds of a run that has begun: `whole`, from start to end, and `left`, until its end."""

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


def seconds_per_image(run: Run) -> tuple[float, str]:
    """Times training steps of random images, and returns the seconds for an image, and how they were measured."""
    device = torch.device("cuda" if run.train.device != "cpu" and torch.cuda.is_available() else "cpu")
    images, channels, threads = min(IMAGES, run.train.total_batch_size), num_channels(run), torch.get_num_threads()

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
    processor = f" ({threads} thread{'s' * (threads > 1)})" if device.type == "cpu" else ""
    return seconds / images, f"{device_name(device)}{processor} with {images} images"


def duration(seconds: float) -> str:
    """Formats a duration as 0:12:00."""
    return str(timedelta(seconds=round(seconds)))
