"""Workers: each trains the runs of a sweep one after the other, except runs that another process trains."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ablation.cases import Case
from engine.runtime.locks import hold_lock, is_locked
from engine.runtime.processes import run_to_end, wait_for
from engine.runtime.signals import STOPPED

POLL_SECONDS = 2
"""Interval at which a worker without a run checks whether one has become free."""


def train_all(
    cases: Sequence[Case], failures: Mapping[Path, int | None], wait: bool, after_each: Callable[[], None]
) -> None:
    """Trains the runs that are neither finished nor running elsewhere, and calls `after_each` after each run.

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
            print(f"{name}: {case.directory}", "(finished)" * bool(case.result()), flush=True)
            if case.result():
                continue
            case.directory.mkdir(parents=True, exist_ok=True)
            # A separate lock, because train.py locks the directory some time after it begins.
            with hold_lock(case.directory / "ablate.lock", wait=False) as is_held:
                is_free = is_held and not is_locked(case.directory)
                if is_free and not case.result() and last_failure(case) == failures[case.directory]:
                    is_free = train(case, name)
                    after_each()
            if not is_free:
                elsewhere.append(case)
                print(f"{name} is running elsewhere", flush=True)
        if elsewhere and wait:
            print(f"waiting for {len(elsewhere)} runs elsewhere; with --no-wait this would end", flush=True)
            while all(map(is_busy, elsewhere)):
                time.sleep(POLL_SECONDS)
        todo = elsewhere if wait else []


def train(case: Case, name: str) -> bool:
    """Trains a run to its end; returns False if another process has begun it first."""
    status = run_to_end(case.command)
    if status == STOPPED:
        print(f"{name} is stopped; the same command goes on", flush=True)
        sys.exit(STOPPED)
    if status or not case.result():
        if is_locked(case.directory):
            return False
        failure_mark(case).touch()
        print(f"{name} failed: {shlex.join(case.command)}", file=sys.stderr, flush=True)
    return True


def run_jobs(command: Sequence[str], jobs: int, output: Path) -> None:
    """Runs `command`, which trains runs one after the other, in `jobs` processes that share the devices.

    Raises:
        SystemExit: stopped by a signal, after the runs have saved.
    """
    with ExitStack() as stack:
        processes = {}
        for number, environment in enumerate(share_devices(jobs), start=1):
            path = output / f"worker_{number}.log"
            log = stack.enter_context(path.open("wb"))
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            processes[path] = stack.enter_context(process)
            print(f"worker {number}: {path}", flush=True)
        statuses = wait_for(list(processes.values()))
    if STOPPED in statuses:
        print("the workers are stopped; the same command goes on", flush=True)
        sys.exit(STOPPED)
    for path, status in zip(processes, statuses, strict=True):
        if status not in (0, 1):  # 1: a run failed
            print(f"a worker ended with status {status}: {path}", file=sys.stderr, flush=True)


def is_busy(case: Case) -> bool:
    """Returns whether another process trains the run."""
    if not case.directory.exists():
        return False
    with hold_lock(case.directory / "ablate.lock", wait=False) as is_held:
        return not is_held or is_locked(case.directory)


def failure_mark(case: Case) -> Path:
    """Returns the file that tells other workers that the run failed, so that only the next command tries again."""
    return case.directory / "ablate.failed"


def last_failure(case: Case) -> int | None:
    """Returns the time of the run's failure in nanoseconds of its file system; None if it has not failed."""
    mark = failure_mark(case)
    return mark.stat().st_mtime_ns if mark.exists() else None


def share_devices(jobs: int) -> list[dict[str, str]]:
    """Returns the environment of each of `jobs` workers: its own GPUs, if there are enough, and its share of CPUs."""
    number = torch.cuda.device_count()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number)))).split(",")[:number]
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs))} | os.environ
    visible = [gpus[job::jobs] or gpus[job % number : job % number + 1] if number else [] for job in range(jobs)]
    return [threads | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}) for own in visible]
