"""The records of a run: console, `metrics.jsonl` and TensorBoard, written by the primary rank only.

`metrics.jsonl` holds one JSON object per line: its kind, the epoch and step at which it was made, and values:

start   at every start and resumption: command, version, git revision, package versions, device, processes, parameters,
        macs
train   every `log_every` updates: loss, lr, grad_norm, images_per_second, step_seconds, memory_mb; data_wait: percent
        of the time spent waiting for batches; broken: images left out so far in the epoch, over all ranks
skip    when an update was skipped because it was not finite: num_skipped, of the run
eval    at every evaluation: top1, top5, loss; with a weight average ema_top1, ema_top5, ema_loss; broken: images that
        were left out, if any
final   at the end: last evaluation; best_top1, best_ema_top1, parameters, macs, images_per_second, step_seconds
        (median), memory_mb
"""

import json
import math
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from torchvision.utils import make_grid

from attention import __version__
from engine.augment import per_channel
from engine.bar import progress_bar
from engine.config import dump_run, flatten
from engine.files import write_atomically
from engine.progress import Progress
from engine.schema import Run
from engine.waiting import DataWait

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow")

CONSOLE = {
    "top1": "top-1 {:.2f} %",
    "top5": "top-5 {:.2f} %",
    "loss": "loss {:.4f}",
    "ema_top1": "EMA top-1 {:.2f} %",
    "ema_top5": "EMA top-5 {:.2f} %",
    "ema_loss": "EMA loss {:.4f}",
    "best_top1": "best top-1 {:.2f} %",
    "best_ema_top1": "best EMA top-1 {:.2f} %",
    "lr": "lr {:.2e}",
    "grad_norm": "gradient {:.2f}",
    "parameters": "{:,} parameters",
    "macs": "{:,} MACs",
    "images_per_second": "{:.0f} images/s",
    "memory_mb": "{:.0f} MB",
    "data_wait": "{:.0f} % waiting for data",
    "num_skipped": "not finite, skipped ({} of the run)",
}
"""How the console formats a value; others are not shown there."""

INPUT_BOUND = 20
"""Percent of the time spent waiting for data above which a run is reported as input-bound, once. The first record of an
epoch, in which the loader's workers start, does not count."""


class Report:
    """Writes the records of a run.

    Args:
        directory: of the run; None: record nothing (ranks other than the primary).
        progress: where the run starts; later records of an interrupted run are dropped, as they will be repeated.
        total_steps: updates of the whole run. device: its peak memory is recorded.
    """

    def __init__(self, directory: Path | None, run: Run, progress: Progress, total_steps: int, device: torch.device):
        self.directory, self.run, self.total_steps, self.device = directory, run, total_steps, device
        self.step = progress.step
        self.step_seconds: list[float] = []
        self.num_recorded = 0
        self.wait = DataWait(device)
        self.warned_input_bound = False
        if directory is not None:
            self.metrics = directory / "metrics.jsonl"
            if self.metrics.exists():
                lines = self.metrics.read_text().splitlines(keepends=True)
                write_atomically(self.metrics, "".join(line for line in lines if _is_until(progress, line)).encode())
            self.tensorboard = SummaryWriter(directory, purge_step=self.step + 1)
            title, batch_size = self._title(progress.epoch + 1), run.train.total_batch_size
            self.bar = progress_bar(title, total_steps * batch_size, initial=self.step * batch_size)

    def start(self, epoch: int, **values: Any) -> None:
        """Records how the run starts, or resumes after `epoch` epochs."""
        self._record("start", epoch, {**values, **provenance(self.device)})
        if self.directory is not None:
            text = yaml.safe_dump(dump_run(self.run), sort_keys=False)
            self.tensorboard.add_text("config", f"```yaml\n{text}```", self.step)

    def images(self, images: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Shows up to 64 training images (B, C, H, W), with the normalisation by `mean` and `std` undone."""
        if self.directory is not None:
            mean, std = (torch.tensor(per_channel(x, images.shape[1]))[:, None, None] for x in (mean, std))
            images = images[:64].float().cpu() * std + mean
            self.tensorboard.add_image("train/images", make_grid(images.clamp(0, 1)), self.step)

    def begin_epoch(self, epoch: int) -> None:
        """Starts the clock of the next step, so that evaluation and checkpoints do not count; `epoch` counts from 1."""
        self.step_began = time.perf_counter()
        self.workers_start = True
        if self.directory is not None:
            self.bar.unpause()
            self.bar.set_description(self._title(epoch))

    def end_step(self) -> None:
        """Counts an update and its time."""
        now = time.perf_counter()
        self.step_seconds.append(now - self.step_began)
        self.step_began = now
        self.step += 1
        if self.directory is not None:
            self.bar.update(self.run.train.total_batch_size)

    def train(self, epoch: int, **values: float) -> None:
        """Records `values` of the updates since the last such record, and their speed; `epoch` counts from 1."""
        step_seconds = statistics.fmean(self.step_seconds[self.num_recorded :])
        num_steps = len(self.step_seconds) - self.num_recorded
        self.num_recorded += num_steps
        data_wait = 100 * self.wait.seconds() / (num_steps * step_seconds)
        self._record("train", epoch, {**values, **self._speed(step_seconds), "data_wait": data_wait})
        is_input_bound = data_wait > INPUT_BOUND and not self.workers_start
        self.workers_start = False
        if is_input_bound and self.directory is not None and not self.warned_input_bound:
            self.warned_input_bound = True
            self.bar.write(
                f"input-bound: {data_wait:.0f} % of the time goes into waiting for data; raise data.workers"
                f" (= {self.run.data.workers}) up to the cores there are, or prepare the images (engine.prepare)"
            )

    def skip(self, epoch: int, num_skipped: int) -> None:
        """Records that an update was skipped, the `num_skipped`-th of the run."""
        self._record("skip", epoch, {"num_skipped": num_skipped})

    def eval(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Records an evaluation after `epoch` epochs."""
        self._record("eval", epoch, metrics)

    def final(self, **values: float) -> None:
        """Records the end of the run, and its median speed since it was started or resumed."""
        seconds = self.step_seconds or [math.nan]  # a run that was stopped after its last update has none
        values |= self._speed(statistics.median(seconds))
        self._record("final", self.run.schedule.epochs, values)
        if self.directory is not None:
            options = {key: str(value) for key, value in flatten(dump_run(self.run)).items()}
            for summary in hparams(options, {f"final/{name}": value for name, value in values.items()}):
                self.tensorboard.file_writer.add_summary(summary, self.step)

    def sync(self) -> None:
        """Waits until the records are on disk, so that no checkpoint outlives them."""
        if self.directory is not None:
            with self.metrics.open("rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Closes files and progress bar."""
        if self.directory is not None:
            self.tensorboard.close()
            self.bar.close()

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch}/{self.run.schedule.epochs}"

    def _speed(self, step_seconds: float) -> dict[str, float]:
        return {
            "images_per_second": self.run.train.total_batch_size / step_seconds,
            "step_seconds": step_seconds,
            "memory_mb": peak_memory_mb(self.device),
        }

    def _record(self, kind: str, epoch: int, values: Mapping[str, Any]) -> None:
        if self.directory is None:
            return
        record = {"kind": kind, "epoch": epoch, "step": self.step, **values}
        with self.metrics.open("a") as file:
            file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")
        for name, value in values.items():
            if kind != "start":
                self.tensorboard.add_scalar(f"{kind}/{name}", value, self.step)
        self.tensorboard.flush()  # the process may be killed at any time
        text = "  ".join(form.format(values[name]) for name, form in CONSOLE.items() if name in values)
        if kind == "train" and not self.bar.disable:
            self.bar.set_postfix_str(CONSOLE["loss"].format(values["loss"]))
            return
        if kind == "train":
            seconds = (self.total_steps - self.step) * values["step_seconds"]
            text += f"  ETA {timedelta(seconds=round(seconds))}"
        self.bar.write(
            f"{kind:5}  epoch {epoch}/{self.run.schedule.epochs}  step {self.step}/{self.total_steps}  {text}"
        )


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process (MB): allocated by torch on a CUDA device, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    kilobyte = 2**10 if sys.platform != "darwin" else 1  # ru_maxrss is in kB, but in bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte / 2**20


def provenance(device: torch.device) -> dict[str, Any]:
    """Command, version and git revision of this code (None where it is installed), device and package versions."""
    code, run = Path(__file__), partial(subprocess.run, capture_output=True, text=True, check=True)
    try:
        # Where this is installed, the folder may lie in the repository of another project, which does not track it.
        run(["git", "-C", code.parent, "ls-files", "--error-unmatch", code.name])
        describe = ["git", "-C", code.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        revision = run(describe).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = None
    return {
        "command": shlex.join(sys.argv),
        "version": __version__,
        "git": revision,
        "device": device_name(device),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def device_name(device: torch.device) -> str:
    """The model name of the GPU or the processor; "cpu" if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        if name := re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return name[1]
    return platform.processor() or "cpu"


def _is_until(progress: Progress, line: str) -> bool:
    """Whether `line` is a complete record, made no later than `progress`; an evaluation, in a finished epoch."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return False
    is_evaluated = record["kind"] not in ("eval", "final") or record["epoch"] <= progress.epoch
    return record["step"] <= progress.step and is_evaluated


def _finite(value: Any) -> Any:
    """None for infinity and NaN (the gradient norm of an update that loss scaling skips), which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
