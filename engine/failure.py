"""Failures of a run that a person can act on, in one line and with an exit status of their own.

0   finished
1   failed: a loss that is not finite, memory or disk that does not suffice, a rank that is gone
2   refused before it began: configuration, data, a directory in use
75  stopped by a signal and saved; the same command goes on
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.distributed import World
from engine.schema import Train

FAILED = 1


@contextmanager
def explain_failures(options: Train, world: World) -> Iterator[None]:
    """Inside it, such a failure is one line on stderr and exit status `FAILED`; other errors are this program's."""
    try:
        yield
    except FloatingPointError as error:
        _end(str(error), world)
    except (torch.OutOfMemoryError, MemoryError) as error:
        _end(_remedy(options, world, str(error)), world)
    except OSError as error:
        _end(f"{error.strerror or error}: {error.filename or 'a file of the run'}; the last checkpoint stands", world)
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            _end(_remedy(options, world, str(error)), world)
        raise


def _remedy(options: Train, world: World, error: str) -> str:
    """What to lower where memory does not suffice."""
    images = options.total_batch_size // (world.size * options.grad_accum_steps)
    remedies = [
        f"raise train.grad_accum_steps = {options.grad_accum_steps} ({images} images a pass now)",
        "set train.grad_checkpointing=true" * (not options.grad_checkpointing),
        "set train.amp=bf16" * (options.amp is None),
        f"or lower train.total_batch_size = {options.total_batch_size}",
    ]
    return f"out of memory: {', '.join(filter(None, remedies))} ({error.splitlines()[0] if error else 'main memory'})"


def _end(message: str, world: World) -> None:
    who = f"rank {world.rank}: " if world.size > 1 else ""
    print(f"error: {who}{message}", file=sys.stderr, flush=True)
    raise SystemExit(FAILED) from None
