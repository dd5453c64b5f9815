"""A child process, to which stop signals are passed on."""

import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from engine.runtime.signals import STOPPED, handle_signals


def run_to_end(command: Sequence[str]) -> int:
    """Runs `command` and returns its exit status. Stop signals are passed on to its runs, which then save.

    After a signal the status counts as `STOPPED`, because torchrun ends with 1 when its ranks are stopped.
    """
    stopped = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if number != signal.SIGINT:  # a terminal sends SIGINT to all processes
            process.send_signal(number)

    with subprocess.Popen(command) as process, handle_signals(pass_on):
        while process.poll() is None:
            # A signal may interrupt another thread; an endless wait would not notice it.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
    return STOPPED if stopped else process.returncode
