"""Micro-batches: the images of an update, shared equally among ranks and their backward passes."""

from torch import nn

from engine.config.schema import Run
from models.freeze import trained_batch_norms


def micro_batch_size(run: Run, ranks: int) -> int:
    """Returns the number of images of a micro-batch: a rank's share of the total batch in one backward pass."""
    return run.train.total_batch_size // (ranks * run.train.grad_accum_steps)


def describe_batch_norm(model: nn.Module, run: Run, ranks: int) -> str:
    """Returns the line on BatchNorm layers that do not see the total batch at once; "" if there are none."""
    images, total, names = micro_batch_size(run, ranks), run.train.total_batch_size, trained_batch_norms(model)
    if not names or images == total:
        return ""
    return (
        f"BatchNorm ({', '.join(names)}): statistics of the {images} images of a pass, not of train.total_batch_size ="
        f" {total}; another number of ranks, or train.grad_accum_steps, gives other results"
    )
