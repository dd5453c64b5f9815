"""The device of a run: checks of what runs on it, and a choice of attention's kernels by their times on it."""

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from timm.layers import to_2tuple
from torch import nn

from attention import kernels
from attention.ops.timing import gpu_milliseconds
from attention.options import OptionError, collecting, refuse
from engine.checkpoints.progress import Progress
from engine.config.micro_batches import micro_batch_size
from engine.config.schema import Run, num_channels
from engine.run.checks import check_cuda_graph
from engine.runtime.distributed import World, autocast
from engine.runtime.provenance import device_name
from engine.training.optim import check_optimizer
from models.freeze import set_train_mode


def check_device(run: Run, device: torch.device) -> None:
    """Refuses an optimiser, see `check_optimizer`, kernels or CUDA graphs that do not run on the device.

    Raises:
        OptionError: for all of these reasons.
    """
    problems = list[OptionError]()
    with collecting(problems):
        check_optimizer(run.optim, device)
    with collecting(problems):
        check_cuda_graph(run, device.type == "cuda")
    with collecting(problems):
        check_kernels(run, device)
    refuse(problems)


def check_kernels(run: Run, device: torch.device) -> None:
    """Refuses Triton's kernels where they do not run."""
    reason = "triton is not installed" if importlib.util.find_spec("triton") is None else None
    if device.type == "cuda":
        reason = kernels.refusal_of(device.index)
    if run.train.kernels == "triton" and reason:
        raise OptionError("train.kernels", f" = triton: {reason}; set it to auto or torch")


@contextmanager
def chosen_kernels(run: Run, network: Callable[[], nn.Module], progress: Progress, world: World) -> Iterator[str]:
    """Context of the path `train.kernels`, whose value says what it takes.

    On a GPU the path auto takes the faster of two functions, see `attention.kernels.use`. Those that
    `progress` does not know for the primary rank's GPU are timed there, and added to it.

    Args:
        network: returns the model, of which a copy makes a forward pass.
    """
    speedups = dict[str, float]()
    if is_timed(run, world):
        gpu = device_name(world.device)
        if world.is_primary:
            speedups = time_kernels(run, network(), progress.kernels.get(gpu, {}), world)
        gpu, speedups = world.share((gpu, speedups))
        progress.kernels[gpu] = speedups
    with kernels.use(run.train.kernels, speedups):
        yield kernels.resolved()


def is_timed(run: Run, world: World) -> bool:
    """Returns whether times choose functions: times of deterministic runs would not repeat."""
    return run.train.kernels == "auto" and world.on_cuda and not run.train.deterministic


def time_kernels(run: Run, model: nn.Module, known: Mapping[str, float], world: World) -> dict[str, float]:
    """Returns the `known` speed-ups, and those of further calls in a forward pass of a copy of the model."""
    layout = torch.channels_last if run.train.channels_last else torch.contiguous_format
    batch = micro_batch_size(run, world.size), num_channels(run), *to_2tuple(run.model["img_size"])
    speedups, devices = dict(known), [world.device] if world.on_cuda else []
    with torch.random.fork_rng(devices), kernels.use(run.train.kernels, speedups, gpu_milliseconds):
        if vocabulary := run.model.get("vocab_size"):
            images = torch.randint(vocabulary, batch, device=world.device)
        else:
            images = torch.randn(batch, device=world.device).to(memory_format=layout)
        model = copy.deepcopy(model).to(world.device).to(memory_format=layout)
        set_train_mode(model)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x)  # without the pass's activations
        with autocast(run.train.amp, world.device), hooks:
            model(images)
    if world.on_cuda:  # training's own memory is what counts
        del model, images
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return speedups
