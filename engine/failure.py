"""Failures of a run that a person can act on: one line on stderr, and an exit status.

0   finished
1   failed: a loss that is not finite, memory or disk that does not suffice, a rank that does not answer
2   refused before it began: configuration, data, a directory in use
75  stopped by a signal and saved; the same command goes on (`engine.interrupt`)
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.distributed import World
from engine.schema import Train

FAILED = 1

PATIENCE = timedelta(seconds=5)
"""For which the first rank looks for the others once a rank has failed to answer."""


@contextmanager
def explain_failures(options: Train, world: World) -> Iterator[None]:
    """Inside it, such a failure ends the process with one line and status `FAILED`; other errors are this program's."""
    # The first group does not outlive a failure. On CUDA, NCCL ends the process itself.
    watch = dist.new_group(backend="gloo") if world.size > 1 and not world.on_cuda else None
    try:
        yield
    except FloatingPointError as error:
        _end(world, str(error))
    except OSError as error:
        what = error.strerror or str(error).strip().splitlines()[-1]
        _end(world, f"{error.filename or 'log or events'}: {what}; the last checkpoint stands")
    except (RuntimeError, MemoryError) as error:
        text = str(error).partition("\n")[0]
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in text:
            _end(world, f"out of memory; {_remedies(options, world)} ({text})")
        if watch and "gloo/transport" in text:
            _end(world, f"{_find_missing(watch)} ({text})")
        raise


def _remedies(options: Train, world: World) -> str:
    """What to change where memory does not suffice."""
    images = options.total_batch_size // (world.size * options.grad_accum_steps)
    remedies = {
        f"raise train.grad_accum_steps = {options.grad_accum_steps} ({images} images a pass)": images > 1,
        "set train.grad_checkpointing=true": not options.grad_checkpointing,
        "set train.amp=bf16": options.amp is None,
        f"lower train.total_batch_size = {options.total_batch_size}": True,
    }
    return ", or ".join(remedy for remedy, helps in remedies.items() if helps)


def _find_missing(watch: dist.ProcessGroup) -> str:
    """Which ranks do not answer, as far as this rank can say."""
    try:
        dist.monitored_barrier(watch, timeout=PATIENCE, wait_all_ranks=True)
    except RuntimeError as error:
        if ranks := re.search(r"Ranks? ([\d, ]+) failed to pass", str(error)):
            return f"no answer from rank {ranks[1]}"
    return "no answer from another rank"


def _end(world: World, message: str) -> None:
    who = f"rank {world.rank}: " if world.size > 1 else ""
    print(f"error: {who}{message}", file=sys.stderr, flush=True)
    raise SystemExit(FAILED) from None
