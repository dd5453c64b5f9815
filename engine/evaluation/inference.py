"""A trained model ready for use, and its predictions for image files."""

import math
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

from engine.checkpoints.adapt import restore_model
from engine.checkpoints.files import Weights, open_weights
from engine.checkpoints.weights import check_predicts_classes
from engine.config.schema import Data, num_channels
from engine.data.augment import create_transform
from engine.data.folders import open_files
from engine.data.images import convert
from engine.data.loaders import ImageLoader, choose_batch_size, images_of
from engine.data.splits import Images
from engine.data.workers import workers_of_rank
from engine.objectives.classification import probabilities_of, rank_classes
from engine.run.described import parse_described
from engine.runtime.errors import UserError


class Trained(NamedTuple):
    """Trained model with its transform and class names.

    Attributes:
        model: images (B, C, H, W) -> logits (B, classes), in evaluation mode, on the CPU.
        transform: PIL image of any size and mode -> (C, H, W) fp32, normalised, as in validation; C is 1 (grey) or 3.
        classes: names of the classes, in the order of the logits.
    """

    model: nn.Module
    transform: Callable[[Image.Image], Tensor]
    classes: list[str]


def load(
    path: str | Path,
    *,
    weights: Weights | None = None,
    select: Literal["best", "last"] = "best",
    overrides: Sequence[str] = (),
) -> Trained:
    """Loads the model of a run directory, a checkpoint or an exported file. The file need not be trusted.

    Args:
        weights: "plain" or "ema" (averaged); None: averaged weights if there are any, unless the plain ones were
            measured as better, see `prefer`; a line on stderr says so.
        select: checkpoint of a run directory, the best by these weights or the last.
        overrides: ``"key.path=value"`` in place of the file's options, such as ``"attention.num_landmarks=16"``.
    Raises:
        UserError: the file does not exist, is no checkpoint of train.py, is damaged or contradicts itself.
        ConfigError: the configuration in it cannot be honoured.
    """
    found, checkpoint, kind, note, _ = open_weights(Path(path), select, weights)
    if note:
        print(f"{found}: {note}", file=sys.stderr)
    run = parse_described(checkpoint["config"], str(found), overrides)
    check_predicts_classes(run, str(found))
    num_classes = run.model["num_classes"]
    model, line = restore_model(run, checkpoint, kind)  # first: the file may claim many classes
    if line:
        print(f"{found}: {line}", file=sys.stderr)
    classes = checkpoint.get("classes")
    if classes is None:
        print(f"{found}: without class names; they are numbers here", file=sys.stderr)
        classes = [str(index) for index in range(num_classes)]
    if len(classes) != num_classes or not classes:
        raise UserError(f"{found}: holds {len(classes)} class names, but model.num_classes = {num_classes}")
    transform = create_transform(run, run.model["img_size"], is_training=False, as_bytes=False)
    to_mode = partial(convert, mode="L" if num_channels(run) == 1 else "RGB")
    return Trained(model.eval(), Compose([to_mode, transform]), classes)


class Prediction(NamedTuple):
    """Most probable classes of the image in `file`, most probable first, and their probabilities.

    There are none where the logits are not finite.
    """

    file: str
    classes: list[str]
    probabilities: list[float]


def create_loader(trained: Trained, files: Sequence[str], batch_size: int | None = None) -> ImageLoader:
    """Returns a loader of the images in `files` and their positions; names other files on stderr and skips them.

    A batch has `batch_size` images; None: `choose_batch_size`.
    """
    images = Images(open_files(files), trained.transform)
    _, height, width = trained.transform(Image.new("RGB", (1, 1))).shape
    batch_size = batch_size or choose_batch_size((height, width))
    workers = min(workers_of_rank(Data.workers), len(files) // batch_size)  # no worker starts for less than a batch
    return ImageLoader(images, batch_size, stack=default_collate, limit=math.inf, remedy="", num_workers=workers)


@torch.no_grad()
def predict(trained: Trained, loader: ImageLoader, top: int) -> Iterator[Prediction]:
    """Yields the `top` classes (all, if there are fewer) for every image of a `loader` of `create_loader`, in order."""
    model, _, classes = trained
    device = next(model.parameters()).device
    for images, positions in loader:
        logits = model(images.to(device))
        ranked = rank_classes(logits, top)
        found = positions.tolist(), ranked.tolist(), probabilities_of(logits, ranked).tolist()
        for position, indices, values in zip(*found, strict=True):
            known = indices[0] >= 0
            names, values = [classes[index] for index in indices if known], values if known else []
            yield Prediction(images_of(loader).filename(position), names, values)
