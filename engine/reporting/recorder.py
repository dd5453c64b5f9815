"""Recorder of a run: writes its records to the console, `metrics.jsonl`, `epochs.csv` and TensorBoard, on the primary
rank only.

`metrics.jsonl` holds one JSON object per line: its kind, the epoch and step at which it was made, the time and images
that the run has taken so far (`engine.reporting.metrics.TOTALS`), and values. docs/logs.md explains them.
"""

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from engine.checkpoints.origin import ORIGIN, mark_origin
from engine.checkpoints.progress import Progress, Resumption, describe_place
from engine.config.schema import Run
from engine.config.yaml_files import dump_yaml
from engine.reporting.charts import Charts
from engine.reporting.console import SHOWN, format_values
from engine.reporting.metrics import CONFIG, EPOCHS, METRICS, EpochTable, epochs_csv, is_until, stream_records
from engine.reporting.prometheus import HEARTBEAT, Heartbeat
from engine.reporting.speed import StepSpeed
from engine.run.load import dump_run
from engine.runtime.distributed import World, precision
from engine.runtime.files import append_whole, naming, write_atomically
from engine.runtime.provenance import provenance
from engine.runtime.reading import open_regular
from engine.runtime.terminal import CONSOLE, LINE_SECONDS, print_fields, progress_bar
from engine.runtime.text import one_line

RUN_FILES = (CONFIG, METRICS, EPOCHS, HEARTBEAT, CONSOLE, ORIGIN)
"""Files that every run writes into its directory."""

NOTHING = Resumption()
"""A new run resumes from nothing."""


class SilentRecorder:
    """Recorder of the ranks that record nothing: it takes part in the measurement of speed, which is collective."""

    def __init__(self, directory: Path, run: Run, progress: Progress, total_steps: int, world: World):
        self.speed, self.step = StepSpeed(run, world), progress.step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Records how the run ends."""

    def start(self, epoch: int, processes: int, resumption: Resumption = NOTHING, **values: Any) -> None:
        """Records how the run starts, or resumes after `epoch` epochs, its configuration, and changes of options.

        A run that resumes says from where, and what differs: options, data, and since the last start code and machine.
        """

    def images(self, images: torch.Tensor) -> None:
        """Shows training images (B, C, H, W) as the model gets them; ignores integer tokens."""

    def begin_epoch(self, epoch: int) -> None:
        """Writes the table of the epochs before `epoch`, which counts from 1, and starts the clock of the next step.

        The time of evaluation and checkpoints is thus no part of a step.
        """
        self.speed.begin_step()

    def end_step(self) -> None:
        """Counts an update and its time."""
        self.speed.end_step()
        self.step += 1

    def train(self, epoch: int, **values: float) -> None:
        """Records `values` of the updates since the last such record, and their speed; `epoch` counts from 1."""
        self.speed.since_last()

    def eval(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation after `epoch` epochs."""

    def final(self, **values: float) -> None:
        """Records the end of the run and its median speed since it was started or resumed."""
        self.speed.median()

    def sync(self) -> None:
        """Waits until the records are on disk, so that no checkpoint outlives them."""

    def saved(self) -> None:
        """Notes the time of a checkpoint."""


class Recorder(SilentRecorder):
    """Writes the records of a run, on the primary rank; as a context manager, it also records how the run ends.

    Args:
        directory: of the run.
        progress: point from which the run goes on. Later records of an interrupted run are dropped, because they will
            be repeated, but the time that they took counts.
        total_steps: updates of the whole run.
    """

    def __init__(self, directory: Path, run: Run, progress: Progress, total_steps: int, world: World):
        super().__init__(directory, run, progress, total_steps, world)
        self.directory, self.run, self.total_steps, self.device = directory, run, total_steps, world.device
        self.progress, self.num_gpus, self.began = progress, 0, time.monotonic()
        self.images_seen, self.epochs, self.is_estimated = 0, EpochTable(), False
        self.former: dict[str, Any] = {}  # the last start
        self.spent = {"elapsed_seconds": 0.0, "gpu_hours": 0.0}
        self.metrics = directory / METRICS
        self.charts, self.heartbeat = Charts(directory, self.step), Heartbeat(directory)
        self._go_on()
        title, batch_size = f"epoch {progress.epoch + 1}/{run.schedule.epochs}", run.train.total_batch_size
        self.bar = progress_bar(title, total_steps * batch_size, initial=self.step * batch_size)

    def _go_on(self) -> None:
        """Continues from the records of earlier launches, and drops those that will be repeated.

        They are read one by one, as there may be too many for the memory.
        """
        directory, last = self.metrics.parent, {}
        for last in stream_records(directory):
            if last["kind"] == "start":
                self.former = last
        self.spent |= {name: last.get(name, 0.0) for name in self.spent}
        if self.metrics.exists():
            kept = (record for record in stream_records(directory) if is_until(self.progress, record))
            write_atomically(self.metrics, (f"{json.dumps(record)}\n".encode() for record in kept))
        last = {}
        for last in stream_records(directory):
            self.epochs.add(last)
        num_since = self.step - last.get("step", 0)
        self.images_seen = last.get("images_seen", 0) + num_since * self.run.train.total_batch_size

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        epoch = self.progress.epoch
        if error is not None:
            with suppress(OSError):  # the disk may be what failed
                reason = str(error).partition("\n")[0] or type(error).__name__
                self._record("fail", epoch, {"reason": one_line(reason, 200)})
        elif not self.progress.is_finished(self.run):
            self._record("stop", epoch, {})
        self.bar.close()
        if error is None:
            files = f"{EPOCHS} (a row per epoch)  {METRICS} (all records)  {CONSOLE}"
            print_fields(f"logs of {self.directory}:  {files}  tensorboard --logdir {shlex.quote(str(self.directory))}")

    def start(self, epoch: int, processes: int, resumption: Resumption = NOTHING, **values: Any) -> None:
        if resumption.checkpoint is None:
            mark_origin(self.directory)
        write_atomically(self.directory / CONFIG, dump_yaml(dump_run(self.run)).encode())
        values |= (origin := provenance(self.device))
        values["precision"] = precision(self.run.train.amp, self.device)
        if resumption.checkpoint is not None:
            taken = ("compile", "cuda_graph", "precision")
            names = [name for name in (*taken, *origin) if name != "command" and name in self.former]
            others = {name: (self.former[name], values[name]) for name in names}
            print(f"resumes from {resumption.describe(self._place(epoch), others)}", flush=True)
        self.num_gpus = processes if self.device.type == "cuda" else 0
        if self.run.train.amp == "auto":
            print(f"train.amp = auto: {values['precision']} on this device", flush=True)
        for name in sorted({"kernels", "compile"} & values.keys()) if self.num_gpus else ():
            print(f"train.{name} = {values[name]}", flush=True)
        values |= {"host": platform.node(), "processes": processes, "epochs": self.run.schedule.epochs}
        self._record("start", epoch, {**values, "total_steps": self.total_steps})
        for option, (before, now) in resumption.changes.items():
            self._record("change", epoch, {"option": option, "before": _short(before), "now": _short(now)})

    def images(self, images: torch.Tensor) -> None:
        if images.is_floating_point():
            self.charts.show_images(images, self.run.data, self.step)

    def begin_epoch(self, epoch: int) -> None:
        self._tabulate(epoch)
        self.speed.begin_step()
        self.bar.unpause()
        self.bar.set_description(f"epoch {epoch}/{self.run.schedule.epochs}")

    def end_step(self) -> None:
        super().end_step()
        self.images_seen += self.run.train.total_batch_size
        self.bar.update(self.run.train.total_batch_size)
        if time.time() - self.heartbeat.values.get("record_time_seconds", math.inf) > LINE_SECONDS:
            self.heartbeat.beat({"step": self.step})
            if self.bar.disable:  # a log
                print_fields(f"train  {self._place(self.progress.epoch + 1)}")

    def train(self, epoch: int, **values: float) -> None:
        self._record("train", epoch, values := {**values, **self.speed.since_last()})
        if not self.is_estimated and time.monotonic() - self.began > 60:
            self.is_estimated, hours = True, (self.total_steps - self.step) * values["step_seconds"] / 3600
            gpus = f", {hours * self.num_gpus:.1f} GPU-hours" * (self.num_gpus > 0)
            if hours >= 0.1:
                print(f"by these steps, {hours:.1f} hours{gpus} are left, without evaluations", flush=True)

    def eval(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._record("eval", epoch, metrics)
        for name, value in self.progress.unranked().items():
            problem = f"{name} = {value:g} of epoch {epoch} is no score: by it, the epoch is not among the best"
            print(f"warning: {problem}", file=sys.stderr, flush=True)

    def final(self, **values: float) -> None:
        values |= self.speed.median()
        self._record("final", self.progress.epoch, values)
        self._tabulate()
        self.charts.show_result(self.run, values, self.step)

    def sync(self) -> None:
        with naming(self.metrics), open_regular(self.metrics) as file:
            os.fsync(file.fileno())

    def saved(self) -> None:
        self.heartbeat.beat({"checkpoint_time_seconds": time.time()})

    def _place(self, epoch: int) -> str:
        return describe_place(self.run, epoch, self.step, self.total_steps)

    def _tabulate(self, before: float = math.inf) -> None:
        """Writes the table of the epochs before `before`."""
        rows = [row for row in self.epochs.rows if row["epoch"] < before]
        write_atomically(self.directory / EPOCHS, epochs_csv(rows))

    def _totals(self) -> dict[str, Any]:
        """Returns the `TOTALS` of the run until now."""
        seconds = time.monotonic() - self.began
        gpu_hours = self.spent["gpu_hours"] + self.num_gpus * seconds / 3600
        return {
            "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
            "elapsed_seconds": round(self.spent["elapsed_seconds"] + seconds, 3),
            **({"gpu_hours": round(gpu_hours, 6)} if gpu_hours else {}),
            "images_seen": self.images_seen,
        }

    def _record(self, kind: str, epoch: int, values: Mapping[str, Any]) -> None:
        record = {"kind": kind, "epoch": epoch, "step": self.step, **self._totals(), **values}
        # Loss scaling skips updates with gradient norms of infinity and NaN, which JSON lacks.
        record = {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in record.items()}
        append_whole(self.metrics, f"{json.dumps(record)}\n".encode())
        self.epochs.add(record)
        self.charts.add(kind, values, self.step)
        ends = {"running": int(kind not in ("final", "stop", "fail")), "failed": int(kind == "fail")}
        shown = {name: x for name, x in record.items() if name not in ("epoch", "loss", "broken") or kind == "train"}
        self.heartbeat.beat({"total_steps": self.total_steps, **shown, **ends})
        if kind in ("change", "fail"):  # shown by `start`; shown last
            return
        text = format_values(values)
        if kind == "train":
            seconds = (self.total_steps - self.step) * values["step_seconds"]
            text += f"  ETA {timedelta(seconds=round(seconds))}"
            self.bar.set_postfix_str(SHOWN["loss"].format(values["loss"]), refresh=False)
        print_fields(f"{kind:5}  {self._place(epoch)}  {text}".rstrip())


def _short(value: Any) -> Any:
    """Returns a number or null as it is, and anything else as a text of at most 200 characters: there may be many
    classes.
    """
    return value if isinstance(value, int | float | None) else one_line(str(value), 200)
