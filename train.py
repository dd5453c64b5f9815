"""Trains one configuration: config -> processes -> model -> loaders -> optimiser -> resume -> epochs.

    python train.py configs/quickstart.yaml --output runs/quickstart
    torchrun --nproc_per_node=8 train.py configs/deit_tiny_p8/eva.yaml data.root=/data/imagenet --output runs/eva

The same command on the directory of an unfinished run resumes it after its last whole epoch.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import yaml
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, distribute_bn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from engine.checkpoint import find_last, rank_epoch, save_epoch
from engine.config import dump_run, load_run, refuse_bad_input
from engine.costs import count_costs
from engine.data import Loader, count_broken, create_loaders, create_loss
from engine.distributed import World, autocast, join, seed_everything, set_deterministic
from engine.evaluate import evaluate
from engine.report import Report
from engine.schema import Optim, Run, Schedule
from models import create_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a model.", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options in place of the file's")
    parser.add_argument("--output", type=Path, required=True, help="directory of the run; an unfinished run resumes")
    args = parser.parse_intermixed_args(arguments)
    with refuse_bad_input():
        run = load_run(args.config, args.overrides, int(os.environ.get("WORLD_SIZE", "1")))
        set_deterministic(run.train.deterministic)
        world = join(run.train.device)
        try:
            train(run, world, args.output)
        finally:
            world.leave()


def train(run: Run, world: World, output: Path) -> None:
    """Trains `run` in the directory `output`, from its last checkpoint where there is one.

    Raises:
        OptionError: data that cannot be used, or a directory that holds a different run.
        FloatingPointError: the loss is not finite; raised on every rank, before the update.
    """
    options, config = run.train, dump_run(run)
    done = find_last(output, config, world) or {"epoch": 0, "step": 0, "metrics": {}, "ranking": []}
    if done["epoch"] == run.schedule.epochs:
        if world.is_primary:
            print(f"{output} is finished: {done['epoch']} epochs, top-1 {done['metrics']['top1']:.2f} %")
        return

    costs = count_costs(run.model, run.attention)._asdict()
    seed_everything(options.seed)  # without the rank: every rank makes the same initial weights
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    model = create_model(attention=run.attention, **run.model).to(world.device, memory_format=layout)
    model.set_grad_checkpointing(options.grad_checkpointing)
    train_loader, val_loader, mixup = create_loaders(
        run, world, img_size=model.config.img_size, num_classes=model.num_classes
    )
    updates_per_epoch = len(train_loader) // options.grad_accum_steps
    optimizer = create_optimizer(model, run.optim, options.total_batch_size)
    schedule = create_schedule(optimizer, run.schedule, updates_per_epoch)
    scaler = torch.amp.GradScaler(world.device.type, enabled=options.amp == "fp16")
    ema = ModelEmaV3(model, decay=options.ema_decay) if options.ema_decay else None
    criterion = create_loss(run.augment)

    states = {"model": model, "optimizer": optimizer, "scaler": scaler} | ({"ema": ema.module} if ema else {})
    if done["epoch"]:
        for name, part in states.items():
            part.load_state_dict(done.pop(name))
    first_epoch, step, metrics, ranking = (done[name] for name in ("epoch", "step", "metrics", "ranking"))

    if options.compile:
        model.compile()
    network = DistributedDataParallel(model) if world.size > 1 else model
    if world.is_primary:
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    total_steps = run.schedule.epochs * updates_per_epoch
    report = Report(output if world.is_primary else None, run, step, total_steps, world.device)
    report.start(first_epoch, processes=world.size, **costs)

    for epoch in range(first_epoch, run.schedule.epochs):
        seed_everything(options.seed, epoch, world.rank)  # an epoch's random numbers depend on nothing before it
        train_loader.sampler.set_epoch(epoch)
        batches = report.wait.watch(iter(train_loader))
        loss_sum, num_summed = torch.zeros((), device=world.device), 0
        model.train()
        report.begin_epoch()
        for update in range(1, updates_per_epoch + 1):
            schedule.step_update(step)
            for part in range(1, options.grad_accum_steps + 1):
                images, targets = next(batches)
                images = images.to(world.device, memory_format=layout, non_blocking=True)
                targets = targets.to(world.device, non_blocking=True)
                if mixup is not None:
                    images, targets = mixup(images, targets)
                if step == 0 and part == 1:
                    report.images(images, run.data.mean, run.data.std)
                with network.no_sync() if world.size > 1 and part < options.grad_accum_steps else nullcontext():
                    with autocast(options.amp, world.device):
                        loss = criterion(network(images), targets) / options.grad_accum_steps
                    stop_unless_finite(loss, step, world)
                    scaler.scale(loss).backward()
                loss_sum += loss.detach()
            num_summed += 1
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip_grad or math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            if ema:
                ema.update(model, step)
            report.end_step()
            if update % options.log_every == 0 or update == updates_per_epoch:
                report.train(
                    epoch + 1,
                    loss=world.sum(loss_sum).item() / (num_summed * world.size),
                    lr=optimizer.param_groups[0]["lr"],
                    grad_norm=grad_norm.item(),
                    broken=count_broken(train_loader, run.data.max_broken, world),
                )
                loss_sum, num_summed = torch.zeros_like(loss_sum), 0

        is_last = epoch + 1 == run.schedule.epochs
        if is_last or (epoch + 1) % options.eval_every == 0:
            metrics = evaluate_all({"": model} | ({"ema_": ema.module} if ema else {}), val_loader, world, options.amp)
            ranking = rank_epoch(ranking, epoch + 1, metrics["top1"], options.keep_checkpoints)
            report.eval(epoch + 1, metrics)
        if is_last:
            report.final(**metrics, best_top1=ranking[0][0], **costs)
        if world.is_primary:
            progress = {"config": config, "epoch": epoch + 1, "step": step, "metrics": metrics, "ranking": ranking}
            save_epoch(output, progress | {name: part.state_dict() for name, part in states.items()})
        world.barrier()  # nobody ends, or starts an epoch that might fail, while the checkpoint is being written
    report.close()


def create_optimizer(model: nn.Module, optim: Optim, total_batch_size: int) -> Optimizer:
    """timm's optimiser of `model`, the learning rate scaled to the total batch.

    Weights of one dimension, biases and what `model.no_weight_decay()` names are not decayed.
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

    As in DeiT, warm-up counts among the epochs: the decay runs over all of them, and warm-up replaces its beginning.
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


def stop_unless_finite(loss: Tensor, step: int, world: World) -> None:
    """Raises on every rank when any rank's loss is infinite or no number.

    Called between forward and backward pass: it waits for the forward pass alone, so that the device is idle only until
    the first kernel of the backward pass is queued.

    Raises:
        FloatingPointError: names the step and the ranks.
    """
    failed = torch.zeros(world.size, device=loss.device)
    failed[world.rank] = ~loss.detach().isfinite()
    if world.sum(failed).any():
        ranks = ", ".join(map(str, failed.nonzero().flatten().tolist()))
        raise FloatingPointError(f"step {step}: the loss is not finite on rank {ranks}; stopped before the update")


def evaluate_all(models: Mapping[str, nn.Module], loader: Loader, world: World, amp: str | None) -> dict[str, float]:
    """`evaluate` of every model, with the models' keys before the names of its metrics."""
    metrics = {}
    for prefix, model in models.items():
        if world.size > 1:
            distribute_bn(model, world.size, reduce=True)  # BatchNorm's averages differ between ranks
        metrics |= {f"{prefix}{name}": value for name, value in evaluate(model, loader, world, amp).items()}
    return metrics


if __name__ == "__main__":
    main()
