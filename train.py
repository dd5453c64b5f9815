"""Trains one configuration: config -> processes -> model -> loaders -> optimiser -> resume -> epochs.

    python train.py configs/quickstart.yaml --output runs/quickstart
    torchrun --nproc_per_node=8 train.py configs/deit_tiny_p8/eva.yaml data.root=/data/imagenet --output runs/eva

The same command on the directory of an unfinished run resumes it where it was saved, within an epoch too. SIGTERM,
SIGINT and SIGUSR1 save it and end it with status 75.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import torch
import yaml
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from attention import kernels
from bench.costs import count_costs
from engine.checkpoint import Checkpoints, rank_epoch
from engine.config import dump_run, load_run, refuse_bad_input
from engine.data import count_broken, create_loaders, create_loss
from engine.distributed import World, autocast, join, seed_everything, set_deterministic
from engine.evaluate import evaluate_all
from engine.failure import explain_failures
from engine.files import own, write_whole
from engine.finite import FiniteGuard, dump_step
from engine.interrupt import STOPPED, StopWish
from engine.optim import create_optimizer, create_schedule
from engine.report import Report
from engine.schema import Run
from models import create_model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a model.", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options in place of the file's")
    parser.add_argument("--output", type=Path, required=True, help="directory of the run; an unfinished run resumes")
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="option (or processes, images: their number) in which the run there may differ; may be repeated",
    )
    args = parser.parse_intermixed_args(arguments)
    with refuse_bad_input():
        run = load_run(args.config, args.overrides, int(os.environ.get("WORLD_SIZE", "1")))
        set_deterministic(run.train.deterministic)
        world = join(run.train.device, run.train.timeout_minutes)
        try:
            with explain_failures(run.train, world), ExitStack() as ending:
                finished = train(run, world, args.output, args.allow_change, ending)
        finally:
            world.leave()
    if not finished:
        sys.exit(STOPPED)


def train(run: Run, world: World, output: Path, allowed: Sequence[str], ending: ExitStack) -> bool:
    """Trains `run` in the directory `output`, from its last checkpoint where there is one.

    Args:
        allowed: options in which `run` may differ from the run in `output`. ending: receives what is to be closed.
    Returns:
        Whether the run is finished; if not, it was stopped, and goes on from there when it is started again.
    Raises:
        OptionError: data that cannot be used, or a directory that holds a different run.
        FloatingPointError: a loss or gradient is not finite; raised on every rank, and nothing is saved after it.
    """
    options = run.train
    costs = count_costs(run.model, run.attention)._asdict()
    seed_everything(options.seed)  # without the rank: every rank makes the same initial weights
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    model = create_model(attention=run.attention, **run.model).to(world.device, memory_format=layout)
    model.set_grad_checkpointing(options.grad_checkpointing)
    train_loader, val_loader, augment = create_loaders(
        run, world, img_size=model.config.img_size, num_classes=model.num_classes
    )
    sampler = train_loader.sampler
    updates_per_epoch = len(train_loader) // options.grad_accum_steps
    optimizer = create_optimizer(model, run.optim, options.total_batch_size)
    schedule = create_schedule(optimizer, run.schedule, updates_per_epoch)
    scaler = torch.amp.GradScaler(world.device.type, enabled=options.amp == "fp16")
    ema = ModelEmaV3(model, decay=options.ema_decay) if options.ema_decay else None
    criterion = create_loss(run.augment)

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler} | ({"ema": ema.module} if ema else {})
    ending.enter_context(own(output, world))
    checkpoints = Checkpoints(output, run, world, sampler.num_images)
    progress = checkpoints.restore(parts, allowed)
    if progress.epoch == run.schedule.epochs:
        if world.is_primary:
            print(f"{output} is finished: {progress.epoch} epochs, top-1 {progress.metrics['top1']:.2f} %")
        return True
    save = partial(checkpoints.save, progress, parts)
    guard = FiniteGuard(options, world, progress, partial(dump_step, checkpoints, train_loader, parts, progress))

    ending.enter_context(kernels.use(options.kernels))
    if options.compile:
        model.compile(dynamic=False)  # one that broken images made smaller is compiled for itself
    network = DistributedDataParallel(model) if world.size > 1 else model
    if world.is_primary:
        write_whole(output / "config.yaml", yaml.safe_dump(dump_run(run), sort_keys=False).encode())
    rest = (run.schedule.epochs - progress.epoch) * updates_per_epoch - progress.images // options.total_batch_size
    report = Report(output if world.is_primary else None, run, progress, progress.step + rest, world.device)
    ending.callback(report.close)
    stop = ending.enter_context(StopWish())
    report.start(progress.epoch, processes=world.size, kernels=kernels.resolved(), **costs)

    for epoch in range(progress.epoch, run.schedule.epochs):
        sampler.set_epoch(epoch, progress.images)
        batches = report.wait.watch(iter(train_loader))
        model.train()
        report.begin_epoch()
        while progress.images < sampler.stop:
            update = progress.images // options.total_batch_size
            schedule.step_update(epoch * updates_per_epoch + update)
            guard.begin_update(model)
            for part in range(options.grad_accum_steps):
                images, targets = next(batches)
                seed_everything(options.seed, progress.step, part, world.rank)  # a pass owes nothing to those before
                images = images.to(world.device, memory_format=layout, non_blocking=True)
                targets = targets.to(world.device, non_blocking=True)
                images, targets = augment(images, targets)
                if progress.step == part == 0:
                    report.images(images, run.data.mean, run.data.std)
                is_last_part = part + 1 == options.grad_accum_steps
                with nullcontext() if world.size == 1 or is_last_part else network.no_sync():
                    with autocast(options.amp, world.device):
                        loss = criterion(network(images), targets) / options.grad_accum_steps
                    guard.see_loss(loss, stop)
                    scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip_grad or math.inf)
            if guard.accepts(grad_norm):
                scaler.step(optimizer)
                if ema:
                    ema.update(model, progress.step + 1)
            else:
                report.skip(epoch + 1, progress.num_skipped)
            scaler.update()
            optimizer.zero_grad()
            progress.step += 1
            progress.images += options.total_batch_size
            report.end_step()
            if progress.num_summed and ((update + 1) % options.log_every == 0 or progress.images == sampler.stop):
                guard.settle()
                report.train(
                    epoch + 1,
                    loss=progress.loss_sum / progress.num_summed,
                    lr=optimizer.param_groups[0]["lr"],
                    grad_norm=grad_norm.item(),
                    broken=count_broken(train_loader, run.data.max_broken, world),
                )
                progress.loss_sum, progress.num_summed = 0.0, 0
            if guard.stopping or checkpoints.is_due(progress.step):
                guard.settle()
                save()
            if guard.stopping:
                world.barrier()  # nobody ends while the checkpoint is being written
                return False

        is_last = epoch + 1 == run.schedule.epochs
        if is_last or (epoch + 1) % options.eval_every == 0:
            models = {"": model} | ({"ema_": ema.module} if ema else {})
            metrics = evaluate_all(models, val_loader, world, options.amp, stop)
            if metrics is None:
                save()
                world.barrier()
                return False
            progress.metrics = metrics
            progress.ranking = rank_epoch(progress.ranking, epoch + 1, metrics["top1"], options.keep_checkpoints)
            report.eval(epoch + 1, metrics)
        progress.epoch, progress.images = epoch + 1, 0
        if is_last:
            report.final(**progress.metrics, best_top1=progress.ranking[0][0], **costs)
        save()
        world.barrier()  # nobody ends, or starts an epoch that might fail, while the checkpoint is being written
    return True


if __name__ == "__main__":
    record(main)()  # torchrun tells which rank failed, and with what
