"""Measures on a GPU, in minutes, what train.py gives beside timm's models: python -m bench.gpu_run --output DIRECTORY

Processes of a wave build one task each at the same time: they compile, capture and warm up, which takes far longer than
times. Then they measure alone, one after the other, and the next wave begins. Only times of the same process are taken
in turns; timm's models are timed before and after the others of their wave. A task that fails, hangs or ends its
process loses only its own rows.
"""

import itertools
import multiprocessing
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from bench import gpu_tasks
from engine.runtime.arguments import ArgumentParser, Count
from engine.runtime.errors import refuse_bad_input
from engine.runtime.files import dicts_to_csv, write_file
from engine.runtime.ownership import make_output

WAVES = (
    "tiny8/timm tiny8/eva tiny8/softmax tiny8/lara tiny8/performer tiny8/local",
    "small16/timm small16/eva tiny4/timm tiny4/eva",
    "pvtv2_b1/timm pvtv2_b1/eva small16/softmax tiny4/softmax",
    "tiny4/lara tiny4/performer tiny4/local pvtv2_b1/softmax tiny16/timm tiny16/eva tiny16/softmax",
    "pvtv2_b1/lara pvtv2_b1/performer pvtv2_b1/local small16/lara small16/performer small16/local",
    "small8/timm small8/eva small8/softmax tiny16/lara tiny16/performer tiny16/local",
)
"""Tasks of `bench.gpu_tasks`, the most valuable first. Those of a wave fit into 80 GB together."""
BUILD, TURN = 95, 15
"""Most seconds of a wave's building, and of a process's turn to measure; ten times as many for a trial."""


class Process:
    """A process of a task, which has turns."""

    def __init__(self, task: str, output: Path, smoke: bool):
        context = multiprocessing.get_context("fork")  # the imports are there; this process never touches the GPU
        self.connection, end = context.Pipe()
        self.task, self.turn, self.began = task, TURN * (10 if smoke else 1), time.monotonic()
        self.process = context.Process(target=gpu_tasks.main, args=(task, output, smoke, end))
        self.process.start()
        end.close()

    def say(self, what: str) -> None:
        print(f"{self.task}: {what} after {time.monotonic() - self.began:.0f} s", flush=True)

    def is_ready(self) -> bool:
        """Returns whether the process waits for a turn; otherwise it has ended."""
        try:
            self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.say("ended")
            return False
        return True

    def measure(self) -> bool:
        """Gives the process a turn, and returns whether it waits for another."""
        with suppress(BrokenPipeError):  # its end is read below
            self.connection.send("go")
        if self.connection.poll(self.turn):
            return self.is_ready()
        self.end()
        return False

    def end(self) -> None:
        if self.process.is_alive():
            self.say("was ended")
            self.process.kill()
        self.process.join()


def run_wave(tasks: Sequence[str], output: Path, smoke: bool, end: float) -> None:
    """Builds tasks together, and lets them measure one after the other, twice where they want to."""
    processes = [Process(task, output, smoke) for task in tasks]
    try:
        building, ready = {each.connection: each for each in processes}, []
        end = min(time.monotonic() + BUILD * (10 if smoke else 1), end - 2.0 * len(tasks))  # 2 s for the turns of each
        while building and (left := end - time.monotonic()) > 0:
            for connection in wait([*building], left):
                process: Any = building.pop(connection)
                if process.is_ready():
                    process.say("built")
                    ready.append(process)
        for process in building.values():
            process.end()
        ready.sort(key=processes.index)
        while ready:
            ready = [process for process in ready if process.measure()]
    finally:
        for process in processes:
            process.end()


def main(arguments: Sequence[str] | None = None) -> None:
    began = time.monotonic()
    parser = ArgumentParser(prog="python -m bench.gpu_run", description=__doc__.partition(":")[0])
    parser.add_argument("--output", type=Path, required=True, help=f"directory for {gpu_tasks.FILE}")
    parser.add_argument("--tasks", nargs="+", metavar="MODEL/NETWORK", help="instead of all, in one wave")
    parser.add_argument("--seconds", type=Count(), default=900, help="time for everything; default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too (TRITON_INTERPRET=1)")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        make_output(args.output, [gpu_tasks.FILE])
        write_file(args.output / gpu_tasks.FILE, dicts_to_csv([], gpu_tasks.COLUMNS))
    waves = [args.tasks] if args.tasks else [wave.split() for wave in WAVES]
    for number, wave in enumerate(waves, 1):
        if (left := began + args.seconds - time.monotonic()) < (1 if args.smoke else 40):
            print(f"no time for {len([*itertools.chain.from_iterable(waves[number - 1 :])])} tasks")
            break
        print(f"wave {number}: {left:.0f} s are left", flush=True)
        run_wave(wave, args.output, args.smoke, began + args.seconds)
    print(f"finished after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
