"""The objective of a run, and the teacher that it may need."""

from collections.abc import Sequence
from typing import cast

import torch
from timm.layers import to_2tuple
from torch import nn

from engine.checkpoints.files import WEIGHTS, choose_weights
from engine.checkpoints.identify import FOREIGN, TIMM, Kind, identify
from engine.checkpoints.weight_sources import load_timm
from engine.checkpoints.weights import build_model, check_predicts_classes
from engine.config.load import parse_run
from engine.config.schema import Run, num_channels, per_channel
from engine.data.splits import Images, classes_of
from engine.objectives import choose_objective
from engine.objectives.distillation import MeanStd, Teacher
from engine.objectives.objective import Objective
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.text import describe_difference, describe_error
from models.deit import Deit


def create_objective(run: Run, model: nn.Module, images: Images, world: World) -> Objective:
    """Creates the objective of `run`; see `create_teacher`."""
    return choose_objective(run).from_run(run, lambda: create_teacher(run, model, images, world))


def create_teacher(run: Run, model: nn.Module, images: Images, world: World) -> Teacher:
    """Reads the teacher of `run` and tries it. The distillation token of `model`, if there is one, learns from it.

    Args:
        images: training images, whose classes must be the teacher's.
    Raises:
        UserError: the teacher cannot be read, does not take the run's images, or has other classes.
    """
    distill, shape = run.distill, _image_shape(run)
    name = cast(str, distill.teacher)
    try:
        teacher = read_teacher(name, run).to(world.device)
        check_teacher(teacher, shape, classes_of(images), world.device)
    except UserError as error:
        raise UserError(f"distill.teacher={name}: {error}") from None
    if run.model.get("dist_token"):
        cast(Deit, model).set_distilled_training()
    if world.is_primary:
        line = f"distill.teacher={name}: {distill.type}, alpha {distill.alpha:g}"
        if shape != teacher.shape:
            line += f"; trained with images of {_text(teacher.shape)}, asked about {_text(shape)}"
        if teacher.classes is None:
            line += "; its classes are not known, and are taken for the data's, in order"
        print(line, flush=True)
    return teacher


def read_teacher(name: str, run: Run) -> Teacher:
    """The model that `distill.teacher` names, for the images of `run`.

    Of a run directory it is the best checkpoint, of a checkpoint the averaged weights where they are kept.

    Raises:
        UserError: no such model, or weights alone, which do not say of what model they are.
    """
    found = identify(name)
    if found.kind is Kind.HUB:
        model = load_timm(name.removeprefix(TIMM))
        config = model.pretrained_cfg
        return Teacher(model, config["input_size"], None, _normalisation(run), (config["mean"], config["std"]))
    if found.kind in FOREIGN:
        remedy = f"name {TIMM}NAME of timm's hub, or a run of train.py"
        raise UserError(f"weights alone, which do not say of what model they are; {remedy}")
    path, checkpoint, kinds = choose_weights(found, "best", None)[-1]  # averaged ones come last
    there, state = parse_run(checkpoint["config"], str(path)), WEIGHTS[kinds[-1]]
    check_predicts_classes(there, str(path))
    model = build_model(there, checkpoint[state], f"{path}: {state}")
    return Teacher(model, _image_shape(there), checkpoint.get("classes"), _normalisation(run), _normalisation(there))


def check_teacher(teacher: Teacher, shape: tuple[int, int, int], classes: Sequence[str], device: torch.device) -> None:
    """Refuses a teacher, after a trial.

    Raises:
        UserError: it does not take images of this shape (C, H, W), or has other classes.
    """
    try:
        logits = teacher(torch.zeros(1, *shape, device=device))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = describe_error(error)
        problem = f"trained with images of {_text(teacher.shape)}, it does not take {_text(shape)} ({reason})"
        raise UserError(f"{problem}; make model.img_size and model.in_chans the teacher's") from None
    if logits.shape != (1, len(classes)):
        problem = f"it has {_text(logits.shape[1:])} classes, the images have {len(classes)}"
    elif teacher.classes not in (None, list(classes)):
        problem = f"other classes: {describe_difference(teacher.classes, classes, ('the teacher', 'the data'))}"
    else:
        return
    raise UserError(f"{problem}; choose a teacher of the same classes")


def _normalisation(run: Run) -> MeanStd:
    channels = num_channels(run)
    return per_channel(run.data.mean, channels), per_channel(run.data.std, channels)


def _image_shape(run: Run) -> tuple[int, int, int]:
    return num_channels(run), *to_2tuple(run.model["img_size"])


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
