"""The images of an update, shared equally among ranks and accumulation steps, and the ranks that may change.

With `train.elastic` the number of ranks may change at every start, and the total batch stays. The order of images,
their random numbers, the learning rates and the position within an epoch depend on the total batch alone
(`engine.data.sampler`), so that a checkpoint of any number of ranks continues at any other. Only the numbers that a
rank draws for a whole pass (drop path, mixup) and the order of sums depend on the ranks.
"""

import math
import os
from dataclasses import replace

from engine.config.schema import Run
from engine.runtime.distributed import World


def pairs_images(run: Run) -> bool:
    """Returns whether the augmentation of `run` mixes pairs of images, so that a pass needs an even number of them."""
    return bool(run.augment.mixup or run.augment.cutmix)


def count_pass_images(run: Run, ranks: int) -> int:
    """Returns the number of images of a pass: a rank's share of the total batch in one accumulation step."""
    return run.train.total_batch_size // (ranks * run.train.grad_accum_steps)


def fewest_steps(share: int, most: int, in_pairs: bool = False) -> int:
    """Returns the fewest accumulation steps that divide the `share` of a rank into equal passes of at most `most`
    images.

    Args:
        in_pairs: a pass has an even number of images, and so has the share; then it may have 2 even if `most` is 1.
    """
    unit = 2 if in_pairs else 1
    assert share % unit == 0, "check_run refuses a share that cannot be divided"
    units = share // unit
    return next(steps for steps in range(1, units + 1) if units % steps == 0 and share // steps <= max(most, unit))


def share_batch(run: Run, world: World, most: int | None) -> Run:
    """Returns `run` with the accumulation steps for its `world`, at least its own; without `train.elastic`, as it is.

    They are the fewest with which a pass has at most `most` images, so that no rank needs more memory than at first.

    Args:
        most: images of a pass at the first start of the run; None: this is the first. The first rank's value counts,
            as other ranks may not see its file yet.
    """
    if not run.train.elastic:
        return run
    own = max(1, count_pass_images(run, world.size))
    ((first,), *_) = world.gather([most or own])
    steps = fewest_steps(run.train.total_batch_size // world.size, min(own, int(first)), pairs_images(run))
    return replace(run, train=replace(run.train, grad_accum_steps=steps))


def describe_ranks(run: Run, ranks: int, before: int) -> str:
    """Returns who trains from here on, and the numbers of nodes, lower than that of now, that would be refused.

    Args:
        before: number of ranks until now.
    """

    def count(number: int, thing: str, plural: str = "s") -> str:
        return f"{number} {thing}{plural * (number != 1)}"

    total, changed = run.train.total_batch_size, f" ({before} before)" if before != ranks else ""
    passes, images = run.train.grad_accum_steps, count_pass_images(run, ranks)
    text = "  ".join([count(ranks, "rank") + changed, f"{count(passes, 'pass', 'es')} of {count(images, 'image')}"])
    unit = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * (2 if pairs_images(run) else 1)
    nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if refused := [f"{number}" for number in range(1, nodes) if total % (number * unit)]:
        whole = math.lcm(*range(1, nodes + 1)) * unit
        text += f"  (nodes that cannot share train.total_batch_size = {total}: {', '.join(refused)}"
        text += f"; multiples of {whole} can be shared by 1 to {nodes})"
    return text
