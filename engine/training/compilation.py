"""Compiled training: equal blocks share one graph, and a failure never falls back to eager mode silently."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.runtime.distributed import World
from engine.runtime.text import describe_error
from models.base import Backbone


class CompilationFailed(Exception):
    """The blocks of a model cannot be compiled."""


@contextmanager
def compiled_blocks(models: Sequence[Backbone], batch_size: int, world: World, **options: Any) -> Iterator[None]:
    """Compiles the blocks of `models` for batches of `batch_size` images, see `Backbone.compile_blocks`.

    Args:
        options: options of `torch.compile`.
    Raises:
        CompilationFailed: torch.compile fails inside the context, or asks for more graphs than all blocks would need in
            two modes if no two were equal. Without this limit, dynamo would continue without compiling.
    """
    num_blocks = sum(model.compile_blocks({batch_size}, **options) for model in models)
    if world.is_primary:
        print("train.compile: the first update and the first evaluation take longer, to compile blocks", flush=True)
    exceptions = torch._dynamo.exc
    try:
        # Gradients are averaged block by block anyway: dynamo need not cut graphs for that.
        with torch._dynamo.config.patch(recompile_limit=2 * num_blocks, optimize_ddp=False):
            yield
    except exceptions.FailOnRecompileLimitHit as error:
        problem = "the blocks are compiled again and again (TORCH_LOGS=recompiles says why)"
        raise CompilationFailed(f"train.compile: {problem}; set it to false") from error
    except exceptions.TorchDynamoException as error:
        problem = "the blocks cannot be compiled here; set it to false"
        raise CompilationFailed(f"train.compile: {problem} ({describe_error(error)})") from error
