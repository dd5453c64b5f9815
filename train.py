"""Trains one configuration: config -> processes -> loaders -> model -> optimiser -> resume -> epochs.

    python train.py configs/quickstart.yaml --output runs/quickstart
    torchrun --nproc_per_node=8 train.py configs/deit_tiny_p8/eva.yaml data.root=/data/imagenet --output runs/eva

The same command on the directory of an unfinished run resumes it from its last checkpoint, within an epoch too. On
SIGTERM, SIGINT, SIGUSR1, SIGHUP and SIGQUIT it saves a checkpoint and exits with status 75.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

from engine.runtime.signals import STOPPED, SignalHandler, begin, end_at_interrupt

if __name__ == "__main__":
    begin("engine.training.command_line:parse_arguments")

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from engine.checkpoints.initial_weights import create_initial_model
from engine.config.micro_batches import describe_batch_norm
from engine.config.schema import Run
from engine.data.identity import identify_data, warn_of_one_split
from engine.data.loaders import create_loaders
from engine.data.splits import Splits, classes_of, count_data_classes
from engine.data.workers import workers_of_rank
from engine.evaluation.evaluate import evaluate_all
from engine.reporting.console import format_values
from engine.reporting.prometheus import Heartbeat
from engine.reporting.recorder import RUN_FILES, Recorder, SilentRecorder
from engine.run.load import draft_run
from engine.runtime.distributed import World, autocast, init_distributed, seed_everything, set_arithmetic, world_size
from engine.runtime.errors import refuse_bad_input
from engine.runtime.locks import lock_directory
from engine.runtime.terminal import ConsoleLog, print_fields
from engine.training.command_line import parse_arguments, quoted_top1
from engine.training.compilation import compiled_blocks
from engine.training.device import chosen_kernels
from engine.training.exchange import UpdateExchange
from engine.training.failure import explain_failures
from engine.training.graphs import graph_passes
from engine.training.inputs import check_launch, open_inputs
from engine.training.objective import create_objective
from engine.training.optim import create_average, create_optimizer, create_schedule, keep_finite
from engine.training.plan import describe_hours, print_plan
from engine.training.resume import Checkpoints, Resumed
from models.costs import count_costs
from models.freeze import set_train_mode


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with ConsoleLog() as console, refuse_bad_input():
        draft = draft_run(args.config, args.overrides, world_size(), count_data_classes)
        run = check_launch(draft, args.output)
        set_arithmetic(run.train.deterministic, run.train.tf32)
        world = init_distributed(run.train.device, run.train.timeout_minutes)
        # Report refusals before the process group is destroyed; otherwise another rank fails first.
        with world.ending(), refuse_bad_input(), explain_failures(run.train, world), ExitStack() as cleanup:
            splits = open_inputs(draft, world, args.output, RUN_FILES)
            if args.dry_run:
                with refuse_bad_input():  # a closed pipe ends a plan, and fails a run
                    return print_plan(run, world, splits, args.output, args.allow_change, quoted_top1(args.config))
            trainer = Trainer(run, world, splits, args.output, args.allow_change, cleanup)
            if not trainer.progress.is_finished(run):  # the log of a finished run stays as it is
                console.keep(args.output)
                world.tell(quoted_top1(args.config))
            finished = trainer.train()
        world.tell("" if finished else "saved; the same command continues the run")
    if not finished:
        sys.exit(STOPPED)


class Trainer:
    """The training of `run` in the directory `output`, from its last checkpoint if there is one.

    Args:
        splits: training and validation images.
        allowed: options in which `run` may differ from the run in `output`. cleanup: closes what is opened here.
    Raises:
        OptionError, UserError: data that cannot be used, or a directory that holds a different run.
    """

    def __init__(self, run: Run, world: World, splits: Splits, output: Path, allowed: list[str], cleanup: ExitStack):
        self.run, self.options, self.world, self.output, self.cleanup = run, run.train, world, output, cleanup
        self.costs = count_costs(run.model, run.attention)._asdict()
        seed_everything(self.options.seed)  # without the rank: every rank makes the same initial weights
        self.layout = torch.channels_last if self.options.channels_last else torch.contiguous_format
        img_size, num_classes = run.model["img_size"], run.model["num_classes"]
        loaders = create_loaders(run, world, splits, img_size=img_size, num_classes=num_classes)
        self.train_loader, self.val_loader, self.augment = loaders
        if (workers := workers_of_rank(run.data.workers)) < run.data.workers:
            world.tell(f"data.workers = {run.data.workers}: {workers} loader processes, as many as a rank has cores")
        self.model = create_initial_model(run, output, world, classes_of(self.val_loader.dataset))
        self.model.to(world.device, memory_format=self.layout)
        self.model.set_grad_checkpointing(self.options.grad_checkpointing)
        self.sampler = self.train_loader.sampler
        self.objective = create_objective(run, self.model, self.train_loader.dataset.dataset, world)
        self.optimizer = create_optimizer(self.model, run.optim, self.options.total_batch_size)
        self.schedule = create_schedule(self.optimizer, run.schedule, self.sampler.updates_per_epoch)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.options.amp == "fp16")
        self.ema = create_average(self.model, self.options.ema_decay) if self.options.ema_decay else None
        self.stateful = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        self.stateful |= {"model_ema": self.ema.module} if self.ema else {}
        cleanup.enter_context(lock_directory(output, world, RUN_FILES))
        identity = identify_data(self.train_loader.dataset.dataset, self.val_loader.dataset)
        warn_of_one_split(identity, run, world)
        self.checkpoints = Checkpoints(output, run, world, self.sampler.num_images, identity | self.objective.identity)
        resumed = Resumed(self.checkpoints, allowed)
        self.progress, self.resumption = resumed.restore(self.stateful), resumed.resumption
        self.total_steps = self.progress.total_steps(run, self.sampler.updates_per_epoch)

    def train(self) -> bool:
        """Trains, evaluates and saves until the last epoch is finished (true) or a signal stops the run (false).

        Raises:
            FloatingPointError, BrokenImage: a loss or gradient is not finite, or too many images are broken.
            WorkersFailed: loader workers were killed or hang.
        """
        progress, stopped = self.progress, False
        if not progress.is_finished(self.run):
            self.begin()
        elif self.world.is_primary:
            Heartbeat(self.output).settle()
            print_fields(f"{self.output} is finished:  {progress.epoch} epochs  {format_values(progress.metrics)}")
        while not progress.is_finished(self.run) and not stopped:
            self.sampler.set_epoch(progress.epoch, progress.images)
            stopped = self.train_epoch(self.prepare_batches()) or self.evaluate_and_save()
            self.world.barrier()  # no rank ends, or starts an epoch that might fail, while the checkpoint is written
        return progress.is_finished(self.run)

    def begin(self) -> None:
        """Prepares the model for training, and starts the records."""
        run, progress = self.run, self.progress
        taken = self.cleanup.enter_context(chosen_kernels(run, lambda: self.model, progress, self.world))
        models = [self.model, *([self.ema.module] if self.ema else []), *self.objective.compiled]
        compilation = self.cleanup.enter_context(compiled_blocks(models, run, self.world))
        network, cuda_graph = graph_passes(self.objective, self.model, run, self.world, self.layout)
        self.network = self.cleanup.enter_context(self.world.average_gradients(network))
        self.exchange = UpdateExchange(run, self.world, progress)
        self.world.tell(describe_batch_norm(self.model, run, self.world.size))
        kind = Recorder if self.world.is_primary else SilentRecorder
        self.recorder = self.cleanup.enter_context(kind(self.output, run, progress, self.total_steps, self.world))
        self.signals = self.cleanup.enter_context(SignalHandler())
        self.world.tell(describe_hours(run, self.world, self.total_steps - progress.step))
        paths = {"kernels": taken, "compile": compilation, "cuda_graph": cuda_graph}
        self.recorder.start(progress.epoch, self.world.size, self.resumption, **paths, **self.costs)

    def train_epoch(self, batches: Iterator[tuple[Tensor, Tensor]]) -> bool:
        """Makes the updates that are left of an epoch, and saves; returns whether a signal has stopped the run."""
        options, progress, sampler, stopped = self.options, self.progress, self.sampler, False
        set_train_mode(self.model)
        self.recorder.begin_epoch(progress.epoch + 1)
        while progress.images < sampler.stop and not stopped:
            number = progress.images // options.total_batch_size
            self.schedule.step_update(progress.epoch * sampler.updates_per_epoch + number)
            self.update(batches)
            progress.step += 1
            progress.images += options.total_batch_size
            self.recorder.end_step()
            is_complete = progress.images == sampler.stop
            is_logged = is_complete or (number + 1) % options.log_every == 0
            if is_logged:
                self.exchange.settle()
            stopped = self.exchange.stopped  # all ranks hold equal values only here
            is_due = self.exchange.overdue or self.checkpoints.is_due(progress.step)
            if is_logged and progress.num_summed:
                values = {name: value.item() for name, value in self.objective.values.items()}
                lr = max(group["lr"] for group in self.optimizer.param_groups)
                losses = {"loss": progress.take_loss(), "broken": progress.broken}
                self.recorder.train(progress.epoch + 1, **losses, **values, lr=lr, grad_norm=self.exchange.norm)
            if stopped or is_due or (is_complete and progress.ends_in_evaluation(self.run)):
                self.save()
        return stopped

    def prepare_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches that are left of an epoch, on the device and augmented."""
        for number, (images, targets) in enumerate(self.recorder.speed.wait.watch(iter(self.train_loader))):
            micro = number % self.options.grad_accum_steps
            # Random numbers of a micro-batch depend on none before it, so that a resumed run needs no random state.
            seed_everything(self.options.seed, self.progress.step, micro, self.world.rank)
            images = images.to(self.world.device, memory_format=self.layout, non_blocking=True)
            images, targets = self.augment(images, targets.to(self.world.device, non_blocking=True))
            if self.progress.step == micro == 0:
                self.recorder.images(images)
            yield images, targets

    def update(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        """One optimiser step, with its micro-batches and the weight average."""
        num_micro, loss_sum, num_broken = self.options.grad_accum_steps, 0.0, 0
        for micro in range(num_micro):
            images, targets = next(batches)
            # Gradients add up over the micro-batches; the ranks average them once, in the last backward pass.
            is_last = micro + 1 == num_micro
            syncing = nullcontext() if self.world.size == 1 or is_last else self.network.no_sync()
            with syncing, self.objective.budgets.drawn(self.options.seed, self.progress.step):
                with autocast(self.options.amp, self.world.device):
                    loss = self.objective(self.network, images, targets) / num_micro
                stop = self.signals.stop_requested()
                self.scaler.scale(loss).backward()
            loss_sum += loss.detach().double()
            num_broken += self.train_loader.batch_sampler.batch_size - len(images)
        self.scaler.unscale_(self.optimizer)  # clipping needs the gradients without the loss scale of fp16
        grad_norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.run.optim.clip_grad or torch.inf)
        self.exchange.send(loss_sum, grad_norm, stop, num_broken, self.checkpoints.is_overdue())
        keep_finite(self.optimizer, grad_norm)
        seed_everything(self.options.seed, self.progress.step)  # without the rank: some optimisers draw numbers
        self.scaler.step(self.optimizer)
        if self.ema:
            self.ema.update(self.model, self.progress.step + 1)
        self.scaler.update()
        self.optimizer.zero_grad()

    def evaluate_and_save(self) -> bool:
        """Evaluates the epoch if it is time to, and saves; returns whether a signal has stopped the run."""
        progress, epoch = self.progress, self.progress.epoch + 1
        if is_evaluated := progress.ends_in_evaluation(self.run):
            self.world.barrier()  # no rank begins an evaluation, which might fail, while the checkpoint is written
            models = {"": self.model} | ({"ema_": self.ema.module} if self.ema else {})
            how = self.options.amp, self.signals.stop_requested, self.objective.measure
            metrics = evaluate_all(models, self.val_loader, self.world, *how)
            if metrics is None:
                return True
            progress.metrics = metrics
            progress.rank(epoch, self.options.keep_checkpoints, self.options.best_by)
            self.recorder.eval(epoch, metrics)
        progress.epoch, progress.images, progress.broken = epoch, 0, 0
        progress.stopped_early = is_evaluated and progress.is_overdue(self.run)
        if progress.is_finished(self.run):
            if epoch < self.run.schedule.epochs:
                self.world.tell(f"train.early_stop: no better epoch since epoch {progress.best_epoch()}")
            self.recorder.final(**progress.metrics, **progress.best(), **self.costs)
        self.save()
        return False

    def save(self) -> None:
        """Makes a checkpoint."""
        self.exchange.begin_save()
        self.recorder.sync()
        self.checkpoints.save(self.progress, self.stateful)
        self.recorder.saved()


if __name__ == "__main__":
    record(main)()  # torchrun reports which rank failed, and why
