"""A trained model, and images as it gets them."""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from engine.augment import create_transform, num_channels
from engine.checkpoint import find_weights
from engine.classes import match_classes
from engine.config import parse_run
from engine.data import Images, classes_of, open_split, report_ignored
from engine.distributed import init_distributed
from engine.fit import build_models
from engine.images import BrokenImage
from engine.schema import Run
from engine.sources import Source, source_of
from engine.weights import check_predicts_classes


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        path: its checkpoint. run: its configuration. source: its weights. model: in evaluation mode.
        classes: names of its classes, as far as known. device: where it computes.
    """

    path: Path
    run: Run
    source: Source
    model: nn.Module
    classes: list[str] | None
    device: torch.device


@dataclass(frozen=True)
class Sample:
    """Images of the validation data: images (B, C, H, W) and classes (B,), on the CPU.

    columns: which of the model's outputs each class is.
    """

    images: Tensor
    classes: Tensor
    columns: list[int]


def load_trained(args: argparse.Namespace) -> Trained:
    """The model that a command line names, see `command_line.add_run`.

    Raises:
        UserError, OptionError: as validate.py does.
    """
    found, checkpoint, kinds = find_weights(args.checkpoint, args.select, args.weights)[-1]  # averaged ones come last
    run = parse_run(checkpoint["config"], str(found), args.overrides)
    check_predicts_classes(run, str(found))
    device = init_distributed(run.train.device).device
    models, resampled = build_models(run, checkpoint, kinds[-1:])
    if resampled:
        print(resampled, file=sys.stderr)
    model = models[kinds[-1]].to(device).eval()
    return Trained(found, run, source_of(run, model.state_dict()), model, checkpoint.get("classes"), device)


def read_sample(trained: Trained, count: int) -> Sample:
    """`count` of the validation images, evenly spaced; all, where there are fewer.

    Raises:
        OptionError: data that cannot be used. BrokenImage: one that cannot be read.
    """
    images = open_split(trained.run.data, "val_split")
    report_ignored("data.val_split", images)
    columns, note = match_classes(trained.classes, classes_of(images), trained.run.model["num_classes"])
    if note:
        print(note, file=sys.stderr)
    count = min(count, len(images))
    return Sample(*read_images(images, [i * len(images) // count for i in range(count)], trained.run), columns)


def read_images(images: Images, indices: Iterable[int], run: Run) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W) as in the validation of `run`, and the class, or else the number, of each.

    Raises:
        BrokenImage: one that cannot be read.
    """
    images.mode = "L" if num_channels(run) == 1 else "RGB"
    images.transform = create_transform(run, to_2tuple(run.model["img_size"]), is_training=False, as_bytes=False)
    found = []
    for index in indices:
        image = images[index]
        if isinstance(image, BrokenImage):
            raise image
        found.append(image)
    pixels, classes = zip(*found, strict=True)
    return torch.stack(pixels), torch.tensor(classes)
