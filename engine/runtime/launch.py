"""torchrun with the exit status of its ranks, and without a traceback where they have said why they end.

    python -m engine.runtime.launch --nproc_per_node=8 train.py configs/deit_tiny_p8/eva.yaml --output runs/eva

It takes torchrun's arguments. torchrun itself reports a run that a signal has stopped, or that was refused, as a crash
of its own: it prints a traceback after the ranks' last line and ends with status 1. No rank can prevent that.
"""

import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from engine.runtime.signals import STOPPED

REPORTED = (1, 2, STOPPED)
"""Statuses of ranks that have printed why they end: failed, refused, stopped."""

TERMINATED = (-15, 128 + 15)
"""Statuses of ranks that torchrun has ended with SIGTERM because another rank has ended."""


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        run.main(arguments)
    except SignalException as error:
        if isinstance(error.__context__, SignalException):  # a second signal: torchrun has not waited for its ranks
            raise SystemExit(128 + error.sigval) from None
        raise SystemExit(STOPPED) from None
    except ChildFailedError as error:
        status = reported_status(list(error.failures.values()))
        if status is None:
            raise
        if status == STOPPED:  # torchrun has logged a failure after the ranks' last line
            print("stopped and saved; the same command continues the run", file=sys.stderr, flush=True)
        raise SystemExit(status) from None


def reported_status(failures: Sequence[ProcessFailure]) -> int | None:
    """Returns the lowest status of the ranks that have failed; None if a rank has crashed or was killed.

    A rank whose exception is recorded in a file has crashed.
    """
    has_crashed = any(isinstance(failure.message, dict) for failure in failures)
    statuses = {failure.exitcode for failure in failures} - {*TERMINATED}
    return min(statuses) if statuses and statuses <= {*REPORTED} and not has_crashed else None


if __name__ == "__main__":
    main()
