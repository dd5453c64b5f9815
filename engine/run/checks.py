"""Checks of a whole run: options that are valid each on its own but not together."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from timm.optim import list_optimizers

from attention.options import OptionError, nearest
from engine.config.schema import Run
from engine.objectives import OBJECTIVES, choose_objective
from engine.objectives.sandwich import Sandwich
from models import is_host

Check = Callable[[Run], Iterable[OptionError] | None]
"""Function that yields or raises what it refuses."""


def list_checks(world_size: int = 1) -> list[Check]:
    """Returns the checks of options that are valid each on its own but not together.

    Args:
        world_size: ranks the run is to be trained with.
    """
    own: list[Check] = [partial(_check_batch, world_size), _check_warmup, _check_rates, _check_choice_of_images]
    of_objectives = (objective.check for objective in OBJECTIVES.values())
    return [*own, _check_augmentation, _check_names, *of_objectives, _check_training]


def _check_names(run: Run) -> Iterator[OptionError]:
    """Refuses an optimiser that timm lacks, and images of other channels than files have."""
    if (opt := run.optim.opt) not in (known := list_optimizers()):
        yield OptionError("optim.opt", f" = {opt!r} is not an optimiser of timm{nearest(opt, known)}")
    if run.model["in_chans"] not in (1, 3):
        yield OptionError("model.in_chans", f" = {run.model['in_chans']}: images have 3 channels (RGB) or 1 (grey)")


def _check_batch(world_size: int, run: Run) -> Iterator[OptionError]:
    """Refuses a total batch that the ranks cannot share equally."""
    train = run.train
    share = world_size * train.grad_accum_steps
    batch_size, rest = divmod(train.total_batch_size, share)
    total = f" = {train.total_batch_size}"
    if rest or not batch_size:
        problem = f"is not divisible by {world_size} ranks x {train.grad_accum_steps} accumulation steps"
        nearest_size = max(1, round(train.total_batch_size / share)) * share
        yield OptionError("train.total_batch_size", f"{total} {problem}; nearest: {nearest_size}")
    elif (run.augment.mixup or run.augment.cutmix) and batch_size % 2:
        problem = f"leaves {batch_size} images per rank and step, but mixup and cutmix pair images: make it even"
        yield OptionError("train.total_batch_size", f"{total} {problem}")


def _check_warmup(run: Run) -> Iterator[OptionError]:
    """Refuses a warm-up longer than the run."""
    if (warmup := run.schedule.warmup_epochs) > run.schedule.epochs:
        yield OptionError("schedule.warmup_epochs", f" = {warmup} is above schedule.epochs = {run.schedule.epochs}")


def _check_rates(run: Run) -> Iterator[OptionError]:
    """Refuses learning rates above the peak."""
    schedule, optim, batch_size = run.schedule, run.optim, run.train.total_batch_size
    peak_lr = optim.lr * batch_size / optim.lr_base_size
    scaled = f"the peak learning rate {peak_lr:g} (lr {optim.lr:g} scaled from {optim.lr_base_size} images)"
    remedy = "lower it, or raise optim.lr"
    if batch_size < optim.lr_base_size:
        remedy = f"lower it, raise optim.lr, or set optim.lr_base_size = {batch_size} to leave lr unscaled"
    if schedule.warmup_epochs and schedule.warmup_lr > peak_lr:
        yield OptionError("schedule.warmup_lr", f" = {schedule.warmup_lr:g} is above {scaled}; {remedy}")
    elif schedule.sched != "constant" and schedule.min_lr > peak_lr:
        yield OptionError("schedule.min_lr", f" = {schedule.min_lr:g} is above {scaled}; {remedy}")


def _check_choice_of_images(run: Run) -> Iterator[OptionError]:
    """Refuses a contradictory choice of training images, or of those held out for validation."""
    data = run.data
    if isinstance(data.subset, float) and data.subset > 1:
        problem = f" = {data.subset} is no fraction; write {data.subset:.0f} for as many images of every class"
        yield OptionError("data.subset", problem)
    if data.val_fraction is not None and data.folds is not None:
        both = f"data.val_fraction = {data.val_fraction:g}: both hold images out"
        yield OptionError("data.folds", f" = {data.folds}, and {both}; set one to null")
    if data.fold and data.folds is None:
        yield OptionError("data.fold", f" = {data.fold}, but data.folds is null: give their number, or leave it out")
    elif data.folds is not None and data.fold >= data.folds:
        yield OptionError("data.fold", f" = {data.fold} is none of data.folds = {data.folds}: 0 to {data.folds - 1}")
    if data.subset is None and not data.held_out_by and data.subset_seed:
        chosen = "data.subset, data.val_fraction and data.folds are null"
        yield OptionError("data.subset_seed", f" = {data.subset_seed}, but {chosen}: set one, or leave it out")


def _check_augmentation(run: Run) -> Iterator[OptionError]:
    """Refuses ranges that are not ascending, and a policy that is not valid."""
    augment = run.augment
    for name in ("scale", "ratio"):
        if (bounds := getattr(augment, name))[0] > bounds[1]:
            yield OptionError(f"augment.{name}", f" = {list(bounds)} is not in ascending order")
    if augment.auto_augment is not None:
        check_policy(augment.auto_augment)


def _check_training(run: Run) -> Iterator[OptionError]:
    """Refuses options of the section `train` without an effect or beside others."""
    train = run.train
    if (weights := train.class_weights) is not None:
        key, num_classes = "train.class_weights", run.model["num_classes"]
        if not choose_objective(run).learns_labels(run):
            yield OptionError(key, " is given, but no labels have a part in the loss of this run; set it to null")
        elif weights != "balanced" and len(weights) != num_classes:
            problem = f" has {len(weights)} factors, but model.num_classes = {num_classes}; give one for each class"
            yield OptionError(key, problem)
    if train.best_by and train.best_by not in (measured := choose_objective(run).measure.ranks_by):
        problem = f" = {train.best_by}, which the evaluations of this run do not measure; known: {', '.join(measured)}"
        yield OptionError("train.best_by", problem)
    if train.budgets is not None and not 0 < len(train.budgets) <= 64:
        yield OptionError("train.budgets", f" has {len(train.budgets)} sizes; give 1 to 64, or null")
    refusals = {
        "train.budgets is null; name sizes": train.budgets is None,
        "it needs labels alone; leave teacher, masks and tokens out": choose_objective(run) is not Sandwich,
        "train.grad_checkpointing repeats passes at another size; leave it out": train.grad_checkpointing,
    }
    if train.budget_distill and (problem := next((text for text, applies in refusals.items() if applies), "")):
        yield OptionError("train.budget_distill", f" = true: {problem}, or leave it out")
    check_cuda_graph(run, train.device != "cpu")


def check_cuda_graph(run: Run, on_cuda: bool) -> None:
    """Refuses `train.cuda_graph=true` beside an option, or on a device, that rules graphs out; see `why_eager`.

    Raises:
        OptionError: the first of them.
    """
    if run.train.cuda_graph is True and (reason := why_eager(run, on_cuda)):
        raise OptionError("train.cuda_graph", f" = true: {reason}, or train.cuda_graph=auto")


def why_eager(run: Run, on_cuda: bool) -> str:
    """Returns why the passes of a run cannot be in a CUDA graph, with the remedy; "" if nothing speaks against it.

    Args:
        on_cuda: whether the run has CUDA devices.
    """
    train = run.train
    reasons = {
        "train.cuda_graph = false": train.cuda_graph is False,
        "the device is not cuda; set train.device=cuda": not on_cuda,
        "blocks are computed again under saved random states; set train.grad_checkpointing=false": (
            train.grad_checkpointing
        ),
        "other people's models are not captured; set train.cuda_graph=auto": is_host(run.model["name"]),
        "train.budgets changes the sizes of attention; set it to null": train.budgets is not None,
    }
    refusals = (reason for reason, applies in reasons.items() if applies)
    return next(refusals, "") or choose_objective(run).graph_refusal


POLICY = re.compile(
    r"rand(-(m[0-9]{1,2}|n([1-9]|10)|p(0|1|0?\.[0-9]+)|mstd[0-9]+(\.[0-9]+)?|mmax[0-9]{1,2}|inc[01]|t(weights|3aw?)))*"
    r"|augmix(-(m[0-9]|m10|[wd]([1-9]|10)|a(?![0.]+(-|$))[0-9]+(\.[0-9]+)?|b[01]|mstd[0-9]+(\.[0-9]+)?))*"
    r"|(originalr?|v0r?|3a)(-mstd[0-9]+(\.[0-9]+)?)?"
)
"""Policies of timm; timm itself passes over sections that it does not understand."""


def check_policy(policy: str) -> None:
    """Refuses a policy with an OptionError unless timm acts on every section of it (`POLICY`)."""
    if not POLICY.fullmatch(policy):
        remedy = "write rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original-mstd0.5, v0, 3a, ..."
        raise OptionError("augment.auto_augment", f" = {policy!r}: no policy of timm; {remedy}")
