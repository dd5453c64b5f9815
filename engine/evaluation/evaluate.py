"""Exact evaluation: every image counts once, at any number of processes and any batch size."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from torch import nn

from engine.data.images import BrokenImage
from engine.data.loaders import Loader, count_broken, images_of
from engine.data.splits import classes_of
from engine.objectives.classification import CLASSES, TOP
from engine.objectives.objective import BALANCED, Measure
from engine.runtime.distributed import Amp, World, autocast
from engine.runtime.terminal import progress
from engine.runtime.text import one_line

NUM_RECALLS = 20
"""Most classes whose recalls are metrics of their own; `validate.py --per-class` writes those of any number."""

RECALL = "recall/"
"""Beginning of the names of the recalls of classes."""


def evaluate_all(
    models: Mapping[str, nn.Module],
    loader: Loader,
    world: World,
    amp: Amp,
    stop_requested: Callable[[], bool],
    measure: Measure,
) -> dict[str, float] | None:
    """Evaluates every model and prefixes its metrics with the model's key; None if the evaluation was stopped.

    If broken images were left out, `broken` is their number.
    """
    metrics: dict[str, float] = {}
    for prefix, model in models.items():
        world.copy_buffers(model)  # BatchNorm's averages and random features differ between ranks
        found = evaluate(model, loader, world, amp, stop_requested, measure=measure)
        if found is None:
            return None
        metrics |= {f"{prefix}{name}": value for name, value in found.items()}
    if broken := count_broken(loader, world):
        metrics["broken"] = broken
    return metrics


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    world: World,
    amp: Amp,
    stop_requested: Callable[[], bool] = lambda: False,
    rows: list[torch.Tensor] | None = None,
    measure: Measure = CLASSES,
) -> dict[str, float] | None:
    """Accuracy and loss of `model`, which may be a plain or an averaged one, over all ranks' images.

    Args:
        model: images (b, C, H, W) -> logits (b, classes), or what `measure` takes; not wrapped for distributed
            training, as ranks may hold different numbers of batches. Its training mode is restored.
        loader: this rank's share of the validation images, from `engine.data`.
        amp: precision of the forward pass; None: fp32.
        stop_requested: called before every batch; true on any rank stops the evaluation on all ranks.
        rows: if given, the records that `measure` keeps for single images of this rank are added.
        measure: computes the metrics.
    Returns:
        None if it was stopped; otherwise means over images of the metrics, and `images`, their number. `not_finite` is
        the number of images with a metric that is not finite, as of logits that overflow, if there are any. At most
        `TOP` classes have no `top5`, which is always 100. If `measure` is by classes and the loader names them,
        `BALANCED` follows, and for at most `NUM_RECALLS` classes `recall/CLASS` of each class with images, in percent.
    Raises:
        BrokenImage: on every rank, if any rank's loader refuses an image, or if there is no image at all.
    """
    was_training = model.training
    model.eval()
    is_named = isinstance(loader, Loader)
    names = classes_of(images_of(loader)) if is_named else []
    sums = torch.zeros(len(measure.names) + 2, dtype=torch.float64, device=world.device)  # the last: see below
    by_class = torch.zeros(2, len(names), dtype=torch.float64, device=world.device)  # sums of the first; images
    num_images = len(loader.sampler) * world.size if is_named else None
    bar = progress("evaluation", num_images, "images", hidden=not world.is_primary)
    problem = ""
    try:
        for images, targets in loader:
            if stop_requested():
                break
            images, targets = images.to(world.device, non_blocking=True), targets.to(world.device, non_blocking=True)
            with autocast(amp, world.device):
                found = measure.values(model, images, targets, rows)
            for place, values in enumerate(found):
                sums[place] += values.sum()
            sums[-2] += (~torch.stack([*found]).isfinite().all(0)).sum()
            sums[-1] += len(targets)
            if measure.by_class and names:
                by_class.index_add_(1, targets, torch.stack([found[0], torch.ones_like(found[0])]))
            bar.update(len(targets) * world.size)
    except BrokenImage as error:  # of this rank's share
        problem = str(error)
    finally:
        bar.close()
    model.train(was_training)
    if world.any(stop_requested()):
        return None
    if problem := world.first(problem):
        raise BrokenImage(problem)
    *totals, not_finite, images = world.sum(sums).tolist()
    if not images:
        raise BrokenImage("not one validation image could be read")
    means = (total / images for total in totals)
    metrics = {**dict(zip(measure.names, means, strict=True)), "images": int(images)}
    if not_finite:
        metrics["not_finite"] = int(not_finite)
    if 0 < len(names) <= TOP:
        metrics.pop("top5", None)
    return metrics | (rate_recalls(world.sum(by_class), names) if measure.by_class and names else {})


def rate_recalls(by_class: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Returns `BALANCED` and the recalls of single classes, see `evaluate`.

    Args:
        by_class: (2, classes): the sum of 100 x hits over the images of every class, and their number.
    """
    sums, counts = by_class.tolist()
    recalls = {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count}
    shown = recalls if len(names) <= NUM_RECALLS else {}
    return {BALANCED: fmean(recalls.values())} | {f"{RECALL}{one_line(name, 100)}": x for name, x in shown.items()}
