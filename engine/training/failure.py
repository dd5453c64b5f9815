"""Failures of a run that the user can act on: one line on stderr, and an exit status, see docs/training.md."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.config.schema import Train
from engine.data.images import BrokenImage, DataError
from engine.data.workers import REMEDY, WorkersFailed
from engine.runtime.distributed import World
from engine.runtime.memory import is_out_of_memory
from engine.training.compilation import CompilationFailed

FAILED = 1


@contextmanager
def explain_failures(options: Train, world: World) -> Iterator[None]:
    """Context in which such a failure ends the process with one line and status `FAILED`; bugs pass."""
    try:
        yield
    except (FloatingPointError, BrokenImage, DataError, WorkersFailed, CompilationFailed) as error:
        _end(world, str(error))
    except OSError as error:
        what = error.strerror or str(error).strip().splitlines()[-1]
        _end(world, f"{error.filename or 'log or events'}: {what}; the last checkpoint stands")
    except (RuntimeError, MemoryError) as error:
        text = str(error).partition("\n")[0]
        if is_out_of_memory(error):
            _end(world, f"out of memory; {_remedies(options, world)} ({text})")
        if "gloo/transport" in text:  # on CUDA, NCCL ends the process
            _end(world, f"no answer from another rank ({text})")
        if text.startswith("DataLoader worker"):  # torch raises it at any time
            _end(world, f"{text}; {REMEDY}")
        raise


def _remedies(options: Train, world: World) -> str:
    """Returns the options to change if memory ran out."""
    images = options.total_batch_size // (world.size * options.grad_accum_steps)
    remedies = {
        f"raise train.grad_accum_steps = {options.grad_accum_steps} ({images} images a pass)": images > 1,
        "set train.grad_checkpointing=true": not options.grad_checkpointing,
        "set train.amp=bf16": options.amp is None,
        f"lower train.total_batch_size = {options.total_batch_size}": True,
    }
    return ", or ".join(remedy for remedy, helps in remedies.items() if helps)


def _end(world: World, message: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise again for each dead loader worker
    who = f"rank {world.rank}: " if world.size > 1 else ""
    print(f"error: {who}{message}", file=sys.stderr, flush=True)
    raise SystemExit(FAILED) from None
