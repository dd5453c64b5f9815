"""Child processes, to which stop signals are passed on."""

import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from engine.runtime.signals import STOPPED, handle_signals


@contextmanager
def passing_on(processes: Callable[[], Iterable[subprocess.Popen]]) -> Iterator[list[int]]:
    """Context in which `processes` receive the stop signals of this one; its value is those received."""
    received = list[int]()

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number != signal.SIGINT:  # a terminal sends SIGINT to all processes
            for process in processes():
                process.send_signal(number)

    with handle_signals(pass_on):
        yield received


def run_to_end(command: Sequence[str]) -> int:
    """Runs `command` and returns its exit status. Stop signals are passed on to its runs, which then save.

    After a signal the status counts as `STOPPED`, because torchrun ends with 1 when its ranks are stopped.
    """
    with subprocess.Popen(command) as process, passing_on(lambda: [process]) as received:
        while process.poll() is None:
            # A signal may interrupt another thread; an endless wait would not notice it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
    return STOPPED if received else process.returncode
