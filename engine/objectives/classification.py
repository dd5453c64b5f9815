"""Classification: cross-entropy with the classes of images, or with the soft targets of mixup."""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.objectives.objective import Measure, Objective, Run

TOP = 5
"""Number of most probable classes that are kept. All logits of 50,000 images and 1,000 classes would take 200 MB."""


def prediction_rows(logits: Tensor, label: Tensor, loss: Tensor, classes: Tensor) -> Tensor:
    """Returns a row for each image of a batch: (b, 2 + 2 k) in float64, which represents every value exactly.

    Args:
        logits: (b, classes). label, loss: (b,). classes: (b, k), the classes with the highest logits.
    """
    probability = F.softmax(logits.float(), 1).gather(1, classes)
    return torch.cat([label[:, None], loss[:, None].double(), classes, probability], 1)


def sum_classes(model: nn.Module, images: Tensor, targets: Tensor, rows: list[Tensor] | None) -> list[Tensor]:
    """Computes the sums of `CLASSES` over a batch, and adds its `prediction_rows` to `rows`."""
    logits = model(images)
    classes = logits.topk(min(TOP, logits.shape[1])).indices
    hits = classes == targets[:, None]
    losses = F.cross_entropy(logits.float(), targets, reduction="none").double()
    if rows is not None:
        rows.append(prediction_rows(logits, targets, losses, classes))
    return [100 * hits[:, 0].sum(), 100 * hits.sum(), losses.sum()]


CLASSES = Measure(("top1", "top5", "loss"), sum_classes)
"""top1, top5: percent of images whose class has the highest / one of the five highest logits (of all logits, if there
are fewer than five). loss: mean cross-entropy, nats."""


def create_loss(augment: Any) -> nn.Module:
    """Creates the cross-entropy with class indices, or with the soft targets of mixup, which does the smoothing itself.

    Args:
        augment: section `augment` of a run.
    """
    return nn.CrossEntropyLoss(label_smoothing=0.0 if augment.mixup or augment.cutmix else augment.smoothing)


class Classification(Objective):
    """The objective of a run on classes without a teacher. Predictions show single images of the last evaluation.

    Args:
        loss: function of logits (B, classes) and targets: class indices (B,), or after mixup soft ones (B, classes).
    """

    measure = CLASSES

    def __init__(self, loss: nn.Module):
        self.loss = loss
        self.identity = {"teacher_weights": "none"}

    @staticmethod
    def applies(run: Run) -> bool:
        return True

    @classmethod
    def from_run(cls, run: Run, model: nn.Module, create_teacher: Callable[[], nn.Module]) -> Self:
        return cls(create_loss(run.augment))

    def __call__(self, network: Callable[[Tensor], Tensor], images: Tensor, targets: Tensor, /) -> Tensor:
        return self.loss(network(images), targets)
