"""Stop signals, see docs/training.md: a run finishes its step, saves a checkpoint and ends with status `STOPPED`."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from types import FrameType
from typing import Self

STOPPED = 75
"""Exit status of a run that was stopped and can be resumed: EX_TEMPFAIL, "try again later", of sysexits.h."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


def begin(parser: str = "") -> None:
    """Ends this script without a traceback at Ctrl-C, and parses its arguments by `parser`, "module:function", before
    its other imports.
    """
    sys.excepthook = lambda kind, *of: sys.exit(130) if kind is KeyboardInterrupt else sys.__excepthook__(kind, *of)
    if parser:
        resolve_name(parser)()


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context in which `handler` receives the stop signals.

    Signals that nohup, or a shell for its background jobs, has made ignored stay ignored. A rank handles them in every
    case: torchrun does not ignore them, and kills its ranks half a minute after it has passed one on.
    """
    is_rank = "WORLD_SIZE" in os.environ
    heeded = [number for number in SIGNALS if is_rank or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class SignalHandler(ExitStack):
    """Context in which a stop signal does not end the process but sets `received`."""

    def __enter__(self) -> Self:
        self.received = False
        self.parent = os.getppid() if "WORLD_SIZE" in os.environ else None  # without a launcher, a shell may end
        self.enter_context(handle_signals(self._handle))
        return self

    def stop_requested(self) -> bool:
        """Returns whether this process should stop, because it has received a signal or its launcher has died."""
        return self.received or (self.parent is not None and os.getppid() != self.parent)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def end_at_interrupt() -> Iterator[None]:
    """Context in which stop signals unwind the process, which ends with one line and the status that shells use.

    A process killed at once would leave unfinished files, and loader workers that wait forever.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    try:
        with handle_signals(interrupt):
            yield
    except KeyboardInterrupt as error:
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + (error.args[0] if error.args else signal.SIGINT)) from None
