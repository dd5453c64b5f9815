"""Trained model of a command line, and images in its input format."""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from engine.checkpoints.adapt import restore_model
from engine.checkpoints.files import open_weights
from engine.checkpoints.origin import is_made_here
from engine.checkpoints.weight_sources import Source, source_of
from engine.checkpoints.weights import check_predicts_classes
from engine.config.schema import Run, num_channels
from engine.data.augment import create_transform
from engine.data.images import BrokenImage
from engine.data.splits import Images, classes_of, open_split, report_split
from engine.evaluation.label_matching import match_classes
from engine.run.described import parse_described
from engine.runtime.distributed import init_distributed
from engine.runtime.errors import UserError

UNLABELLED = (
    "no labels: the images are all of one class, which the model does not have. Its own predictions stand for labels, "
    "so that top-1 is the share of unchanged predictions"
)
"""Note on images without labels."""


@dataclass(frozen=True)
class Trained:
    """Trained model on a device.

    Attributes:
        path: its checkpoint. run: its configuration. source: its weights. model: in evaluation mode.
        classes: names of its classes, if known.
    """

    path: Path
    run: Run
    source: Source
    model: nn.Module
    classes: list[str] | None
    device: torch.device


@dataclass(frozen=True)
class Sample:
    """Images (B, C, H, W) of the validation data and their classes (B,), on the CPU.

    columns: the model's output for each class. indices: of the images in the split. is_labelled: the classes are those
    of the data.
    """

    images: Tensor
    classes: Tensor
    columns: list[int]
    indices: list[int]
    is_labelled: bool = True


def load_trained(args: argparse.Namespace, reads_images: bool = True) -> Trained:
    """Loads the model of a command line, see `command_line.add_arguments`.

    Args:
        reads_images: the images of its run will be read.
    Raises:
        UserError, OptionError: in the same cases as validate.py.
    """
    found, checkpoint, kind, note, _ = open_weights(args.checkpoint, args.select, args.weights)
    if note:
        print(f"{found}: {note}", file=sys.stderr)
    is_own = is_made_here(args.checkpoint)
    run = parse_described(checkpoint["config"], str(found), args.overrides, is_own=is_own, reads_images=reads_images)
    check_predicts_classes(run, str(found))
    if run.attention is None:
        remedy = "add attention=softmax, which computes the same where a mechanism has a place"
        raise UserError(f"{found}: the model has its own attention (null), which is not seen from here; {remedy}")
    device = init_distributed(run.train.device).device
    model, resampled = restore_model(run, checkpoint, kind)
    if resampled:
        print(resampled, file=sys.stderr)
    model = model.to(device).eval()
    return Trained(found, run, source_of(run, model.state_dict()), model, checkpoint.get("classes"), device)


def read_sample(trained: Trained, count: int) -> Sample:
    """Reads `count` validation images, evenly spaced; all, if there are fewer.

    Raises:
        OptionError: the data cannot be used. BrokenImage: an image cannot be read.
    """
    images = open_split(trained.run.data, "val_split")
    report_split(trained.run.data, "val_split", images, trained.run.model["img_size"])
    columns, note = find_columns(trained, images)
    if note:
        print(note, file=sys.stderr)
    count = min(count, len(images))
    indices = [i * len(images) // count for i in range(count)]
    return Sample(*read_images(images, indices, trained.run), columns, indices, note != UNLABELLED)


def find_columns(trained: Trained, images: Images) -> tuple[list[int], str]:
    """Returns what `match_classes` does; all outputs and `UNLABELLED` for images of a single class that no model has.

    OptionError: the classes cannot be matched.
    """
    names, num_classes = classes_of(images), trained.run.model["num_classes"]
    if len(names) == 1 < num_classes and names[0] not in (trained.classes or ()):
        return [*range(num_classes)], UNLABELLED
    return match_classes(trained.classes, names, num_classes)


def read_images(images: Images, indices: Iterable[int], run: Run) -> tuple[Tensor, Tensor]:
    """Reads images (B, C, H, W) as in the validation of `run`, and the class of each, or its number without classes.

    Raises:
        BrokenImage: an image cannot be read.
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
