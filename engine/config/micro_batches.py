"""Micro-batches: the images of an update, shared equally among ranks and their backward passes; ranks that may change.

With `train.elastic` the number of ranks may change at every start, and the total batch stays. The order of images,
their random numbers, the learning rates and the position within an epoch depend on the total batch alone
(`engine.data.sampler`), so that a checkpoint of any number of ranks continues at any other. Only the numbers that a
rank draws for a whole micro-batch (drop path, mixup), the statistics of BatchNorm and the order of sums depend on the
ranks.
"""

import math
import os
from dataclasses import replace

from torch import nn

from engine.config.schema import Run
from engine.runtime.distributed import World
from models.freeze import trained_batch_norms


def pairs_images(run: Run) -> bool:
    """Returns whether the augmentation of `run` mixes pairs of images; a micro-batch then needs an even number."""
    return bool(run.augment.mixup or run.augment.cutmix)


def micro_batch_size(run: Run, ranks: int) -> int:
    """Returns the number of images of a micro-batch: a rank's share of the total batch in one backward pass."""
    return run.train.total_batch_size // (ranks * run.train.grad_accum_steps)


def fewest_micro_batches(share: int, most: int, in_pairs: bool = False) -> int:
    """Returns the fewest equal micro-batches of at most `most` images into which the `share` of a rank can be divided.

    Args:
        in_pairs: micro-batches have even numbers of images, and so has the share; one may have 2 even if `most` is 1.
    """
    unit = 2 if in_pairs else 1
    assert share % unit == 0, "check_run refuses a share that cannot be divided"
    units = share // unit
    return next(number for number in range(1, units + 1) if units % number == 0 and share // number <= max(most, unit))


def share_batch(run: Run, world: World, most: int | None) -> Run:
    """Returns `run` with the number of micro-batches (`train.grad_accum_steps`) for its `world`, at least its own;
    without `train.elastic`, as it is.

    They are the fewest that have at most `most` images each, so that no rank needs more memory than at first.

    Args:
        most: images of a micro-batch at the first start of the run; None: this is the first. The first rank's value
            counts, as other ranks may not see its file yet.
    """
    if not run.train.elastic:
        return run
    own = max(1, micro_batch_size(run, world.size))
    ((first,), *_) = world.gather([most or own])
    share = run.train.total_batch_size // world.size
    number = fewest_micro_batches(share, min(own, int(first)), pairs_images(run))
    return replace(run, train=replace(run.train, grad_accum_steps=number))


def describe_batch_norm(model: nn.Module, run: Run, ranks: int) -> str:
    """Returns the line on BatchNorm layers that do not see the total batch at once; "" if there are none."""
    images, total, names = micro_batch_size(run, ranks), run.train.total_batch_size, trained_batch_norms(model)
    if not names or images == total:
        return ""
    return (
        f"BatchNorm ({', '.join(names)}): statistics of the {images} images of a pass, not of train.total_batch_size ="
        f" {total}; another number of ranks, or train.grad_accum_steps, gives other results"
    )


def describe_ranks(run: Run, ranks: int, before: int) -> str:
    """Returns the ranks and their micro-batches, and the smaller numbers of nodes that cannot share the total batch.

    Args:
        before: number of ranks until now.
    """

    def count(number: int, thing: str, plural: str = "s") -> str:
        return f"{number} {thing}{plural * (number != 1)}"

    total, changed = run.train.total_batch_size, f" ({before} before)" if before != ranks else ""
    passes, images = run.train.grad_accum_steps, micro_batch_size(run, ranks)
    text = "  ".join([count(ranks, "rank") + changed, f"{count(passes, 'pass', 'es')} of {count(images, 'image')}"])
    unit = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * (2 if pairs_images(run) else 1)
    nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if refused := [f"{number}" for number in range(1, nodes) if total % (number * unit)]:
        whole = math.lcm(*range(1, nodes + 1)) * unit
        text += f"  (nodes that cannot share train.total_batch_size = {total}: {', '.join(refused)}"
        text += f"; multiples of {whole} can be shared by 1 to {nodes})"
    return text
