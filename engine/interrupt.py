"""Wishes to stop: signals, the death of the launcher. A run finishes its step, saves and ends with status `STOPPED`.

SIGTERM   a scheduler ends or preempts the job; torchrun ends its ranks
SIGINT    Ctrl-C; the second one ends the process at once
SIGUSR1   a scheduler's warning before the time is up (SLURM: ``--signal=USR1@120``)
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

STOPPED = 75
"""Exit status of a run that was stopped and can go on: EX_TEMPFAIL, "try again later", of sysexits.h."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopWish:
    """While it is entered, a signal is noted, and ends nothing. `bool(wish)`: whether this process is to stop."""

    def __enter__(self) -> "StopWish":
        self.noted = False
        self.parent = os.getppid() if "WORLD_SIZE" in os.environ else None  # without a launcher a shell may go away
        self.handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.noted or (self.parent is not None and os.getppid() != self.parent)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def end_at_interrupt() -> Iterator[None]:
    """Inside it, Ctrl-C and SIGTERM end the process in order, with one line and the status that shells give them.

    Killed at once, it would leave unfinished files, and loader workers that wait for ever to hand over what they read.
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


def leave_group(worker: int) -> None:
    """For loader workers: what signals the whole process group, as torchrun and a terminal do, does not mean them.

    The step that the run still finishes needs their images. They end with their parent, whichever way it ends.
    """
    os.setsid()
