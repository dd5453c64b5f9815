"""Plan of a run: what `train.py --dry-run` says about it. Nothing is started and nothing is written."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch._subclasses import fake_tensor

from attention import kernels
from engine.checkpoints.initial_weights import create_initial_model
from engine.checkpoints.progress import describe_place
from engine.config.micro_batches import micro_batch_size
from engine.config.schema import Run
from engine.config.yaml_files import dump_yaml, parse_yaml
from engine.data.identity import identify_data
from engine.data.loaders import create_loaders, images_of
from engine.data.sampler import EpochSampler
from engine.data.splits import Splits, classes_of
from engine.objectives import choose_objective
from engine.objectives.classification import Classification
from engine.run.checks import why_eager
from engine.run.load import dump_run
from engine.runtime.distributed import World, autocast, precision
from engine.runtime.memory import saved_storages
from engine.runtime.provenance import device_name
from engine.runtime.reading import read_csv
from engine.runtime.text import describe_error
from engine.training.compilation import describe_compilation
from engine.training.device import chosen_kernels
from engine.training.objective import create_objective, weigh_classes
from engine.training.optim import create_optimizer
from engine.training.resume import Checkpoints, Resumed
from models import create_model
from models.costs import count_costs
from models.freeze import freeze

UNTRACEABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
"""Errors of a model whose shapes depend on numbers."""

MEASURED = Path(__file__).with_name("gpu_training.csv")
"""Images (224 pixels, bf16) a second in training, by `python -m bench.gpu_run`; tiny8 there is deit_tiny_p8."""

INDENT = " " * 12
"""Beginning of a line that goes on with a fact."""


def print_plan(
    run: Run, world: World, splits: Splits, output: Path, allowed: Sequence[str] = (), quoted: str = ""
) -> None:
    """Prints, on the primary rank, the size of `run`, its length, memory, what it would resume, and its options in the
    sections that are not the defaults.

    Initial weights and a teacher are read as by a launch, and the outcome of the weights is printed.

    Args:
        splits: training and validation images. quoted: a last fact.
        output, allowed: directory of the run, and options that may differ from the run in it.
    Raises:
        OptionError, UserError: weights or a teacher that cannot be used, or a directory that holds a different run.
    """
    img_size, batch = run.model["img_size"], run.train.total_batch_size
    train, val, _ = create_loaders(run, world, splits, img_size=img_size, num_classes=run.model["num_classes"])
    sampler = cast(EpochSampler, train.sampler)
    identity = identify_data(images_of(train), images_of(val))
    if run.init.weights or run.distill.teacher:
        model = create_initial_model(run, output, world, classes_of(images_of(val)))
        identity |= create_objective(run, model, images_of(train), world).identity
    else:
        weigh_classes(run, images_of(train), world)
    resumed = Resumed(Checkpoints(output, run, world, sampler.num_images, identity), allowed)
    progress = resumed.progress
    steps, epochs = progress.total_steps(run, sampler.updates_per_epoch), run.schedule.epochs
    costs = count_costs(run.model, run.attention)
    images = micro_batch_size(run, world.size)
    passes = f"{world.size} x {run.train.grad_accum_steps} x {images}"
    if progress.is_finished(run):
        found = f"nothing; {output} is finished"
    elif resumed.resumption.checkpoint is None:
        found = f"nothing; {output} has no checkpoint, and the run starts from the beginning"
    else:
        found = resumed.resumption.describe(describe_place(run, progress.epoch, progress.step, steps))

    def build() -> nn.Module:
        model = create_model(attention=run.attention, **run.model)
        freeze(model, run.train.freeze)
        return model

    reason = why_eager(run, world.on_cuda)
    with chosen_kernels(run, build, progress, world) as taken:
        pass
    facts = {
        "parameters": f"{costs.parameters:,}",
        "MACs": f"{costs.macs:,} of an image",
        "images": f"{sampler.num_images:,} to train, {len(images_of(val)):,} to validate",
        "steps": f"{steps:,}: {epochs:,} epochs of {sampler.updates_per_epoch:,}",
        "batch": f"{batch:,} images: processes x passes x images of a pass = {passes}",
        "time": describe_hours(run, world, steps - progress.step),
        "precision": precision(run.train.amp, world.device),
        "kernels": taken,
        "compile": describe_compilation(run, world),
        "CUDA graph": f"off: {reason}" if reason else "on, unless the start finds that a pass waits for the GPU",
        "memory": describe_memory(run, world, images),
        "resumes": found,
    }
    if world.is_primary:
        print(*(f"{name:{len(INDENT)}}{text}" for name, text in facts.items() if text), sep="\n")
        print(*filter(None, [quoted]), "", "# sections of options that are not the defaults", sep="\n")
        options, defaults = dump_run(run), dump_run(Run(model={}, attention=None))
        for name, values in options.items():
            if values != defaults[name]:
                print(f"{name}: {dump_yaml(values, default_flow_style=True, width=119)}", end="")


def describe_hours(run: Run, world: World, steps: int) -> str:
    """Returns the hours of so many updates, derived from `MEASURED`; "" without a row of this GPU
    for the run's model and execution, and for its mechanism with the same multiply-accumulates to 0.1 %.
    """
    is_compiled, device = describe_compilation(run, world) == "on", device_name(world.device)
    execution = "compiled" * is_compiled + "-cuda-graph" * (not why_eager(run, world.on_cuda))
    is_plain = choose_objective(run) is Classification and not run.train.freeze and isinstance(run.attention, dict)
    is_plain = is_plain and run.train.kernels == "auto" and not run.train.deterministic
    if not steps or not is_plain or precision(run.train.amp, world.device) != "bf16":
        return ""
    for row in read_csv(MEASURED):
        model = re.sub(r"^(\D+)(\d+)$", r"deit_\1_p\2", row["model"])
        name, _, options = row["name"].partition(":")
        asked = run.model["name"], run.attention["name"], device, execution
        is_asked = asked == (model, name, row["device"], row["execution"]) and row["images_per_second"]
        if is_asked and micro_batch_size(run, world.size) >= int(row["batch"]):
            attention = parse_yaml(f"{{name: {name}, {options.replace('=', ': ')}}}", str).values
            there = count_costs({"name": model, "img_size": 224}, attention)
            if abs(count_costs(run.model, run.attention).macs / there.macs - 1) < 1e-3:
                hours = steps * run.train.total_batch_size / (speed := float(row["images_per_second"])) / 3600
                derived = f"derived from {speed:,.0f} images/s, measured on one {device} without loading and evaluation"
                return f"about {hours / world.size:.1f} hours, {hours:.1f} GPU-hours; {derived}"
    return ""


def describe_memory(run: Run, world: World, images: int) -> str:
    """Returns the estimate of the memory of a process, for micro-batches of `images` images, and what it counts."""
    try:
        parts = estimate_memory(run, world, images)
    except UNTRACEABLE as error:
        return f"not known: the model cannot be traced ({describe_error(error)})"
    total = f"{sum(parts.values()) / 2**20:,.0f} MB a process, without temporary tensors, a teacher, and libraries"
    return f"{total}\n{INDENT}{', '.join(f'{name} {size / 2**20:,.1f}' for name, size in parts.items() if size)}"


def estimate_memory(run: Run, world: World, images: int) -> dict[str, int]:
    """Returns the bytes that training keeps in a process, by kind, for micro-batches of `images` images.

    Activations are the tensors that the forward pass keeps for the backward pass, in the precision of the run. They
    are counted on tensors that have shapes but no memory. Gradients take their place in the backward pass, and count
    where they outlive it: if micro-batches add up, and in the buffers of processes that exchange them.
    """
    device = world.device.type
    with torch.device("meta"):
        model = create_model(attention=run.attention, **run.model).train()
        freeze(model, run.train.freeze)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    model.set_grad_checkpointing(run.train.grad_checkpointing)
    with fake_tensor.FakeTensorMode(), ExitStack() as stack:

        def allocate(tensor: Tensor) -> Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = {name: allocate(tensor).requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
        batch = torch.empty(images, model.in_chans, *to_2tuple(run.model["img_size"]), device=device)
        known = {tensor.untyped_storage()._cdata for tensor in state.values()}
        stack.enter_context(kernels.use(run.train.kernels))
        stack.enter_context(autocast(run.train.amp, torch.device(device)))
        saved = stack.enter_context(saved_storages())
        torch.func.functional_call(model, state, (batch,))
        activations = sum(storage.nbytes() for key, storage in saved.items() if key not in known)
        activations *= min(3, len(run.train.budgets or "1")) if run.train.budget_distill else 1
    copies = (run.train.grad_accum_steps > 1) + (world.size > 1)
    return {
        "weights": weights,
        "weight average": weights if run.train.ema_decay else 0,
        "gradients": copies * gradients + max(0, gradients - activations),
        "optimiser": _optimizer_bytes(model, run),
        f"activations of {images:,} images": activations,
    }


def _optimizer_bytes(model: nn.Module, run: Run) -> int:
    """Returns the bytes of the optimiser's state after an update, on the meta device."""
    optimizer = create_optimizer(model, run.optim, run.train.total_batch_size)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
