"""The loss of a run: cross-entropy, and with a teacher the distillation of DeiT (Touvron et al., 2021, section 4)."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from engine.augment import create_loss, num_channels, per_channel
from engine.checkpoint import WEIGHTS, ForeignCheckpoint, find_weights
from engine.config import parse_run
from engine.copy_task import Copying
from engine.data import Images, classes_of, difference
from engine.distributed import World
from engine.errors import UserError, one_line
from engine.evaluate import CLASSES
from engine.schema import Distill, Run
from engine.simmim import MaskedImages
from engine.sources import TIMM, load_timm
from engine.weights import build_model, check_predicts_classes
from models.deit import Deit

Normalisation = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation, each with one value for every channel."""


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

    def __init__(
        self,
        model: nn.Module,
        shape: Sequence[int],
        classes: list[str] | None,
        given: Normalisation,
        own: Normalisation,
    ):
        super().__init__()
        self.model, self.shape, self.classes = model.eval(), tuple(shape), classes
        (mean, std), (own_mean, own_std) = (torch.tensor(x, dtype=torch.float64)[..., None, None] for x in (given, own))
        self.register_buffer("scale", (std / own_std).float())
        self.register_buffer("shift", ((mean - own_mean) / own_std).float())

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.model(images * self.scale + self.shift)


class Criterion:
    """The loss of a run, a scalar: called with the network, images (B, C, H, W) and targets.

    The network's outputs are logits (B, classes), or a pair of them: of the class token, for the targets, and of the
    distillation token, for the teacher. Targets are class indices (B,), or after mixup soft ones (B, classes). The
    teacher is asked about the very images that the model has seen, augmented and mixed.

    Args:
        loss: of logits and targets. teacher: None: there is none.
    Attributes:
        identity: metadata of checkpoints, the SHA-256 of the teacher's weights: a run resumes with the same only.
        measure: what an evaluation finds.
    """

    measure = CLASSES

    def __init__(self, loss: nn.Module, distill: Distill, teacher: Teacher | None = None):
        self.loss, self.distill, self.teacher = loss, distill, teacher
        self.identity = {"teacher_weights": digest_weights(teacher.model.state_dict()) if teacher else "none"}

    def __call__(
        self, network: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]], images: Tensor, targets: Tensor
    ) -> Tensor:
        outputs = network(images)
        if self.teacher is None:
            return self.loss(outputs, targets)
        logits, distilled = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        divergence = distillation_loss(distilled, self.teacher(images), self.distill.type, self.distill.tau)
        return (1 - self.distill.alpha) * self.loss(logits, targets) + self.distill.alpha * divergence

    def pictures(self, rows: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """Of every evaluation: none. What the last finds of single images is shown as predictions."""
        return {}


def distillation_loss(
    logits: Tensor, teacher: Tensor, kind: Literal["hard", "soft", "soft_released"], tau: float
) -> Tensor:
    """How far logits (B, classes) are from those of a teacher, a scalar; half precision is made fp32.

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


def create_criterion(run: Run, model: nn.Module, images: Images, world: World) -> Criterion | MaskedImages | Copying:
    """What `run` trains `model` for: classes, with a mask token pixels, on the copy task tokens.

    A distillation token, where the model has one, learns from the teacher.

    Args:
        images: of the training, whose classes must be the teacher's.
    Raises:
        UserError: a teacher that cannot be read, does not take the run's images, or has other classes.
    """
    if run.model.get("mask_token"):
        return MaskedImages()
    if run.data.dataset == "copy":
        return Copying()
    loss, distill = create_loss(run.augment), run.distill
    if distill.teacher is None:
        return Criterion(loss, distill)
    shape = _image_shape(run)
    try:
        teacher = read_teacher(distill.teacher, run).to(world.device)
        check_teacher(teacher, shape, classes_of(images), world.device)
    except UserError as error:
        raise UserError(f"distill.teacher={distill.teacher}: {error}") from None
    if run.model.get("dist_token"):
        cast(Deit, model).set_distilled_training()
    if world.is_primary:
        line = f"distill.teacher={distill.teacher}: {distill.type}, alpha {distill.alpha:g}"
        if shape != teacher.shape:
            line += f"; trained with images of {_text(teacher.shape)}, asked about {_text(shape)}"
        print(line, flush=True)
    return Criterion(loss, distill, teacher)


def read_teacher(name: str, run: Run) -> Teacher:
    """The model that `distill.teacher` names, for the images of `run`.

    Of a run directory it is the best checkpoint, of a checkpoint the averaged weights where they are kept.

    Raises:
        UserError: no such model, or weights alone, which do not say of what model they are.
    """
    if name.startswith(TIMM):
        model = load_timm(name.removeprefix(TIMM))
        config = model.pretrained_cfg
        return Teacher(model, config["input_size"], None, _normalisation(run), (config["mean"], config["std"]))
    try:
        found, checkpoint, kinds = find_weights(Path(name).expanduser(), "best", None)[-1]  # averaged ones come last
    except ForeignCheckpoint:
        remedy = f"name {TIMM}NAME of timm's hub, or a run of train.py"
        raise UserError(f"weights alone, which do not say of what model they are; {remedy}") from None
    there, state = parse_run(checkpoint["config"], str(found)), WEIGHTS[kinds[-1]]
    check_predicts_classes(there, str(found))
    model = build_model(there, checkpoint[state], f"{found}: {state}")
    return Teacher(model, _image_shape(there), checkpoint.get("classes"), _normalisation(run), _normalisation(there))


def check_teacher(teacher: Teacher, shape: tuple[int, int, int], classes: Sequence[str], device: torch.device) -> None:
    """Refuses a teacher, after a trial.

    Raises:
        UserError: it does not take images of this shape (C, H, W), or has other classes.
    """
    try:
        logits = teacher(torch.zeros(1, *shape, device=device))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        problem = f"trained with images of {_text(teacher.shape)}, it does not take {_text(shape)} ({reason})"
        raise UserError(f"{problem}; make model.img_size and model.in_chans the teacher's") from None
    if logits.shape != (1, len(classes)):
        problem = f"it has {_text(logits.shape[1:])} classes, the images have {len(classes)}"
    elif teacher.classes not in (None, list(classes)):
        problem = f"other classes: {difference(teacher.classes, classes, ('the teacher', 'the data'))}"
    else:
        return
    raise UserError(f"{problem}; choose a teacher of the same classes")


def digest_weights(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, x in sorted(state.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\0".encode())
        digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _normalisation(run: Run) -> Normalisation:
    channels = num_channels(run)
    return per_channel(run.data.mean, channels), per_channel(run.data.std, channels)


def _image_shape(run: Run) -> tuple[int, int, int]:
    return num_channels(run), *to_2tuple(run.model["img_size"])


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
