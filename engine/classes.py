"""Images of other data than a model was trained on: which of its classes theirs are, and ImageNet's ReaL labels."""

from collections.abc import Sequence
from pathlib import Path

import torch
from timm.data import RealLabelsImagenet
from torch import Tensor, nn

from attention import OptionError
from engine.data import Images, difference
from engine.errors import UserError, one_line
from engine.records import Records

PLACES = ("the checkpoint", "the data")


def match_classes(known: Sequence[str] | None, here: Sequence[str], num_classes: int) -> tuple[list[int], str]:
    """Which of a model's outputs each class of the data is, and a line for the user on it ("": as in training).

    They are matched by name where the model has all of the data's names. Names 0 to n - 1 of the data are positions,
    where none of them is a name of the model's n classes. All others are taken in their order.

    Args:
        known: names of the model's classes; None: not known. here: names of the data's.
    Raises:
        OptionError: not matched by name, and not as many.
    """
    if known is None or len(known) != num_classes:
        known = []
    position = {name: index for index, name in enumerate(known)}
    if list(known) == list(here):
        return [*range(num_classes)], ""
    if all(name in position for name in here):
        some = f"the data has {len(here):,} of the checkpoint's {num_classes:,}; the logits of the others are left out"
        every = "those of the checkpoint in another order, matched by name"
        return [position[name] for name in here], f"classes: {some if len(here) < num_classes else every}"
    names = difference(known, here, PLACES) if known else ""
    if len(here) != num_classes:
        reason = names or "the checkpoint has no names of them, by which to match some"
        raise OptionError("model.num_classes", f" = {num_classes}, but the images have {len(here)} classes; {reason}")
    numbers = [int(name) if name.isdecimal() else -1 for name in here]
    if sorted(numbers) == [*range(num_classes)] and not any(name in position for name in here):
        note = f"classes: the data's names, 0 to {num_classes - 1}, are taken for positions in the checkpoint's"
        return numbers, note if known else ""
    return [*range(num_classes)], names and f"warning: the classes are not those of the training: {names}"


class ClassSubset(nn.Module):
    """`model` with the logits of the classes `columns` alone, in their order: what timm's --valid-labels does."""

    def __init__(self, model: nn.Module, columns: Sequence[int]):
        super().__init__()
        self.model = model
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[:, self.columns]


def read_real_labels(file: str, images: Images, columns: Sequence[int]) -> list[set[int]]:
    """ReaL labels of ImageNet's validation images: all classes that each one shows, which may be none.

    Args:
        file: real.json of their authors (Beyer et al. 2020, "Are we done with ImageNet?"), or "timm": timm's copy.
        columns: position of each class of `images` among ImageNet's, as `match_classes` gives it for its models.
    Raises:
        UserError: no such labels, or images or classes that they are not for.
    """
    names = [Path(images.filename(index)).name for index in range(len(images))]
    position = {column: index for index, column in enumerate(columns)}
    try:
        found = RealLabelsImagenet(names, None if file == "timm" else file).real_labels
        if unknown := [name for name in names if name not in found]:
            raise UserError(f"--real-labels: for files ILSVRC2012_val_*.JPEG, not for {one_line(unknown[0], 100)}")
        labels = [{position[label] for label in found[name]} for name in names]
    except OSError as error:
        raise UserError(f"--real-labels: {file}: {error.strerror}") from None
    except AssertionError:
        raise UserError(f"--real-labels: {file} is not for {len(names):,} images, as many as the data has") from None
    except KeyError as error:
        raise UserError(f"--real-labels: {file}: the data has no class number {one_line(str(error), 100)}") from None
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"--real-labels: {file} is no list, in JSON, of each image's list of class numbers") from None
    own = [label in real for label, real in zip(images.reader.labels, labels, strict=True) if real]
    if 2 * sum(own) <= len(own):  # of ImageNet's it is nine tenths
        problem = f"agree with the data's on {sum(own):,} of {len(own):,} images; are its classes ImageNet's?"
        raise UserError(f"--real-labels: those of {file} {problem}")
    return labels


def real_accuracy(records: Records, labels: Sequence[set[int]]) -> dict[str, float]:
    """As timm's validate.py: percent of the images with ReaL labels (`real_images`) of which the first class, or one of
    the first five, is among them (`real_top1`, `real_top5`)."""
    pairs = ((labels[index], row) for index, row in zip(records.index.tolist(), records.classes.tolist(), strict=True))
    hits = [[label in real for label in row] for real, row in pairs if real]
    correct = {"real_top1": sum(row[0] for row in hits), "real_top5": sum(map(any, hits))}
    return {name: 100 * n / max(1, len(hits)) for name, n in correct.items()} | {"real_images": len(hits)}
