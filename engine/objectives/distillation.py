"""The teacher of a run, and classification with one as in DeiT (Touvron et al., 2021, section 4)."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.options import OptionError
from engine.config.objective_options import TEACHER_OF_INIT, Distill
from engine.config.schema import Run
from engine.objectives.classification import CLASSES, label_loss
from engine.objectives.objective import Objective

MeanStd = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation, each with one value for every channel."""


class Teacher(nn.Module):
    """A trained model in evaluation mode: images (B, C, H, W) as a run normalises them -> logits (B, classes).

    Grey images, (B, 1, H, W), are three equal channels to a model of RGB images. No gradients are computed.

    Args:
        given: of the run. own: of the images that the model was trained with.
    Attributes:
        shape: (C, H, W) of the images that the model was trained with.
        classes: their names in the order of the logits; None: not known. note: on the choice of its weights, or "".
    """

    note = ""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, shape: Sequence[int], classes: list[str] | None, given: MeanStd, own: MeanStd):
        super().__init__()
        self.model, self.shape, self.classes = model.eval(), tuple(shape), classes
        (mean, std), (own_mean, own_std) = (torch.tensor(x, dtype=torch.float64)[..., None, None] for x in (given, own))
        self.register_buffer("scale", (std / own_std).float())
        self.register_buffer("shift", ((mean - own_mean) / own_std).float())

    def normalise(self, images: Tensor) -> Tensor:
        """Images of the run -> as the model was trained with."""
        return images * self.scale + self.shift

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.model(self.normalise(images))


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
        assert distill.type != "attention", "it has an objective of its own"
        self.loss, self.distill, self.teacher = loss, distill, teacher
        self.identity = {"teacher_weights": digest_weights(teacher.get_submodule("model").state_dict())}

    @staticmethod
    def applies(run: Run) -> bool:
        return run.distill.teacher is not None

    @staticmethod
    def check(run: Run) -> None:
        """Refuses options of `Distill` without an effect, and a teacher that is not named."""
        distill = run.distill
        if distill.teacher is None and distill != Distill():
            problem = " = null, but other options of distill are given: name a teacher, or leave them out"
            raise OptionError("distill.teacher", problem)
        if distill.teacher == TEACHER_OF_INIT and run.init.weights is None:
            problem = f" = {TEACHER_OF_INIT}, which is null; give init.weights, or name a teacher"
            raise OptionError("distill.teacher", problem)
        if not distill.type.startswith("soft") and distill.tau != Distill.tau:
            problem = f" = {distill.tau:g} acts on soft predictions: set distill.type=soft, or leave it out"
            raise OptionError("distill.tau", problem)

    @classmethod
    def from_run(cls, run: Run, model: nn.Module, create_teacher: Callable[[], nn.Module]) -> Self:
        return cls(label_loss(run, model), run.distill, create_teacher())

    def __call__(self, network: Callable[..., Any], images: Tensor, targets: Tensor, /) -> Tensor:
        outputs = network(images)
        logits, distilled = split_heads(outputs)
        divergence = distillation_loss(distilled, self.teacher(images), self.distill.type, self.distill.tau)
        alpha = self.distill.weight
        return (1 - alpha) * self.loss(logits, targets) + alpha * divergence


def split_heads(outputs: Any) -> tuple[Tensor, Tensor]:
    """Logits for the targets and for the teacher: a model without a distillation token has the same for both."""
    return outputs if isinstance(outputs, tuple) else (outputs, outputs)


def distillation_loss(logits: Tensor, teacher: Tensor, kind: str, tau: float) -> Tensor:
    """Computes the divergence of logits (B, classes) from those of a teacher, a scalar; half precision becomes fp32.

    hard: cross-entropy with the teacher's most probable class; NaN if the teacher's logits are not finite. soft: the
    Kullback-Leibler divergence of the model's distribution from the teacher's, both at temperature `tau`, times tau^2,
    the mean over images (equation 2 of the paper). soft_released: the mean over images and classes, as in DeiT's code.
    """
    if kind == "hard":
        loss = F.cross_entropy(logits, teacher.argmax(1))
        return torch.where(teacher.isfinite().all(), loss, math.nan)  # the place of a NaN is no class
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
