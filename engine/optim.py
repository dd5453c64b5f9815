"""Optimiser and learning rate schedule of a run, both made by timm."""

from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from engine.schema import Optim, Schedule


def create_optimizer(model: nn.Module, optim: Optim, total_batch_size: int) -> Optimizer:
    """timm's optimiser of `model`, the learning rate scaled to the total batch.

    One-dimensional weights, biases and what `model.no_weight_decay()` names do not decay.
    """
    return create_optimizer_v2(
        model,
        optim.opt,
        lr=optim.lr * total_batch_size / optim.lr_base_size,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
    )


def create_schedule(optimizer: Optimizer, schedule: Schedule, updates_per_epoch: int) -> Scheduler:
    """timm's learning rate schedule, as a function of finished updates: ``step_update(step)`` before the update.

    As in DeiT, the decay runs over all epochs, and the warm-up replaces its beginning.
    """
    shape = {
        "cosine": {"sched": "cosine"},
        "linear": {"sched": "poly", "decay_rate": 1.0},
        "constant": {"sched": "step", "decay_rate": 1.0},
    }[schedule.sched]
    return create_scheduler_v2(
        optimizer,
        **shape,
        num_epochs=schedule.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )[0]
