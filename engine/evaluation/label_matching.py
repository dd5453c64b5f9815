"""Evaluation on other data than a model was trained on: matching of classes, and ImageNet's ReaL labels."""

import json
from collections.abc import Sequence
from pathlib import Path

import timm.data
import torch
from torch import Tensor, nn

from attention import OptionError
from engine.checkpoints.weight_sources import describe_unnamed
from engine.data.splits import Images
from engine.evaluation.predictions import PredictionTable
from engine.runtime.errors import UserError
from engine.runtime.reading import MAX_TEXT, parsing, read_bounded
from engine.runtime.text import describe_difference, numbers_of, one_line


def match_classes(known: Sequence[str] | None, here: Sequence[str], num_classes: int) -> tuple[list[int], str]:
    """Returns the model's output for each class of the data, and a note for the user ("" if as in training).

    Classes are matched by name if the model has all names of the data. Otherwise the names 0 to n - 1 of the data are
    positions, if none of them is a name of the model's n classes. All other classes are matched in order, and all where
    the model's have no names.

    Args:
        known: names of the model's classes; None if they are not known. here: names of the data's classes.
    Raises:
        OptionError: `num_classes` is not the number of the names that are known, or not that of the data's classes,
            which cannot be matched by name.
    """
    if known is not None and len(known) != num_classes:
        problem = f" = {num_classes}, but the checkpoint names {len(known)} classes"
        raise OptionError("model.num_classes", f"{problem}; set it to that, or correct the names")
    position = {name: index for index, name in enumerate(known or ())}
    if known is not None and list(known) == list(here):
        return [*range(num_classes)], ""
    if all(name in position for name in here):
        some = f"the data has {len(here):,} of the checkpoint's {num_classes:,}; the logits of the others are left out"
        every = "those of the checkpoint in another order, matched by name"
        return [position[name] for name in here], f"classes: {some if len(here) < num_classes else every}"
    names = describe_difference(known, here, ("the checkpoint", "the data")) if known else ""
    if len(here) != num_classes:
        reason = names or "the checkpoint has no names of them, by which to match some"
        raise OptionError("model.num_classes", f" = {num_classes}, but the images have {len(here)} classes; {reason}")
    if known is None:
        return [*range(num_classes)], f"classes: {describe_unnamed(here)}"
    if numbers := numbers_of(here, known):
        note = f"classes: the data's names, 0 to {num_classes - 1}, are taken for positions in the checkpoint's"
        return numbers, note
    return [*range(num_classes)], f"warning: the classes are not those of the training: {names}"


class ClassSubset(nn.Module):
    """`model` with only the logits of the classes `columns`, in their order, as timm's --valid-labels."""

    def __init__(self, model: nn.Module, columns: Sequence[int]):
        super().__init__()
        self.model = model
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[:, self.columns]


class Flipped(nn.Module):
    """`model` with the mean of the logits for an image and for its mirror image, left to right."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return (self.model(images) + self.model(images.flip(-1))) / 2


def read_real_labels(file: str, images: Images, columns: Sequence[int]) -> list[set[int]]:
    """Reads the ReaL labels of ImageNet's validation images: all classes that each image shows, possibly none.

    Args:
        file: real.json of its authors (Beyer et al. 2020, "Are we done with ImageNet?"), or "timm" for timm's copy.
        columns: position of each class of `images` among ImageNet's, as `match_classes` returns it.
    Raises:
        UserError: the file holds no such labels, or they belong to other images or classes.
    """
    names = [Path(images.filename(index)).name for index in range(len(images))]
    position = {column: index for index, column in enumerate(columns)}
    path = Path(timm.data.__file__).with_name("_info") / "imagenet_real_labels.json" if file == "timm" else Path(file)
    with parsing(f"--real-labels: {file}", "expected a list, in JSON, of each image's list of class numbers"):
        content = [frozenset(labels) for labels in json.loads(read_bounded(path, MAX_TEXT))]
    found = {f"ILSVRC2012_val_{number:08d}.JPEG": labels for number, labels in enumerate(content, 1)}
    if len(found) != len(names):
        raise UserError(f"--real-labels: {file} is not for {len(names):,} images, as many as the data has")
    if unknown := [name for name in names if name not in found]:
        raise UserError(f"--real-labels: for files ILSVRC2012_val_*.JPEG, not for {one_line(unknown[0], 100)}")
    if missing := [label for name in names for label in found[name] if label not in position]:
        raise UserError(f"--real-labels: {file}: the data has no class number {one_line(str(missing[0]), 100)}")
    labels = [{position[label] for label in found[name]} for name in names]
    own = [label in real for label, real in zip(images.reader.labels, labels, strict=True) if real]
    if 2 * sum(own) <= len(own):  # ImageNet's labels agree on nine tenths
        problem = f"agree with the data's on {sum(own):,} of {len(own):,} images; are its classes ImageNet's?"
        raise UserError(f"--real-labels: those of {file} {problem}")
    return labels


def real_accuracy(found: PredictionTable, labels: Sequence[set[int]]) -> dict[str, float]:
    """Computes the accuracy of timm's validate.py on images with ReaL labels, whose number is `real_images`.

    `real_top1` and `real_top5` are percentages of images whose first class, or one of whose first five classes, is
    among their ReaL labels.
    """
    pairs = ((labels[index], row) for index, row in zip(found.indices.tolist(), found.classes.tolist(), strict=True))
    hits = [[label in real for label in row] for real, row in pairs if real]
    correct = {"real_top1": sum(row[0] for row in hits), "real_top5": sum(map(any, hits))}
    return {name: 100 * n / max(1, len(hits)) for name, n in correct.items()} | {"real_images": len(hits)}
