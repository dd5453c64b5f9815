"""Measures on a GPU what train.py gives, in minutes and in order of value: python -m bench.gpu_run --output DIRECTORY

First several processes fill the caches of the compilers and check the kernels. Then one process times. A task that
fails, hangs or kills its process loses only its own rows.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu_tasks import COLUMNS, MODELS, NETWORKS, STEPS, tasks
from engine.runtime.arguments import ArgumentParser, Count
from engine.runtime.errors import refuse_bad_input
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.ownership import make_output

WARM_SHARE = 0.45
"""Largest share of the time for the processes that compile."""
LIMITS = {"warm": 150, "time": 75}
"""Most seconds of a task."""


def work(waiting: queue.Queue[str], arguments: Sequence[str], environment: dict[str, str], limit: int, end: float):
    """Hands tasks to a worker until none is left or the time is over; a worker that ends or hangs has a successor."""
    while waiting.qsize() and time.monotonic() < end:
        command = [sys.executable, "-m", "bench.gpu_tasks", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **pipes, text=True, env=os.environ | environment) as worker:
            serve(worker, waiting, limit, end)


def serve(worker: subprocess.Popen, waiting: queue.Queue[str], limit: int, end: float) -> None:
    """Hands tasks to one worker."""
    while time.monotonic() < end:
        try:
            task = waiting.get_nowait()
        except queue.Empty:
            return
        timer = threading.Timer(min(limit, end - time.monotonic()), worker.kill)
        timer.start()
        try:
            print(task, file=worker.stdin, flush=True)
            for line in worker.stdout:
                print(line, end="", flush=True)
                if line.startswith("done "):
                    break
            else:
                raise BrokenPipeError
        except BrokenPipeError:
            print(f"{task}: its process ended, perhaps at the limit of {limit} s", flush=True)
            return
        finally:
            timer.cancel()


def main(arguments: Sequence[str] | None = None) -> None:
    began = time.monotonic()
    parser = ArgumentParser(prog="python -m bench.gpu_run", description=__doc__.partition(":")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help=f"directory for {', '.join(COLUMNS)}")
    add("--steps", nargs="+", choices=STEPS, default=STEPS, help="default: all")
    add("--models", nargs="+", choices=MODELS, default=[*MODELS], help="models to train; default: all")
    networks = "their attention, and timm's models; default: all"
    add("--networks", nargs="+", choices=NETWORKS, default=NETWORKS, help=networks)
    add("--seconds", type=Count(), default=420, help="time for everything; default: %(default)s")
    add("--processes", type=Count(), default=12, help="processes that compile; default: %(default)s")
    add("--smoke", action="store_true", help="tiny sizes, on the CPU too: tries every step, and measures nothing")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        if not args.smoke and not torch.cuda.is_available():
            sys.exit("no CUDA device; --smoke tries the steps on a CPU")
        make_output(args.output, [*COLUMNS])
        for file, columns in COLUMNS.items():
            write_file(args.output / file, dicts_to_csv([], columns))
    threads = str(max(1, 2 * (os.cpu_count() or 1) // args.processes))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if args.smoke:
        environment["TRITON_INTERPRET"] = "1"
    for phase, processes, share in ("warm", args.processes, WARM_SHARE), ("time", 1, 1):
        waiting: queue.Queue[str] = queue.Queue()
        for task in tasks(phase, args.steps, args.models, args.networks):
            waiting.put(task)
        options = [str(args.output), phase, *(["smoke"] if args.smoke else [])]
        given = waiting, options, environment, LIMITS[phase], began + share * args.seconds
        threads_of_phase = [threading.Thread(target=work, args=given) for _ in range(processes)]
        for thread in threads_of_phase:
            thread.start()
        for thread in threads_of_phase:
            thread.join()
        print(f"{phase}: finished after {time.monotonic() - began:.0f} s, {waiting.qsize()} tasks left", flush=True)


if __name__ == "__main__":
    main()
