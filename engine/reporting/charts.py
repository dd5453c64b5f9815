"""TensorBoard files of a run: charts of its records, images, options and results."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, image, scalar
from torchvision.utils import make_grid

from attention import ATTENTION
from attention.options import parse_options, to_yaml
from engine.config.schema import Data, Run, per_channel
from engine.evaluation.evaluate import RECALL
from engine.run.load import dump_run, flatten
from engine.runtime.files import append_whole
from models import MODELS, is_host
from models.hosted import HostConfig

CHARTED = {
    "train": ("loss", "lr", "grad_norm", "images_per_second", "step_seconds", "data_wait", "broken"),
    "eval": tuple(
        f"{average}{name}"
        for average in ("", "ema_")
        for name in ("top1", "top5", "balanced_accuracy", "loss", "broken", "not_finite")
    ),
}
"""Kind of record -> values that are charted. `broken` is charted only when it is not 0."""


class Charts:
    """Writes a TensorBoard file into the directory of a run.

    Every event is in the file when a method returns, which raises an OSError that names the file if it cannot be
    written. TensorBoard's own writer has a thread, whose failures are tracebacks.

    Args:
        step: update of the run, after which earlier points are dropped.
    """

    def __init__(self, directory: Path, step: int):
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"  # sorted by their times
        self.path = directory / name
        self.records = RecordWriter(self)  # with lengths and checksums
        self._add(file_version="brain.Event:2")
        self._add(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def _add(self, **values: Any) -> None:
        """Adds the event with these fields."""
        self.records.write(Event(wall_time=time.time(), **values).SerializeToString())

    def write(self, content: bytes) -> None:
        """Adds what `RecordWriter` makes of an event."""
        append_whole(self.path, content)

    def add(self, kind: str, values: Mapping[str, Any], step: int) -> None:
        """Charts a record, with errors of attention layers and recalls; these are a group of their own."""
        others = [name for name in values if name.startswith(("error_", RECALL, f"ema_{RECALL}"))]
        for name in (*CHARTED.get(kind, ()), *(others if kind in CHARTED else ())):
            if name in values and (values[name] or name != "broken"):
                self._add(summary=scalar(name if "/" in name else f"{kind}/{name}", values[name]), step=step)

    def show_images(self, images: torch.Tensor, data: Data, step: int) -> None:
        """Shows up to 64 training images (B, C, H, W), eight in a row, with the normalisation by `data` undone."""
        mean, std = (torch.tensor(per_channel(x, images.shape[1]))[:, None, None] for x in (data.mean, data.std))
        images = images[:64].float().cpu() * std + mean
        self._add(summary=image("train/images", make_grid(images.clamp(0, 1)), dataformats="CHW"), step=step)

    def show_result(self, run: Run, values: Mapping[str, float], step: int) -> None:
        """Shows `chosen_options`, and costs and best scores among `values`, as hyper-parameters."""
        options = {k: v if type(v) in (int, float) else to_yaml(v) for k, v in chosen_options(run).items()}
        results = [name for name in values if name in ("parameters", "macs") or name.startswith("best_")]
        options |= {f"final.{name}": values[name] for name in results}
        for summary in hparams(options, {})[1:]:  # the first would limit TensorBoard to the options of one run
            self._add(summary=summary, step=step)


def chosen_options(run: Run) -> dict[str, Any]:
    """Returns dotted path -> value of the options of `run` that are not the defaults: of a model, those of its size."""
    name, attention = run.model["name"], run.attention
    kind, sizes = (HostConfig, {}) if is_host(name) else (MODELS[name][0].Config, MODELS[name][1])

    def defaults(mechanism: Mapping[str, Any]) -> dict[str, Any]:
        options = ATTENTION[mechanism["name"]].Config
        free = {x.name: x.default for x in fields(options) if x.name in mechanism and not x.metadata["chosen"]}
        follow = parse_options(options, {option: mechanism[option] for option in free})
        return asdict(follow) | free

    usual = Run(
        model={field.name: field.default for field in fields(kind)} | sizes,
        attention=[*map(defaults, attention)] if isinstance(attention, list) else attention and defaults(attention),
    )
    known = flatten(dump_run(usual))
    return {key: value for key, value in flatten(dump_run(run)).items() if key not in known or value != known[key]}
