"""Stop signals: a run that receives one finishes its step, saves a checkpoint and ends with status `STOPPED`.

SIGTERM   a scheduler ends or preempts the job; torchrun ends its ranks
SIGINT    Ctrl-C; a second one ends the process at once
SIGUSR1   a scheduler's warning before the time limit (SLURM: ``--signal=USR1@120``)
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

STOPPED = 75
"""Exit status of a run that was stopped and can be resumed: EX_TEMPFAIL, "try again later", of sysexits.h."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class SignalHandler:
    """A context in which a stop signal does not end the process but sets `received`."""

    def __enter__(self) -> "SignalHandler":
        self.received = False
        self.parent = os.getppid() if "WORLD_SIZE" in os.environ else None  # without a launcher a shell may go away
        self.previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def stop_requested(self) -> bool:
        """Whether this process has received a signal, or its launcher has died, and it should stop."""
        return self.received or (self.parent is not None and os.getppid() != self.parent)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def end_at_interrupt() -> Iterator[None]:
    """Inside it, Ctrl-C and SIGTERM unwind the process, which ends with one line and the status that shells use.

    Killed at once, it would leave unfinished files, and loader workers that wait forever to hand over what they read.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + (error.args[0] if error.args else signal.SIGINT)) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_process_group(worker: int) -> None:
    """Takes a loader worker out of the process group, so that signals to all of it do not end the worker.

    torchrun and terminals send such signals, and the step that the run still finishes needs the worker's images. The
    worker ends with its parent, however that ends.
    """
    os.setsid()
