"""Predictions of an evaluation for every single image, gathered from all ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.data.splits import Images
from engine.objectives.classification import TOP
from engine.runtime.distributed import World


class PredictionTable(NamedTuple):
    """A row for each of the n images that could be read, in the order of the data.

    Attributes:
        images: the data, whose transform gives bytes (C, H, W). names: names of the classes.
        indices: (n,) int64, positions of the images in the data. label: (n,) int64, their classes.
        loss: (n,) float64, cross-entropy in nats; exp(-loss) is the probability of the image's own class.
        classes, probability: (n, k) int64 and float64, the `TOP` most probable classes (all, if there are fewer), most
            probable first; -1 and NaN where the logits are not finite.
    """

    images: Images
    names: list[str]
    indices: Tensor
    label: Tensor
    loss: Tensor
    classes: Tensor
    probability: Tensor

    @property
    def predicted(self) -> Tensor:
        """(n,) int64: the most probable class of each image; -1: none."""
        return self.classes[:, 0]

    def name(self, number: int) -> str:
        """Returns the name of a class; "" for -1."""
        return self.names[number] if number >= 0 else ""


def top_columns(k: int) -> list[str]:
    """Returns the titles of columns for the k most probable classes: class_1, probability_1, class_2, ..."""
    return [f"{column}_{i}" for i in range(1, k + 1) for column in ("class", "probability")]


def gather_predictions(
    rows: Sequence[Tensor], indices: Sequence[int], images: Images, names: Sequence[str], world: World
) -> PredictionTable:
    """Gathers the predictions for all ranks' images on every rank.

    Args:
        rows: those of `rate_classes` for this rank's batches. indices: positions of this rank's images in the data.
        images, names: see `PredictionTable`.
    """
    k = min(TOP, len(names))
    table = torch.zeros(len(images), 3 + 2 * k, dtype=torch.float64, device=world.device)
    if rows:  # a rank has no rows if there are fewer images than ranks
        found = torch.cat(list(rows))
        table[indices] = torch.cat([torch.ones_like(found[:, :1]), found], 1)
    count, *columns = world.sum(table).cpu().split([1, 1, 1, k, k], 1)
    assert count.max() <= 1, "an image came twice"
    index = count[:, 0].nonzero()[:, 0]
    label, loss, classes, probability = (column[index] for column in columns)
    return PredictionTable(images, list(names), index, label[:, 0].long(), loss[:, 0], classes.long(), probability)
