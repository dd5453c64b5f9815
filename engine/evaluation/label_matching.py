"""Evaluation on other data than a model was trained on: matching of classes, and mirror images."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attention import OptionError
from engine.checkpoints.weight_sources import describe_unnamed
from engine.runtime.text import describe_difference, numbers_of


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
