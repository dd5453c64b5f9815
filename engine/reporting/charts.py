"""TensorBoard files of a run: charts of its records, images, predictions, options and results."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from torchvision.utils import make_grid

from engine.config.load import dump_run, flatten
from engine.config.schema import Data, Run, per_channel
from engine.evaluation.predictions import PredictionTable

BY_IMAGES = tuple(f"{average}{name}" for average in ("", "ema_") for name in ("top1", "top5", "loss"))
"""Values that are also charted by images seen, as `train_by_images/loss`, to compare runs of different batch sizes."""

CHARTED = {
    "train": ("loss", "lr", "grad_norm", "images_per_second", "step_seconds", "data_wait", "broken"),
    "skip": ("num_skipped",),
    "eval": (*BY_IMAGES, "broken"),
}
"""Kind of record -> values that are charted. `broken` is charted only when it is not 0."""


class Charts:
    """Writes TensorBoard files into the directory of a run.

    Args:
        records: records of earlier launches. step: update of the run, after which earlier points are dropped.
    """

    def __init__(self, directory: Path, records: Sequence[Mapping[str, Any]], step: int):
        self.writer = SummaryWriter(directory, purge_step=step + 1)
        for record in records:  # TensorBoard drops points by images too, as if they were steps
            if record.get("images_seen", 0) > step:
                at = datetime.fromisoformat(f"{record['time']}+00:00").timestamp() if "time" in record else None
                self._add_by_images(record["kind"], record, record["images_seen"], at)

    def add(self, kind: str, values: Mapping[str, Any], step: int, images_seen: int) -> None:
        """Charts a record."""
        for name in CHARTED.get(kind, ()):
            if name in values and (values[name] or name != "broken"):
                self.writer.add_scalar(f"{kind}/{name}", values[name], step)
        self._add_by_images(kind, values, images_seen)
        self.writer.flush()  # the process may be killed at any time

    def _add_by_images(self, kind: str, values: Mapping[str, Any], images: int, at: float | None = None) -> None:
        for name in CHARTED.get(kind, ()):
            if name in BY_IMAGES and values.get(name) is not None:
                self.writer.add_scalar(f"{kind}_by_images/{name}", values[name], images, at)

    def show_config(self, text: str, step: int) -> None:
        """Shows a configuration in YAML."""
        self.writer.add_text("config", f"```yaml\n{text}```", step)

    def show_images(self, tag: str, images: torch.Tensor, data: Data, step: int) -> None:
        """Shows up to 64 images (B, C, H, W), eight in a row, with the normalisation by `data` undone."""
        mean, std = (torch.tensor(per_channel(x, images.shape[1]))[:, None, None] for x in (data.mean, data.std))
        images = images[:64].float().cpu() * std + mean
        self.writer.add_image(tag, make_grid(images.clamp(0, 1)), step)

    def show_predictions(self, predictions: Mapping[str, PredictionTable], step: int) -> None:
        """Shows images of an evaluation with predictions, and the confusion matrix, for each kind of weights."""
        from engine.reporting.outputs import confusion_picture, samples_picture

        for kind, found in predictions.items():
            for name, draw in {"images": samples_picture, "confusion": confusion_picture}.items():
                pixels = np.asarray(Image.open(BytesIO(draw({kind: found}))).convert("RGB"))
                tag = f"eval/{'ema_' if kind == 'ema' else ''}{name}"
                self.writer.add_image(tag, pixels, step, dataformats="HWC")

    def show_result(self, run: Run, values: Mapping[str, float], step: int) -> None:
        """Shows the options of `run`, and those of `values` that have no chart, as hyper-parameters."""
        charted = [name for name in CHARTED["eval"] if name in values]
        options: dict[str, Any] = {key: str(value) for key, value in flatten(dump_run(run)).items()}
        options |= {f"final.{name}": value for name, value in values.items() if name not in charted}
        for summary in hparams(options, {f"eval/{name}": values[name] for name in charted}):
            self.writer.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]  # torch opens it at once

    def close(self) -> None:
        self.writer.close()
