"""Training of the runs of a sweep, several at a time, except those that another process trains."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch

from ablation.runs import Case, failure_mark
from engine.runtime.locks import hold_lock, is_locked
from engine.runtime.ownership import claim_results
from engine.runtime.processes import passing_on
from engine.runtime.signals import STOPPED
from engine.runtime.text import one_line

POLL_SECONDS = 2
"""Interval at which a process without a run checks whether one has become free."""

ERROR = re.compile(r"(\[rank\d+\]: )?(error: |(?!.*ChildFailedError)[\w.]*(Error|Exception)\b)")
"""Beginning of a line that names an error: one of the scripts here, or an exception of Python; not torchrun's own."""


class Training:
    """A run that this process trains: its process, and the end of its stderr.

    Args:
        lock: holds the lock of the run. environment: None: that of this process. passes_on: print what the run prints.
    """

    def __init__(self, case: Case, lock: ExitStack, environment: Mapping[str, str] | None, passes_on: bool):
        self.case, self.lock, self.environment, self.passes_on, self.tail = case, lock, environment, passes_on, b""
        stdout = None if passes_on else subprocess.DEVNULL  # the run's console log has it
        self.process = subprocess.Popen(case.command, env=environment, stdout=stdout, stderr=subprocess.PIPE, bufsize=0)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as source:
            while chunk := source.read(2**16):
                self.tail = (self.tail + chunk)[-(2**16) :]
                if self.passes_on:
                    print(chunk.decode(errors="replace"), end="", file=sys.stderr, flush=True)

    def wait(self) -> int:
        """Waits for the end of the process and of its output, and returns its status."""
        status = self.process.wait()
        self.reader.join(timeout=5)  # a process that the run has left behind may hold the pipe
        return status

    def last_error(self) -> str:
        """Returns the last line that names an error, or else the last line with a word; empty without one."""
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines() if re.search(r"\w", line)]
        return one_line(([line for line in lines if ERROR.match(line)] or lines or [""])[-1], 300)


def train_all(cases: Sequence[Case], jobs: int, wait: bool, done: Callable[[], object]) -> None:
    """Trains the runs that are neither finished nor running elsewhere, `jobs` at a time, and calls `done` after each.

    A run that has failed in another process is left alone.

    Args:
        wait: wait until the runs elsewhere end, and train those whose process was killed.
    Raises:
        SystemExit: stopped by a signal, after the runs have saved.
    """
    names = {case.directory: f"run {number}/{len(cases)}" for number, case in enumerate(cases, start=1)}
    todo, elsewhere, running = list(cases), list[Case](), list[Training]()
    free = share_devices(jobs)
    with passing_on(lambda: [training.process for training in running]) as stops:
        try:
            while running or (not stops and (todo or (elsewhere and wait))):
                if free and todo and not stops:
                    case = todo.pop(0)
                    print(f"{names[case.directory]}: {case.directory}{' (finished)' * bool(case.result())}", flush=True)
                    if case.result():
                        continue
                    if training := begin(case, free[0], jobs == 1):
                        running.append(training)
                        free.pop(0)
                        if stops:  # while it was started
                            training.process.terminate()
                    elif not case.result() and not case.has_failed():
                        elsewhere.append(case)
                        print(f"{names[case.directory]} is running elsewhere", flush=True)
                    if wait and elsewhere and not todo:
                        print(f"waiting for {len(elsewhere)} runs elsewhere; with --no-wait this would end", flush=True)
                elif ended := [training for training in running if training.process.poll() is not None]:
                    for training in ended:
                        running.remove(training)
                        free.append(training.environment)
                        if training.process.returncode == STOPPED:
                            stops.append(STOPPED)
                        if not end(training, names[training.case.directory], bool(stops)):
                            elsewhere.append(training.case)
                        if not stops:
                            done()
                elif running:
                    time.sleep(0.05)
                else:
                    todo = [case for case in elsewhere if not is_busy(case)]
                    elsewhere = [case for case in elsewhere if case not in todo]
                    time.sleep(0 if todo else POLL_SECONDS)
        finally:
            for training in running:
                training.process.terminate()
                end(training, names[training.case.directory], True)
    if stops:
        sys.exit(STOPPED)


def begin(case: Case, environment: Mapping[str, str] | None, passes_on: bool) -> Training | None:
    """Starts a run, unless another process trains it, or has done so."""
    claim_results(case.directory, [failure_mark(case).name])
    with ExitStack() as stack:
        # A separate lock, because train.py locks the directory some time after it begins.
        if not stack.enter_context(hold_lock(case.directory / "ablate.lock", wait=False)) or is_locked(case.directory):
            return None
        if case.result() or case.has_failed():
            return None
        return Training(case, stack.pop_all(), environment, passes_on)


def end(training: Training, name: str, stopped: bool) -> bool:
    """Ends a run whose process ends, and prints a failure; returns False if another process has begun it first.

    Args:
        stopped: a signal has stopped it, whatever its status: torchrun ends with 1 when its ranks are stopped.
    """
    case, status = training.case, training.wait()
    with training.lock:
        if stopped and not case.result():
            print(f"{name} is stopped; the same command goes on", flush=True)
        elif status or not case.result():
            if is_locked(case.directory):
                print(f"{name} is running elsewhere", flush=True)
                return False
            text = f"{name} failed, {describe_status(status)}: {training.last_error() or 'it has printed no error'}"
            text += f"\n  {shlex.join(case.command)}"
            failure_mark(case).write_text(text)
            print(text, file=sys.stderr, flush=True)
    return True


def describe_status(status: int) -> str:
    """Returns "status 3", or the signal that has ended a process: "signal SIGKILL"."""
    number = -status if status < 0 else status - 128  # of a shell, or a launcher
    if number in iter(signal.Signals):
        return f"signal {signal.Signals(number).name}"
    return f"status {status}" if status else "status 0 without a result"


def is_busy(case: Case) -> bool:
    """Returns whether another process trains the run."""
    if not case.directory.exists():
        return False
    with hold_lock(case.directory / "ablate.lock", wait=False) as is_held:
        return not is_held or is_locked(case.directory)


def share_devices(jobs: int) -> list[dict[str, str] | None]:
    """Returns the environment of each of `jobs` runs at a time: its own GPUs, if there are enough, and its share of
    CPUs; that of this process (None) for a single one.
    """
    if jobs == 1:
        return [None]
    number = torch.cuda.device_count()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number)))).split(",")[:number]
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs))} | os.environ
    visible = [gpus[job::jobs] or gpus[job % number : job % number + 1] if number else [] for job in range(jobs)]
    return [threads | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}) for own in visible]
