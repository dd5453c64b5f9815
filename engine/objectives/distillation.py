"""Classification with a teacher: the distillation of DeiT (Touvron et al., 2021, section 4)."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.options import OptionError, option
from engine.objectives.classification import CLASSES, create_loss
from engine.objectives.objective import Objective, Run

MeanStd = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation, each with one value for every channel."""


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Distillation as in DeiT: the loss is (1 - alpha) x cross-entropy + alpha x divergence from a teacher."""

    teacher: str | None = option(
        None, "trained model: run directory, checkpoint or export, or timm:NAME of timm's hub; null: none"
    )
    type: Literal["hard", "soft", "soft_released"] = option(
        "hard",
        "cross-entropy with the teacher's class, or tau^2 x the divergence of the predictions; soft_released: also"
        " divided by the number of classes, as by DeiT's code",
    )
    alpha: float = option(0.5, "weight of the teacher", low=0, high=1)
    tau: float = option(1.0, "temperature of soft predictions", above=0, high=1000)


class Teacher(nn.Module):
    """A trained model in evaluation mode: images (B, C, H, W) as a run normalises them -> logits (B, classes).

    Grey images, (B, 1, H, W), are three equal channels to a model of RGB images. No gradients are computed.

    Args:
        given: of the run. own: of the images that the model was trained with.
    Attributes:
        shape: (C, H, W) of the images that the model was trained with.
        classes: their names in the order of the logits; None: not known.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, shape: Sequence[int], classes: list[str] | None, given: MeanStd, own: MeanStd):
        super().__init__()
        self.model, self.shape, self.classes = model.eval(), tuple(shape), classes
        (mean, std), (own_mean, own_std) = (torch.tensor(x, dtype=torch.float64)[..., None, None] for x in (given, own))
        self.register_buffer("scale", (std / own_std).float())
        self.register_buffer("shift", ((mean - own_mean) / own_std).float())

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.model(images * self.scale + self.shift)


class Distillation(Objective):
    """The objective of a run on classes with a teacher.

    The network's outputs are logits (B, classes), or a pair of them: of the class token, for the targets, and of the
    distillation token, for the teacher. Targets are class indices (B,), or after mixup soft ones (B, classes). The
    teacher gets the very images that the model has seen, augmented and mixed.

    Args:
        loss: function of logits and targets.
    """

    measure = CLASSES

    def __init__(self, loss: nn.Module, distill: Distill, teacher: nn.Module):
        self.loss, self.distill, self.teacher = loss, distill, teacher
        self.identity = {"teacher_weights": digest_weights(teacher.get_submodule("model").state_dict())}

    @staticmethod
    def applies(run: Run) -> bool:
        return run.distill.teacher is not None

    @staticmethod
    def check(run: Run) -> None:
        """Refuses options of `Distill` without an effect: there is no teacher, or the temperature acts on nothing."""
        distill = run.distill
        if distill.teacher is None and distill != Distill():
            problem = " = null, but other options of distill are given: name a teacher, or leave them out"
            raise OptionError("distill.teacher", problem)
        if distill.type == "hard" and distill.tau != Distill.tau:
            problem = f" = {distill.tau:g} acts on soft predictions: set distill.type=soft, or leave it out"
            raise OptionError("distill.tau", problem)

    @classmethod
    def from_run(cls, run: Run, create_teacher: Callable[[], nn.Module]) -> Self:
        return cls(create_loss(run.augment), run.distill, create_teacher())

    def __call__(self, network: Callable[..., Any], images: Tensor, targets: Tensor, /) -> Tensor:
        outputs = network(images)
        logits, distilled = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        divergence = distillation_loss(distilled, self.teacher(images), self.distill.type, self.distill.tau)
        return (1 - self.distill.alpha) * self.loss(logits, targets) + self.distill.alpha * divergence


def distillation_loss(
    logits: Tensor, teacher: Tensor, kind: Literal["hard", "soft", "soft_released"], tau: float
) -> Tensor:
    """Computes the divergence of logits (B, classes) from those of a teacher, a scalar; half precision becomes fp32.

    hard: cross-entropy with the teacher's most probable class. soft: the Kullback-Leibler divergence of the model's
    distribution from the teacher's, both at temperature `tau`, times tau^2, the mean over images (equation 2 of the
    paper). soft_released: the mean over images and classes, as in DeiT's code.
    """
    if kind == "hard":
        return F.cross_entropy(logits, teacher.argmax(1))
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = (F.log_softmax(x.to(dtype) / tau, 1) for x in (teacher, logits))
    divergence = tau**2 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    return divergence / logits.shape[1] if kind == "soft_released" else divergence


def digest_weights(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, x in sorted(state.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\0".encode())
        digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
