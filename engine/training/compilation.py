"""Compiled training: equal blocks share one graph, and a failure never falls back to eager mode silently."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from attention import kernels
from engine.config.micro_batches import micro_batch_size
from engine.config.schema import Run
from engine.runtime.distributed import World
from engine.runtime.text import describe_error
from models.base import Backbone


class CompilationFailed(Exception):
    """The blocks of a model cannot be compiled, or its passes captured, and it is too late to train without that."""


def describe_compilation(run: Run, world: World) -> str:
    """Returns "on" if the blocks are compiled in training, otherwise "off" and why."""
    if run.train.compile != "auto":
        return "on" if run.train.compile else "off: train.compile = false"
    if not world.on_cuda:
        return "off: no CUDA GPU"
    if reason := kernels.refusal_of(world.device.index):  # torch's compiler needs what our kernels need
        return f"off: {reason}"
    return "on" if run.model.get("pad_token") is None else "off: model.pad_token"


@contextmanager
def compiled_blocks(models: Sequence[Backbone], run: Run, world: World, **options: Any) -> Iterator[str]:
    """Compiles the blocks of `models` for the micro-batches of a run, see `Backbone.compile_blocks`.

    With `train.deterministic` the compiler chooses nothing by timing that changes results.

    Args:
        options: options of `torch.compile`.
    Yields:
        The result of `describe_compilation`; unless it is "on", nothing is compiled.
    Raises:
        CompilationFailed: torch.compile fails inside the context, or asks for more graphs than all blocks would need in
            two modes and at all `train.budgets` if no two were equal. Without this limit, dynamo would continue without
            compiling.
    """
    if (found := describe_compilation(run, world)) != "on":
        yield found
        return
    images = micro_batch_size(run, world.size)
    num_graphs = 2 * sum(model.compile_blocks({images}, **options) for model in models) * len(run.train.budgets or "1")
    if world.is_primary:
        print("train.compile: the first update and the first evaluation take longer, to compile blocks", flush=True)
    exceptions, config = torch._dynamo.exc, torch._dynamo.config
    total = max(num_graphs, config.accumulated_recompile_limit)
    try:
        # Gradients are averaged block by block anyway: dynamo need not cut graphs for that.
        with (
            config.patch(recompile_limit=num_graphs, accumulated_recompile_limit=total, optimize_ddp=False),
            torch._inductor.config.patch(deterministic=run.train.deterministic),
        ):
            yield found
    except exceptions.FailOnRecompileLimitHit as error:
        problem = "the blocks are compiled again and again (TORCH_LOGS=recompiles says why)"
        raise CompilationFailed(f"train.compile: {problem}; set it to false") from error
    except exceptions.TorchDynamoException as error:
        problem = "the blocks cannot be compiled here; set it to false"
        raise CompilationFailed(f"train.compile: {problem} ({describe_error(error)})") from error
