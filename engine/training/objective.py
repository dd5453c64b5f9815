"""The objective of a run, and the teacher that it may need."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import cast

import torch
from timm.layers import to_2tuple
from torch import nn

from engine.checkpoints.adapt import fit_weights, list_other_options, summarize
from engine.checkpoints.files import WEIGHTS, open_weights
from engine.checkpoints.identify import FOREIGN, Kind, identify
from engine.checkpoints.local_dir import read_label_names
from engine.checkpoints.weight_sources import describe_unnamed, load_timm, read_weights
from engine.checkpoints.weights import build_model, check_predicts_classes
from engine.config.objective_options import TEACHER_OF_INIT
from engine.config.schema import Run, num_channels, per_channel
from engine.data.splits import Images, classes_of, count_classes
from engine.objectives import choose_objective
from engine.objectives.alignment import last_call, record_calls
from engine.objectives.distillation import MeanStd, Teacher
from engine.objectives.objective import Objective
from engine.run.described import parse_described
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.text import describe_difference, describe_error, numbers_of, one_line
from models import create_model, parse_model, published_attention
from models.base import attention_layers
from models.budgets import Budgets
from models.deit import Deit
from models.freeze import describe_freeze, head_names
from models.hosted import TIMM, described


def create_objective(run: Run, model: nn.Module, images: Images, world: World) -> Objective:
    """Creates the objective of `run`; see `create_teacher`."""
    run = weigh_classes(run, images, world)
    objective = choose_objective(run).from_run(run, model, lambda: create_teacher(run, model, images, world))
    objective.budgets = Budgets(model, run.model, run.attention, run.train.budgets)
    if objective.summary and world.is_primary:
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        print(f"{objective.summary}: {describe_freeze(model, frozen)}", flush=True)
    return objective


def weigh_classes(run: Run, images: Images, world: World) -> Run:
    """Returns `run` with the numbers of `train.class_weights: balanced`; an OptionError: a class has no image."""
    if run.train.class_weights != "balanced":
        return run
    counts, names = count_classes(images), classes_of(images)
    weights = counts.sum() / (len(counts) * counts)
    if world.is_primary:
        ends = (f"{weights[i]:.3g} ({one_line(names[i], 50)!r})" for i in (weights.argmin(), weights.argmax()))
        print(f"train.class_weights = balanced: {' to '.join(ends)}", flush=True)
    return replace(run, train=replace(run.train, class_weights=tuple(weights.tolist())))


def create_teacher(run: Run, model: nn.Module, images: Images, world: World) -> Teacher:
    """Reads the teacher of `run` and tries it. The distillation token of `model`, if there is one, learns from its
    predictions; with `distill.type: attention`, both heads learn together.

    Args:
        images: training images, whose classes must be the teacher's.
    Raises:
        UserError: the teacher cannot be read, does not take the run's images, or has other classes.
    """
    distill, shape = run.distill, _image_shape(run)
    is_aligned = distill.type == "attention"  # the teacher's predictions are not used
    name = cast(str, run.init.weights if distill.teacher == TEACHER_OF_INIT else distill.teacher)
    try:
        teacher = read_teacher(name, run).to(world.device)
        check_teacher(teacher, shape, None if is_aligned else classes_of(images), world.device)
        if is_aligned:
            check_layers(teacher, model, shape, world.device)
    except UserError as error:
        raise UserError(f"distill.teacher={name}: {error}") from None
    if run.model.get("dist_token") and not is_aligned:
        cast(Deit, model).set_distilled_training()
    if world.is_primary:
        line = f"distill.teacher={name}: {distill.type}, alpha {distill.weight:g}"
        if shape != teacher.shape:
            line += f"; trained with images of {_text(teacher.shape)}, asked about {_text(shape)}"
        if teacher.note:
            line += f"; {teacher.note}"
        if teacher.classes is None and not is_aligned:
            line += f"; its classes are {describe_unnamed(classes_of(images))}"
        print(line, flush=True)
    return teacher


def read_teacher(name: str, run: Run) -> Teacher:
    """Reads the model that `distill.teacher` names, for the images of `run`.

    A run directory gives its best checkpoint, and a checkpoint the weights of `open_weights`. With
    `distill.type: attention`, weights of other programs and of timm's hub load into the run's own model with the
    published attention of its family. A model of transformers is built for the run's images.

    Raises:
        UserError: no such model, or a file of weights that does not name its model.
    """
    found = identify(name, follow_links=True)
    if run.distill.type == "attention" and found.kind in (Kind.HUB, Kind.TRANSFORMERS, *FOREIGN):
        return read_published(name, run)
    if found.kind is Kind.HUB:
        model = load_timm(name.removeprefix(TIMM))
        config = model.pretrained_cfg
        images, classes = (config["mean"], config["std"]), read_label_names(config, name)
        return Teacher(model, config["input_size"], classes, _normalisation(run), images)
    if found.kind is Kind.TRANSFORMERS:
        own = asdict(parse_model(name, described(name, {"in_chans": num_channels(run)})))
        teacher = read_published(name, replace(run, model=own | {"img_size": run.model["img_size"]}))
        teacher.shape = num_channels(run), *to_2tuple(own["img_size"])
        return teacher
    if found.kind in FOREIGN:
        remedy = f"name {TIMM}NAME of timm's hub, or a run of train.py"
        raise UserError(f"weights alone, which do not say of what model they are; {remedy}")
    path, checkpoint, kind, note, _ = open_weights(found)
    there, state = parse_described(checkpoint["config"], str(path)), WEIGHTS[kind]
    check_predicts_classes(there, str(path))
    model = build_model(there, checkpoint[state], f"{path}: {state}")
    images = _normalisation(run), _normalisation(there)
    teacher = Teacher(model, _image_shape(there), checkpoint.get("classes"), *images)
    teacher.note = note
    return teacher


def read_published(name: str, run: Run) -> Teacher:
    """The model of `run` with its family's `published_attention` and the weights `name` of another program.

    Raises:
        UserError: they are not the weights of that model.
    """
    source = read_weights(name)
    named = head_names(source.model) if hasattr(source.model, "get_classifier") else ()
    names = {"head.weight", "classifier.weight", "fc.weight", *named}
    head = next((x for key, x in source.state.items() if key in names), ())
    options = {**run.model, "num_classes": len(head)}
    model = create_model(attention=published_attention(run.model["name"]), **options)
    state, outcome = fit_weights(model, source, name)
    if source.model is not None and (others := list_other_options(source.model, model, False)):
        raise UserError(f"not the weights of {run.model['name']} as it is here: {'; '.join(others)}")
    if any(outcome[kind] for kind in ("fresh", "re-made", "dropped")):
        remedy = "set the options of model to those of the weights (class_token, stem, ...)"
        raise UserError(f"not the weights of {run.model['name']} as it is here: {summarize(outcome)}; {remedy}")
    model.load_state_dict(state, strict=False)
    own = _normalisation(run)
    images = source.images.get("mean", own[0]), source.images.get("std", own[1])
    classes = None if source.classes is None else list(source.classes)
    teacher = Teacher(model, _image_shape(run), classes, own, images)
    teacher.note = "" if source.images else "its normalisation is not known, and is taken for the run's"
    return teacher


@torch.no_grad()
def check_layers(teacher: Teacher, model: nn.Module, shape: tuple[int, int, int], device: torch.device) -> None:
    """Refuses a teacher whose attention layers receive other tokens than the layers of `model`, after a trial.

    Raises:
        UserError: the number of layers differs, or the number of tokens or channels in a layer.
    """
    if not attention_layers(teacher.model):
        raise UserError("not a model of this project, whose attention layers could be found; name a run, or weights")
    images, found = torch.zeros(1, *shape, device=device), []
    for one, given in ((teacher.model, teacher.normalise(images)), (model, images)):
        trial = copy.deepcopy(one).to(device).eval()
        layers = record_calls(trial)
        trial(given)
        calls = [last_call(layer) for layer in layers]
        found.append([(tuple(call.x.shape[1:]), call.others["grid"]) for call in calls])
    theirs, own = found
    if len(theirs) != len(own):
        problem = f"it has {len(theirs)} attention layers, the model has {len(own)}"
        raise UserError(f"{problem}; set the options of model to the teacher's values")
    for number, pair in enumerate(zip(theirs, own, strict=True)):
        there, here = (f"{_text(tokens)} tokens of a {_text(grid)} grid" for tokens, grid in pair)
        if there != here:
            problem = f"its attention layer {number} gets {there}, the model's {here}"
            raise UserError(f"{problem}; set model.patch_size, embed_dim, class_token, ... to the teacher's values")


def check_teacher(
    teacher: Teacher, shape: tuple[int, int, int], classes: Sequence[str] | None, device: torch.device
) -> None:
    """Refuses a teacher, after a trial.

    Args:
        classes: classes of the data; None: the teacher's predictions are not used.
    Raises:
        UserError: it does not take images of this shape (C, H, W), or has other classes.
    """
    try:
        logits = teacher(torch.zeros(1, *shape, device=device))
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = describe_error(error)
        problem = f"trained with images of {_text(teacher.shape)}, it does not take {_text(shape)} ({reason})"
        raise UserError(f"{problem}; set model.img_size and model.in_chans to the teacher's values") from None
    if classes is None:
        return
    if logits.shape != (1, len(classes)):
        problem = f"it has {_text(logits.shape[1:])} classes, the images have {len(classes)}"
    elif teacher.classes not in (None, list(classes)) and (
        numbers_of(classes, teacher.classes or ()) != [*range(len(classes))]
    ):
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
