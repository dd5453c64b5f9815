"""A worker: trains the runs of a sweep one after the other, except those that another process trains."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from ablation.sweep import Case
from engine.files import hold_lock, is_locked
from engine.signals import STOPPED, handle_signals


def train_all(cases: Sequence[Case], after_each: Callable[[], None]) -> tuple[list[str], list[str]]:
    """Trains the runs that are neither finished nor running elsewhere, and calls `after_each` run.

    Returns:
        The directories of the runs that failed, and of those that are running elsewhere.
    Raises:
        SystemExit: stopped by a signal, after the run has saved.
    """
    failed, elsewhere = [], []
    for number, case in enumerate(cases, start=1):
        name = f"run {number}/{len(cases)}"
        print(f"{name}: {case.directory}", "(finished)" * bool(case.result()), flush=True)
        case.directory.mkdir(parents=True, exist_ok=True)
        with hold_lock(case.directory / "ablate.lock", wait=False) as is_held:  # train.py locks later than it begins
            is_free = is_held and not is_locked(case.directory)
            status = run_to_end(case.command) if is_free and not case.result() else 0
        if status == STOPPED:
            print(f"{name} is stopped; the same command goes on", flush=True)
            sys.exit(STOPPED)
        if status or not case.result():
            if not is_free or is_locked(case.directory):
                elsewhere.append(str(case.directory))
                print(f"{name} is running elsewhere", flush=True)
            else:
                failed.append(str(case.directory))
                print(f"{name} failed: {shlex.join(case.command)}", file=sys.stderr, flush=True)
        after_each()
    return failed, elsewhere


def run_to_end(command: Sequence[str]) -> int:
    """Runs `command`, passes stop signals on to it, which a run answers by saving, and returns its exit status.

    After a signal that is `STOPPED`, whatever the status: torchrun ends with 1 when its ranks are stopped.
    """
    stopped = False
    with subprocess.Popen(command) as process:

        def pass_on(number: int, frame: FrameType | None) -> None:
            nonlocal stopped
            stopped = True
            if number != signal.SIGINT:  # which a terminal sends to both
                process.send_signal(number)

        with handle_signals(pass_on):
            while process.poll() is None:
                # A signal may interrupt another thread than this one, which an endless wait would not notice.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
    return STOPPED if stopped else process.returncode
