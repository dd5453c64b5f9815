"""Options of the objectives that have some: distillation, and pre-training on masked images."""

from dataclasses import dataclass
from typing import Literal

from attention.options import option

TEACHER_OF_INIT = "init.weights"
"""Value of distill.teacher that means the model of init.weights."""


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Distillation: the loss is (1 - alpha) x cross-entropy + alpha x divergence from a teacher, as in DeiT, or x the
    error of attention layers.
    """

    teacher: str | None = option(
        None,
        "trained model: run directory, checkpoint or export, timm:NAME or hf:NAME; init.weights: that of this option;"
        " null: none",
    )
    type: Literal["hard", "soft", "soft_released", "attention"] = option(
        "hard",
        "cross-entropy with the teacher's class, or tau^2 x the divergence of the predictions; soft_released: also"
        " divided by the number of classes, as by DeiT's code; attention: relative squared error of attention layers,"
        " on the inputs of the teacher's",
    )
    alpha: float | None = option(
        None, "weight of the teacher; null: 0.5, and for attention 1, which uses no labels", low=0, high=1
    )
    tau: float = option(1.0, "temperature of soft predictions", above=0, high=1000)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", self.weight)  # a run without this section has the same

    @property
    def weight(self) -> float:
        """`alpha`, or its default for the type."""
        return self.alpha if self.alpha is not None else float(self.type == "attention") or 0.5


@dataclass(frozen=True, kw_only=True)
class Simmim:
    """Pre-training on masked images as in SimMIM, of a model with a mask token (model.mask_token)."""

    mask_ratio: float = option(0.6, "share of squares of an image that are masked, rounded up", above=0, below=1)
    mask_size: int = option(
        32, "side of a square, pixels: a multiple of the patch size that divides the image", low=1, high=4096
    )
