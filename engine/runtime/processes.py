"""Child processes, to which stop signals are passed on."""

import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from engine.runtime.signals import STOPPED, handle_signals


def run_to_end(command: Sequence[str], each_second: Callable[[], object] = lambda: None, **streams: Any) -> int:
    """Runs `command` and returns its exit status, see `wait_for`; `streams` are stdout and stderr of `Popen`."""
    with subprocess.Popen(command, **streams) as process:
        return wait_for([process], each_second)[0]


def wait_for(processes: Sequence[subprocess.Popen], each_second: Callable[[], object] = lambda: None) -> list[int]:
    """Passes stop signals on to `processes`, whose runs then save, and returns their exit statuses.

    Calls `each_second` about once a second.
    After a signal every status counts as `STOPPED`, because torchrun ends with 1 when its ranks are stopped.
    """
    stopped = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if number != signal.SIGINT:  # a terminal sends SIGINT to all processes
            for process in processes:
                process.send_signal(number)

    with handle_signals(pass_on):
        for process in processes:
            while process.poll() is None:
                # A signal may interrupt another thread; an endless wait would not notice it.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                each_second()
    return [STOPPED if stopped else process.returncode for process in processes]
