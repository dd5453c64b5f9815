"""A trained model ready for use, and its predictions for image files."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchvision.transforms import Compose

from engine.augment import create_transform, num_channels
from engine.checkpoint import WEIGHTS, Weights, find_weights
from engine.config import parse_run
from engine.data import ImageLoader, Images, choose_batch_size, images_of
from engine.distributed import autocast
from engine.errors import UserError
from engine.images import convert
from engine.readers import FileReader
from engine.schema import Data
from engine.weights import build_model, check_predicts_classes


class Trained(NamedTuple):
    """A trained model with what it was trained on.

    Attributes:
        model: images (B, C, H, W) -> logits (B, classes), in evaluation mode, on the CPU.
        transform: PIL image of any size and mode -> (C, H, W) fp32, normalised, as in validation; C is 1 (grey) or 3.
        classes: their names, in the order of the logits.
    """

    model: nn.Module
    transform: Callable[[Image.Image], Tensor]
    classes: list[str]


def load(
    path: str | Path,
    *,
    weights: Weights | None = None,
    select: Literal["best", "last"] = "best",
) -> Trained:
    """The model in a run directory, a checkpoint or an exported file, which need not be trusted.

    Args:
        weights: "plain" or "ema", as trained or averaged; None: averaged where they are kept.
        select: which checkpoint of a run directory, the best by these weights or the last.
    Raises:
        UserError: there is no such file, it is no checkpoint of train.py, or it is damaged or contradicts itself.
        ConfigError: its configuration cannot be honoured.
    """
    found, checkpoint, kinds = find_weights(Path(path), select, weights)[-1]  # averaged weights come last
    run = parse_run(checkpoint["config"], str(found))
    check_predicts_classes(run, str(found))
    state, num_classes = WEIGHTS[kinds[-1]], run.model["num_classes"]
    classes = checkpoint.get("classes")
    if classes is None:
        print(f"{found}: without class names; they are numbers here", file=sys.stderr)
        classes = [str(index) for index in range(num_classes)]
    if len(classes) != num_classes or not classes:
        raise UserError(f"{found}: holds {len(classes)} class names, but model.num_classes = {num_classes}")
    model = build_model(run, checkpoint[state], f"{found}: {state}").eval()
    mode: Literal["RGB", "L"] = "L" if num_channels(run) == 1 else "RGB"
    transform = create_transform(run, run.model["img_size"], is_training=False, as_bytes=False)
    return Trained(model, Compose([partial(convert, mode=mode), transform]), classes)


class Prediction(NamedTuple):
    """The most probable classes of the image in `file`, most probable first, and their probabilities."""

    file: str
    classes: list[str]
    probabilities: list[float]


def create_loader(trained: Trained, files: Sequence[str], batch_size: int | None = None) -> ImageLoader:
    """Batches of the images in `files` and their positions there; what is no image is named on stderr and left out.

    Args:
        batch_size: images per batch; None: `choose_batch_size`.
    """
    images = Images(FileReader(files))
    images.transform = trained.transform
    _, height, width = trained.transform(Image.new("RGB", (1, 1))).shape
    batch_size = batch_size or choose_batch_size((height, width))
    workers = min(Data.workers, os.cpu_count() or 1, len(files) // batch_size)  # none starts for less than a batch
    return ImageLoader(images, batch_size, stack=default_collate, limit=math.inf, remedy="", num_workers=workers)


@torch.no_grad()
def predict(
    trained: Trained, loader: ImageLoader, top: int, amp: Literal["bf16", "fp16"] | None = None
) -> Iterator[Prediction]:
    """The `top` classes (all, where there are fewer) of every image of `loader`, which `create_loader` has made.

    Args:
        amp: precision of the forward pass, where the model is; None: fp32.
    """
    model, _, classes = trained
    device = next(model.parameters()).device
    for images, positions in loader:
        with autocast(amp, device):
            logits = model(images.to(device))
        probabilities, indices = logits.float().softmax(1).topk(min(top, len(classes)))
        for position, row, values in zip(positions.tolist(), indices.tolist(), probabilities.tolist(), strict=True):
            yield Prediction(images_of(loader).filename(position), [classes[index] for index in row], values)
