"""What an evaluation finds of every single image, gathered from all ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.data import Images
from engine.distributed import World

TOP = 5
"""How many of the most probable classes are kept; all logits of 50,000 images and 1,000 classes would be 200 MB."""


class Records(NamedTuple):
    """A row for each of the n images that could be read, in the order of the data.

    Attributes:
        images: the data, whose transform gives bytes (C, H, W). names: of the classes.
        index: (n,) int64, of the images in the data. label: (n,) int64, their classes.
        loss: (n,) float64, cross-entropy in nats; exp(-loss) is the probability of the image's own class.
        classes, probability: (n, k) int64 and float64, of the `TOP` most probable classes (all, where there are fewer),
            most probable first.
    """

    images: Images
    names: list[str]
    index: Tensor  # type: ignore[assignment]  # hides tuple.index
    label: Tensor
    loss: Tensor
    classes: Tensor
    probability: Tensor

    @property
    def predicted(self) -> Tensor:
        """(n,) int64: the most probable classes."""
        return self.classes[:, 0]


def top_columns(k: int) -> list[str]:
    """The names of the columns of a table for the k most probable classes: class_1, probability_1, class_2, ..."""
    return [f"{column}_{i}" for i in range(1, k + 1) for column in ("class", "probability")]


def record(logits: Tensor, label: Tensor, loss: Tensor, classes: Tensor) -> Tensor:
    """The images of a batch, a row each (b, 2 + 2 k) in float64, which holds all of it exactly.

    Args:
        logits: (b, classes). label, loss: (b,), of the images. classes: (b, k), those of the highest logits.
    """
    probability = F.softmax(logits.float(), 1).gather(1, classes)
    return torch.cat([label[:, None], loss[:, None].double(), classes, probability], 1)


def gather_records(
    rows: Sequence[Tensor], indices: Sequence[int], images: Images, names: Sequence[str], world: World
) -> Records:
    """The records of all ranks' images, on every rank.

    Args:
        rows: `record` of every batch of this rank. indices: of this rank's images. images, names: see `Records`.
    """
    k = min(TOP, len(names))
    table = torch.zeros(len(images), 3 + 2 * k, dtype=torch.float64, device=world.device)
    if rows:  # a rank has none where there are fewer images than ranks
        found = torch.cat(list(rows))
        table[indices] = torch.cat([torch.ones_like(found[:, :1]), found], 1)
    count, *columns = world.sum(table).cpu().split([1, 1, 1, k, k], 1)
    assert count.max() <= 1, "an image came twice"
    index = count[:, 0].nonzero()[:, 0]
    label, loss, classes, probability = (column[index] for column in columns)
    return Records(images, list(names), index, label[:, 0].long(), loss[:, 0], classes.long(), probability)
