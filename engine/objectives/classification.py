"""Classification: cross-entropy with the classes of images, or with the soft targets of mixup."""

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.schema import Augment, Run
from engine.objectives.objective import Measure, Objective

TOP = 5
"""Number of most probable classes that are kept. All logits of 50,000 images and 1,000 classes would take 200 MB."""


def rank_classes(logits: Tensor, top: int = TOP) -> Tensor:
    """Returns the classes with the `top` highest logits (..., k), all if there are fewer, highest first.

    They are -1, which is no class, where not all logits are finite.
    """
    classes = logits.topk(min(top, logits.shape[-1])).indices
    return classes.masked_fill(~logits.isfinite().all(-1, keepdim=True), -1)


def probabilities_of(logits: Tensor, classes: Tensor) -> Tensor:
    """Returns the probabilities (b, k) of classes of `rank_classes`; NaN for -1."""
    return F.softmax(logits.float(), 1).gather(1, classes.clamp(min=0)).masked_fill(classes < 0, math.nan)


def rate_classes(model: nn.Module, images: Tensor, targets: Tensor, rows: list[Tensor] | None) -> list[Tensor]:
    """Computes the metrics `CLASSES` of every image of a batch, and adds a row for each image to `rows`.

    Rows are label, loss, `rank_classes` and probabilities, (b, 2 + 2 k) in float64, which represents them exactly.
    """
    logits = model(images)
    classes = rank_classes(logits)
    hits = classes == targets[:, None]
    losses = (
        F.cross_entropy(logits.float(), targets, reduction="none").double().masked_fill(classes[:, 0] < 0, math.nan)
    )
    if rows is not None:
        rows.append(torch.cat([targets[:, None], losses[:, None], classes, probabilities_of(logits, classes)], 1))
    return [100.0 * hits[:, 0].double(), 100.0 * hits.sum(1).double(), losses]


CLASSES = Measure(("top1", "top5", "loss"), rate_classes, by_class=True)
"""top1, top5: percent of images whose class has the highest / one of the five highest logits (of all logits, if there
are fewer than five). loss: mean cross-entropy, nats. An image whose logits are not all finite is wrong, and its loss is
NaN."""


class WeightedCrossEntropy(nn.Module):
    """Cross-entropy with class weights: the mean over images of the weight of an image times its cross-entropy.

    The weight of an image is that of its class, and of a mixed image the same mix of the weights of its classes. The
    best prediction is thus the smoothed target, as without weights. torch's own weights are factors of the terms of the
    sum over classes: with label smoothing, the best prediction for an image of a common class can be a rare class
    (pytorch issue 104776). For class indices torch also divides by the weights of the batch, so that the gradients of
    ranks and micro-batches would not add up to those of the whole batch.

    Args:
        weight: (classes,). smoothing: label smoothing; soft targets have it already, as those of timm's mixup.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, smoothing: float):
        super().__init__()
        self.register_buffer("weight", weight)
        self.smoothing = smoothing

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not targets.is_floating_point():
            losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.smoothing)
            return (self.weight[targets] * losses).mean()
        mixed = (targets * self.weight).sum(1)
        weights = (mixed - self.smoothing * self.weight.mean()) / (1 - self.smoothing)  # without the smoothed share
        return (weights * F.cross_entropy(logits, targets, reduction="none")).mean()


def create_loss(augment: Augment, class_weights: Sequence[float] | None = None) -> nn.Module:
    """Creates the cross-entropy with class indices, or with the soft targets of mixup, which does the smoothing itself.

    Args:
        augment: section `augment` of a run. class_weights: weight of every class; None: 1.
    """
    if class_weights is not None:
        return WeightedCrossEntropy(torch.tensor(class_weights), augment.smoothing)
    return nn.CrossEntropyLoss(label_smoothing=0.0 if augment.mixup or augment.cutmix else augment.smoothing)


def label_loss(run: Run, model: nn.Module) -> nn.Module:
    """Creates the loss of `run` with labels, on the device of `model`; see `create_loss`."""
    weights = run.train.class_weights
    assert weights != "balanced", "`weigh_classes` replaces it by numbers"
    return create_loss(run.augment, weights).to(next(model.parameters()).device)


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
        return cls(label_loss(run, model))

    def __call__(self, network: Callable[[Tensor], Tensor], images: Tensor, targets: Tensor, /) -> Tensor:
        return self.loss(network(images), targets)
