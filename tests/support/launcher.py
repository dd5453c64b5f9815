"""Starts train.py over and over in processes that can be killed, and hurts them at chosen points.

Run as a script it is the nursery: it has imported everything once, and forks a process for every line it reads. The
points are calls of functions of the product, found by name: the product knows nothing of them.
"""

import errno
import hashlib
import json
import os
import pickle
import pkgutil
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Fault = tuple[str, int, str]
"""A function, which of its calls, and what happens then: the name of a signal, or a key of `ACTIONS`."""


@dataclass
class Job:
    """The processes of one launch: one, or the ranks of a group."""

    nursery: "Nursery"
    pids: list[int]
    log: Path

    def wait(self, timeout: float = 300) -> list[int]:
        """Exit statuses, by rank; negative: the number of the signal that ended it."""
        return [self.nursery.ask(wait=pid, timeout=timeout) for pid in self.pids]

    def signal(self, name: str, rank: int = 0) -> None:
        os.kill(self.pids[rank], signal.Signals[name])

    @property
    def text(self) -> str:
        return self.log.read_text()

    def said(self, word: str) -> list[list[str]]:
        """What all ranks told under the heading `word`, by rank; see `show_state`."""
        lines = [line for rank in range(len(self.pids)) for line in Path(f"{self.log}.{rank}").read_text().splitlines()]
        return [line.split()[1:] for line in lines if line.startswith(f"{word} ")]


class Nursery:
    """The process that forks, seen from the tests."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **request: Any) -> Any:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(
        self,
        command: Sequence[str],
        log: Path,
        faults: Mapping[int, Sequence[Fault]] | None = None,
        ranks: int = 1,
        script: str = "train",
        **more: Any,
    ) -> Job:
        """Starts the script with `command` in `ranks` processes, of which those named in `faults` meet these.

        `more`: "limit": bytes beyond which no file may grow.
        """
        environment = {}
        if ranks > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                environment = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
        log.write_text("")
        pids = []
        for rank in range(ranks):
            Path(f"{log}.{rank}").write_text("")
            own = environment and environment | {"RANK": rank, "LOCAL_RANK": rank}
            hurt = (faults or {}).get(rank, [])
            request = {"command": list(command), "log": str(log), "rank": rank, "faults": hurt, "environment": own}
            pids.append(self.ask(start=script, **request, **more))
        return Job(self, pids, log)

    def run(self, *args: Any, **kwargs: Any) -> tuple[list[int], Job]:
        """`start`, and the exit statuses."""
        job = self.start(*args, **kwargs)
        return job.wait(), job

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def _kill_within_writing(path: Path, content: bytes) -> None:
    Path(f"{path}.tmp").write_bytes(bytes(content[: len(content) // 2]))
    os.kill(os.getpid(), signal.SIGKILL)


def _no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_memory(*args: Any, **kwargs: Any) -> None:
    import torch

    torch.empty(2**60)


def _fail(*args: Any, **kwargs: Any) -> None:
    raise KeyError("a fault of the test")


FACTS = Path(os.devnull)


def _remove_output(path: Path, content: bytes) -> None:
    shutil.rmtree(path.parent)


ACTIONS: dict[str, Callable] = {
    "half": _kill_within_writing,
    "full": _no_space,
    "raise": _fail,
    "memory": _no_memory,
    "remove": _remove_output,
}


def tell(*words: Any) -> None:
    """Says something to the test, apart from what the run says."""
    with FACTS.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def hurt(target: str, call: int, action: str) -> None:
    """Makes the `call`-th call (from 1) of the function `target` do `action` first; 0: every call."""
    owner, name = pkgutil.resolve_name(target.rpartition(".")[0]), target.rpartition(".")[2]
    real, count = getattr(owner, name), 0

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if call in (0, count):
            tell("hurt", time.monotonic())
            if action in ACTIONS:
                ACTIONS[action](*args, **kwargs)
            else:
                os.kill(os.getpid(), signal.Signals[action])
        return real(*args, **kwargs)

    setattr(owner, name, function)


def show_state() -> None:
    """Prints the place of every training image, and after every update the digest of the random state and memory."""
    import numpy as np
    import torch

    from engine.report import Report
    from engine.sampler import SeededDataset

    end_step, getitem = Report.end_step, SeededDataset.__getitem__

    def function(self: Report) -> None:
        state = pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))  # noqa: NPY002
        tell("random", self.step + 1, hashlib.sha256(state).hexdigest())
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        tell("memory", self.step + 1, resident, len(os.listdir("/proc/self/fd")))
        end_step(self)

    def getitem_and_tell(self: SeededDataset, place: tuple[int, int, int]) -> Any:
        tell("place", *place)
        return getitem(self, place)

    Report.end_step, SeededDataset.__getitem__ = function, getitem_and_tell


def use_few_images(train: int, val: int, patch: Callable = setattr) -> None:
    """Leaves so many digits."""
    from engine.data import DigitsReader

    init = DigitsReader.__init__

    def function(self: DigitsReader, split: str) -> None:
        init(self, split)
        count = {"train": train, "val": val}[split]
        self.images, self.labels = self.images[:count], self.labels[:count]

    patch(DigitsReader, "__init__", function)


def child(request: dict[str, Any]) -> None:
    """One process of a launch; does not return."""
    global FACTS
    FACTS = Path(f"{request['log']}.{request['rank']}")
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update({name: str(value) for name, value in request["environment"].items()})
    sys.argv = [request["start"], *request["command"]]
    if "limit" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    use_few_images(50, 24)
    show_state()
    for fault in request["faults"]:
        hurt(*fault)
    status = 1
    try:
        __import__(request["start"]).main(request["command"])
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int, timeout: float) -> int:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -99


def main() -> None:
    import train
    import validate  # noqa: F401
    from bench.costs import Costs

    train.count_costs = lambda model, attention: Costs(0, 0)  # a third of the time of so short a run
    if len(sys.argv) > 1:  # a rank of torchrun, which is hurt in its first life only
        request = json.loads(sys.argv[1])
        rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        faults = request["faults"].get(rank, []) if life == "0" else []
        child(request | {"rank": rank, "faults": faults, "environment": {}})
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if not pid:
                answers.close()
                child(request)
            print(pid, file=answers, flush=True)
        else:
            print(wait(request["wait"], request["timeout"]), file=answers, flush=True)


if __name__ == "__main__":
    main()
