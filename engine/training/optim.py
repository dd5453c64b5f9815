"""Optimiser, learning rate schedule and weight average of a run, all by timm."""

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from attention.options import OptionError
from engine.checkpoints.format import read_archive
from engine.config.schema import Optim, Schedule
from engine.runtime.distributed import seed_everything
from engine.runtime.errors import UserError
from engine.runtime.text import describe_error


def create_optimizer(model: nn.Module, optim: Optim, total_batch_size: int) -> Optimizer:
    """Creates timm's optimiser of `model` with the learning rate scaled to the total batch.

    One-dimensional weights, biases and the weights in `model.no_weight_decay()` do not decay. With `layer_decay` the
    groups are timm's, by `model.group_matcher()`: their `lr_scale` is the factor that the schedule applies. On CUDA,
    torch's Adam and AdamW are fused: one kernel instead of a dozen.
    """
    given = {name: value for name in ("betas", "eps") if (value := getattr(optim, name)) is not None}
    if next(model.parameters()).is_cuda and optim.opt in ("adam", "adamw"):
        given["fused"] = True
    return create_optimizer_v2(
        model,
        optim.opt,
        lr=optim.lr * total_batch_size / optim.lr_base_size,
        weight_decay=optim.weight_decay,
        layer_decay=optim.layer_decay,
        **given,
    )


def keep_finite(optimizer: Optimizer, norm: Tensor) -> None:
    """Makes the next step of a fused optimiser change nothing if the gradient norm is not finite.

    Other optimisers have no such switch. Unlike a branch, this does not wait for the device.

    Args:
        norm: scalar on the device.
    """
    if optimizer.param_groups[0].get("fused"):
        vars(optimizer)["found_inf"] = norm.isfinite().logical_not().float()  # as torch's GradScaler does


def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any], former: Optimizer, source: str) -> None:
    """Loads the state dict `state` into `optimizer`, except for options that the user has changed.

    Parameter groups hold options as well as state (LAMB counts its steps there), so all unchanged entries are taken
    from `state`.

    Args:
        former: a new optimiser of the same weights with the saved options: entries that differ have been changed.
    Raises:
        UserError: the state belongs to other groups of weights; the message begins with `source`.
    """
    here, before, there = optimizer.param_groups, former.param_groups, state["param_groups"]
    if [len(group["params"]) for group in here] != [len(group["params"]) for group in there]:
        raise UserError(
            f"{source}: the checkpoint's state is for other groups of weights; optim.weight_decay = 0 makes one group,"
            " any other makes two, and optim.layer_decay makes them of every layer, which in a PVT-v2 is a stage, and"
            " was a block before: keep both, or start afresh in another directory"
        )
    groups = []
    for new, old, saved in zip(here, before, there, strict=True):
        names = new.keys() - {"params", "lr"}  # lr: every update
        known = old.keys() & saved.keys() - {"fused", "foreach"}  # which choose kernels, not results
        changed = {name for name in names if name not in known or new[name] != old[name]}
        groups.append(saved | {name: new[name] for name in changed})
    optimizer.load_state_dict({**state, "param_groups": groups})


@torch.compiler.set_stance("force_eager")
def check_optimizer(optim: Optim, device: torch.device) -> None:
    """Refuses an optimiser that cannot train, be saved or be resumed, after a trial on a tiny model.

    Raises:
        OptionError: the trial failed, or the optimiser does not take `betas` or `eps` as they are given.
    """
    info = get_optimizer_info(optim.opt)
    for name in ("betas", "eps"):
        if (value := getattr(optim, name)) is not None and not getattr(info, f"has_{name}"):
            raise OptionError(f"optim.{name}", f" = {value}, but {optim.opt} takes none; set it to null")
    if optim.betas and len(optim.betas) != (number := info.num_betas):
        raise OptionError("optim.betas", f" = {list(optim.betas)}, but {optim.opt} takes {number}")

    def train(model: nn.Module, optimizer: Optimizer) -> None:
        seed_everything(0)  # as before every update of a run
        for _ in range(2):
            for weight in model.parameters():
                weight.grad = torch.randn_like(weight)
            optimizer.step()

    optim = replace(optim, layer_decay=None)  # the trial's model has no layers
    model, resumed = (nn.Sequential(nn.Conv2d(3, 16, 2), nn.Linear(16, 17)).to(device) for _ in range(2))
    try:
        optimizer, other = (create_optimizer(m, optim, optim.lr_base_size) for m in (model, resumed))
        train(model, optimizer)
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        resumed.load_state_dict(model.state_dict())
        restore_optimizer(other, read_archive(saved.getvalue()).own(), other, optim.opt)
        train(model, optimizer)
        train(resumed, other)
        if not all(map(torch.equal, model.parameters(), resumed.parameters())):
            raise ValueError("resumed, it makes other updates")
    except Exception as error:  # any error means that it cannot be used
        reason = describe_error(error)
        problem = f" = {optim.opt!r} cannot be used, a trial failed ({reason}); choose another, such as adamw"
        raise OptionError("optim.opt", problem) from error


def create_schedule(optimizer: Optimizer, schedule: Schedule, updates_per_epoch: int) -> Scheduler:
    """Creates timm's learning rate schedule: call ``step_update(finished updates)`` before each update.

    As in DeiT, the decay runs over all epochs, and the warm-up replaces its beginning.
    """
    shapes: dict[str, dict[str, Any]] = {
        "cosine": {"sched": "cosine"},
        "linear": {"sched": "poly", "decay_rate": 1.0},
        "constant": {"sched": "step", "decay_rate": 1.0},
    }
    return create_scheduler_v2(
        optimizer,
        **shapes[schedule.sched],
        num_epochs=schedule.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )[0]


def create_average(model: nn.Module, decay: float) -> ModelEmaV3:
    """Creates timm's moving average of the weights: call ``update(model, finished updates)`` after each update.

    The average becomes d x average + (1 - d) x weights. After n earlier updates d is n / (n + 9), but at most `decay`:
    the warm-up of TensorFlow's ExponentialMovingAverage. The average of a young run thus covers about the last ninth of
    its updates, and forgets the initial weights at the first.
    """
    return ModelEmaV3(model, decay, use_warmup=True, warmup_gamma=9.0, warmup_power=1.0)
