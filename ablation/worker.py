"""Workers: each trains the runs of a sweep one after the other, except runs that another process trains."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import torch

from ablation.cases import Case, failure_mark, last_failure
from ablation.progress import Progress
from engine.runtime.locks import hold_lock, is_locked
from engine.runtime.ownership import claim_results
from engine.runtime.processes import run_to_end, wait_for
from engine.runtime.signals import STOPPED
from engine.runtime.text import one_line

POLL_SECONDS = 2
"""Interval at which a worker without a run checks whether one has become free."""

ERROR = re.compile(r"(\[rank\d+\]: )?(error: |(?!.*ChildFailedError)[\w.]*(Error|Exception)\b)")
"""Beginning of a line that names an error: one of the scripts here, or an exception of Python; not torchrun's own."""

MOST_ERRORS = 2**16
"""Number of bytes kept from the end of a run's stderr."""

PIPE_SECONDS = 5
"""Longest wait for the remaining output of a run that has ended."""


def train_all(
    cases: Sequence[Case], failures: Mapping[Path, int | None], wait: bool, progress: Progress
) -> Iterator[Case]:
    """Trains the runs that are neither finished nor running elsewhere, and yields each after it.

    Args:
        failures: directory -> `last_failure` before the sweep began; a run that has failed since is left alone.
        wait: wait until the runs elsewhere end, and train those whose process was killed.
    Raises:
        SystemExit: stopped by a signal, after the run has saved.
    """
    names = {case.directory: f"run {number}/{len(cases)}" for number, case in enumerate(cases, start=1)}
    todo = list(cases)
    while todo:
        elsewhere = []
        for case in todo:
            name = names[case.directory]
            progress.write(f"{name}: {case.directory}" + " (finished)" * bool(case.result()))
            if case.result():
                continue
            claim_results(case.directory, [failure_mark(case).name])
            # A separate lock, because train.py locks the directory some time after it begins.
            with hold_lock(case.directory / "ablate.lock", wait=False) as is_held:
                is_free = is_held and not is_locked(case.directory)
                if is_free and not case.result() and last_failure(case) == failures[case.directory]:
                    is_free = train(case, name, progress)
                    yield case
                    progress.end_run()
            if not is_free:
                elsewhere.append(case)
                progress.write(f"{name} is running elsewhere")
        if elsewhere and wait:
            progress.write(f"waiting for {len(elsewhere)} runs elsewhere; with --no-wait this would end")
            while all(map(is_busy, elsewhere)):
                progress.tick()
                time.sleep(POLL_SECONDS)
        todo = elsewhere if wait else []


def train(case: Case, name: str, progress: Progress) -> bool:
    """Trains a run to its end; returns False if another process has begun it first.

    Its lines pass through, except in a terminal, which `progress` has: they are in the run's console log.
    """
    with ErrorLines(passes_on=not progress.is_live) as errors:
        stdout = subprocess.DEVNULL if progress.is_live else None
        status = run_to_end(case.command, progress.tick, stdout=stdout, stderr=errors.pipe)
    if status == STOPPED:
        progress.write(f"{name} is stopped; the same command goes on")
        sys.exit(STOPPED)
    if status or not case.result():
        if is_locked(case.directory):
            return False
        text = f"{name} failed, {describe_status(status)}: {errors.last() or 'it has printed no error'}"
        text += f"\n  {shlex.join(case.command)}"
        failure_mark(case).write_text(text)
        progress.write(text, error=True)
    return True


class ErrorLines:
    """Context of a pipe for the standard error of a process: keeps its end, and prints it if it `passes_on`.

    Attributes:
        pipe: descriptor that the process writes to.
    """

    def __init__(self, passes_on: bool):
        self.passes_on, self.tail = passes_on, b""

    def __enter__(self) -> Self:
        self.source, self.pipe = os.pipe()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.pipe)
        self.reader.join(PIPE_SECONDS)  # a process that the run has left behind may hold the pipe

    def _read(self) -> None:
        with open(self.source, "rb", buffering=0) as source:
            while chunk := source.read(2**16):
                self.tail = (self.tail + chunk)[-MOST_ERRORS:]
                if self.passes_on:
                    print(chunk.decode(errors="replace"), end="", file=sys.stderr, flush=True)

    def last(self) -> str:
        """Returns the last line that names an error, or else the last line with a word; empty without one."""
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines() if re.search(r"\w", line)]
        return one_line(([line for line in lines if ERROR.match(line)] or lines or [""])[-1], 300)


def describe_status(status: int) -> str:
    """Returns "status 3", or the signal that has ended a process: "signal SIGKILL"."""
    number = -status if status < 0 else status - 128  # of a shell, or a launcher
    if number in iter(signal.Signals):
        return f"signal {signal.Signals(number).name}"
    return f"status {status}" if status else "status 0 without a result"


def run_jobs(command: Sequence[str], jobs: int, output: Path, progress: Progress) -> None:
    """Runs `command`, which trains runs one after the other, in `jobs` processes that share the devices.

    Raises:
        SystemExit: stopped by a signal, after the runs have saved.
    """
    claim_results(output, [worker_log(output, number).name for number in range(1, 1 + jobs)])
    with ExitStack() as stack:
        processes = {}
        for number, environment in enumerate(share_devices(jobs), start=1):
            path = worker_log(output, number)
            log = stack.enter_context(path.open("wb"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            processes[path] = stack.enter_context(process)
            progress.write(f"worker {number}: {path}")
        statuses = wait_for(list(processes.values()), progress.tick)
    if STOPPED in statuses:
        progress.write("the workers are stopped; the same command goes on")
        sys.exit(STOPPED)
    for path, status in zip(processes, statuses, strict=True):
        if status not in (0, 1):  # 1: a run failed
            progress.write(f"a worker ended with {describe_status(status)}: {path}", error=True)


def worker_log(output: Path, number: int) -> Path:
    return output / f"worker_{number}.log"


def is_busy(case: Case) -> bool:
    """Returns whether another process trains the run."""
    if not case.directory.exists():
        return False
    with hold_lock(case.directory / "ablate.lock", wait=False) as is_held:
        return not is_held or is_locked(case.directory)


def share_devices(jobs: int) -> list[dict[str, str]]:
    """Returns the environment of each of `jobs` workers: its own GPUs, if there are enough, and its share of CPUs."""
    number = torch.cuda.device_count()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number)))).split(",")[:number]
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs))} | os.environ
    visible = [gpus[job::jobs] or gpus[job % number : job % number + 1] if number else [] for job in range(jobs)]
    return [threads | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}) for own in visible]
