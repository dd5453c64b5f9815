"""Starts train.py many times, in processes that can be killed, and injects faults.

Run as a script this is the fork server: it imports everything once, and forks a process for every request it reads. A
fault strikes at a call of a function, found by name, so that the code under test contains nothing for it.
"""

import ctypes
import errno
import gc
import hashlib
import importlib
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
"""A function, the number of the call, and the action at that call: the name of a signal, or a key of `ACTIONS`."""


@dataclass
class Job:
    """The processes of one launch: one, or the ranks of a group."""

    server: "ForkServer"
    pids: list[int]
    log: Path

    def wait(self, timeout: float = 300) -> list[int]:
        """Waits for exit statuses, by rank; a negative status is the number of the signal that ended the process."""
        return [self.server.ask(wait=pid, timeout=timeout) for pid in self.pids]

    def signal(self, name: str, rank: int = 0) -> None:
        os.kill(self.pids[rank], signal.Signals[name])

    @property
    def text(self) -> str:
        return self.log.read_text()

    def recorded(self, kind: str) -> list[list[str]]:
        """The words of all records of a kind, rank after rank; see `record`."""
        lines = [line for rank in range(len(self.pids)) for line in Path(f"{self.log}.{rank}").read_text().splitlines()]
        return [line.split()[1:] for line in lines if line.startswith(f"{kind} ")]


class ForkServer:
    """The tests' connection to the fork server."""

    def __init__(self) -> None:
        # Without dynamo: kron, an optimiser, would compile itself for minutes.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **request: Any) -> Any:
        """Sends a request and returns its answer."""
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
        """Starts the function `main` of the module `script` with the arguments `command` in `ranks` processes.

        Args:
            faults: rank -> its faults. more: "limit": the largest file in bytes.
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
            request = {
                "command": list(command),
                "log": str(log),
                "rank": rank,
                "faults": (faults or {}).get(rank, []),
                "environment": environment and environment | {"RANK": rank, "LOCAL_RANK": rank},
            }
            pids.append(self.ask(start=script, **request, **more))
        return Job(self, pids, log)

    def run(self, *args: Any, **kwargs: Any) -> tuple[list[int], Job]:
        """Calls `start` and waits; returns the exit statuses and the job."""
        job = self.start(*args, **kwargs)
        return job.wait(), job

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def _kill_within_writing(path: Path, content: bytes) -> None:
    Path(f"{path}.tmp").write_bytes(bytes(content[: len(content) // 2]))
    os.kill(os.getpid(), signal.SIGKILL)


def _bad_sector(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_memory(*args: Any, **kwargs: Any) -> None:
    import torch

    torch.empty(2**60)


def _fail(*args: Any, **kwargs: Any) -> None:
    raise KeyError("a fault of the test")


def _kill_workers(*args: Any, **kwargs: Any) -> None:
    import multiprocessing

    for worker in multiprocessing.active_children():
        worker.kill()


def _hang(*args: Any, **kwargs: Any) -> None:
    time.sleep(60)


def _remove_output(path: Path, content: bytes) -> None:
    shutil.rmtree(path.parent)


LEAKED: list[Any] = []


def _leak_tensor(*args: Any, **kwargs: Any) -> None:
    import torch

    LEAKED.append(torch.zeros(256))


def _leak_objects(*args: Any, **kwargs: Any) -> None:
    LEAKED.extend([object() for _ in range(64)])


def _hold(*args: Any, **kwargs: Any) -> None:
    """Takes time for as long as the test has a file "hold" beside the records."""
    if (RECORDS.parent / "hold").exists():
        time.sleep(0.3)


def _sleep(*args: Any, **kwargs: Any) -> None:
    time.sleep(1)


ACTIONS: dict[str, Callable] = {
    "slow": _sleep,
    "hold": _hold,
    "half": _kill_within_writing,
    "full": no_space,
    "bad sector": _bad_sector,
    "raise": _fail,
    "memory": _no_memory,
    "remove": _remove_output,
    "workers": _kill_workers,
    "hang": _hang,
    "leak tensor": _leak_tensor,
    "leak objects": _leak_objects,
}

RECORDS = Path(os.devnull)
"""File to which this process writes records for the test, separate from the log of the run."""


def record(*words: Any) -> None:
    """Writes a record for the test; the first word is its kind."""
    with RECORDS.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def inject(target: str, call: int, action: str) -> None:
    """Makes the `call`-th call (from 1; 0: every call) of the function `target` do `action` first."""
    owner, name = pkgutil.resolve_name(target.rpartition(".")[0]), target.rpartition(".")[2]
    real, count = getattr(owner, name), 0

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if call in (0, count):
            record("fault", time.monotonic())
            if action in ACTIONS:
                ACTIONS[action](*args, **kwargs)
            else:
                os.kill(os.getpid(), signal.Signals[action])
        return real(*args, **kwargs)

    setattr(owner, name, function)


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def count_allocations() -> tuple[int, int]:
    """Returns the bytes that malloc has given out and nobody has freed, and the blocks of Python's own allocator.

    Unlike resident memory, neither depends on what an allocator keeps for later, on other processes or on the kernel.
    """
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


def record_state() -> None:
    """Records every training image's position, a digest of the random state after every update, and memory after 60."""
    import numpy as np
    import torch

    from engine.data.sampler import SeededDataset
    from engine.reporting.recorder import SilentRecorder

    end_step, getitem = SilentRecorder.end_step, SeededDataset.__getitem__

    def function(self: SilentRecorder) -> None:
        state = pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))  # noqa: NPY002
        record("random", self.step + 1, hashlib.sha256(state).hexdigest())
        record("ranks", self.step + 1, self.speed.world.size, time.monotonic())
        if (self.step + 1) % 60 == 0:
            record("memory", self.step + 1, *count_allocations(), len(os.listdir("/proc/self/fd")))
        end_step(self)

    def getitem_and_record(self: SeededDataset, place: tuple[int, int, int]) -> Any:
        record("place", *place)
        return getitem(self, place)

    SilentRecorder.end_step, SeededDataset.__getitem__ = function, getitem_and_record


def use_few_images(train: int, val: int, patch: Callable = setattr) -> None:
    """Shortens the digits to `train` and `val` images."""
    from engine.data.arrays import DigitsReader

    init = DigitsReader.__init__

    def function(self: DigitsReader, split: str) -> None:
        init(self, split)
        count = {"train": train, "val": val}[split]
        self.images, self.labels = self.images[:count], self.labels[:count]

    patch(DigitsReader, "__init__", function)


def run_child(request: dict[str, Any]) -> None:
    """Runs the script in this process, one of a job, and ends it."""
    global RECORDS
    RECORDS = Path(f"{request['log']}.{request['rank']}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MB
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update({name: str(value) for name, value in request["environment"].items()})
    sys.argv = [request["start"], *request["command"]]
    if "limit" in request:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    use_few_images(50, 24)
    record("start")
    record_state()
    gc.freeze()  # a collection need not look at what all runs import
    for fault in request["faults"]:
        inject(*fault)
    status = 1
    try:
        importlib.import_module(request["start"]).main(request["command"])
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        record("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before)
        os._exit(status)


def wait(pid: int, timeout: float) -> int:
    """The exit status of a process; -99 if it was killed because it did not end in time."""
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background tests would ignore it
    import train
    import validate  # noqa: F401
    from models.costs import Costs

    train.count_costs = lambda model, attention: Costs(0, 0)  # a third of the time of so short a run
    if len(sys.argv) > 1:  # a rank of torchrun; faults strike before a restart only, unless "always"
        request = json.loads(sys.argv[1])
        rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        faults = request["faults"].get(rank, []) if restarts == "0" else []
        faults += request.get("always", [])
        run_child(request | {"rank": rank, "faults": faults, "environment": {}})
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if not pid:
                answers.close()
                run_child(request)
            print(pid, file=answers, flush=True)
        else:
            print(wait(request["wait"], request["timeout"]), file=answers, flush=True)


if __name__ == "__main__":
    main()
