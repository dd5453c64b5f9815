"""Runs whose number of ranks changes: the images of an epoch, and nodes that go and come back.

Row P2 of the stress suite: three launchers on this machine, each a node of one rank.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from engine.checkpoints.files import find_checkpoint
from engine.data.sampler import EpochSampler
from engine.runtime.distributed import World
from tests.engine.test_faults import ENVIRONMENT, is_alive, session_of, wait_for
from tests.engine.test_resume import RUN, records
from tests.support.launcher import ROOT, ForkServer, Job


def test_any_sequence_of_ranks_reads_every_image_once():
    """The ranks change at random updates of an epoch of 100 images and total batches of 12."""
    rng = np.random.default_rng(0)
    for epoch in range(20):
        start, seen, undisturbed = 0, [], EpochSampler(100, 12, World(torch.device("cpu")), seed=1)
        undisturbed.set_epoch(epoch)
        while start < 96:
            ranks, updates = int(rng.choice([1, 2, 3, 4, 6, 12])), int(rng.integers(1, 4))
            batches = []
            for rank in range(ranks):
                sampler = EpochSampler(100, 12, World(torch.device("cpu"), rank, ranks), seed=1)
                sampler.set_epoch(epoch, start)
                batches.append(list(sampler)[: updates * 12 // ranks])
            seen += sorted((place for batch in batches for place in batch), key=lambda place: place[2])
            start = min(96, start + 12 * updates)
        assert seen == list(undisturbed)
        assert len({index for index, _, _ in seen}) == 96


ELASTIC = ["--allow-change", "processes", "train.total_batch_size=12", "augment.mixup=0", "augment.cutmix=0"]
"""Four updates an epoch, of the 50 digits that the launcher leaves."""


def images_of_epochs(log: Path, num_ranks: int) -> tuple[dict[int, Counter], dict[int, int]]:
    """Returns, for every epoch, how often the updates that stand have read each image, and the ranks of each update.

    An update that was made again, after a kill, stands as it was made last: by as many ranks as there then were.
    """
    updates: list[dict[int, tuple[int, list[tuple[int, int]]]]] = []
    for rank in range(num_ranks):
        made, places = {}, []
        for line in Path(f"{log}.{rank}").read_text().splitlines():
            kind, *words = line.split()
            if kind == "start":
                places = []
            elif kind == "place":
                places.append((int(words[1]), int(words[0])))
            elif kind == "ranks":
                made[int(words[0])], places = (int(words[1]), places), []
        updates.append(made)
    epochs: dict[int, Counter] = {}
    ranks = {step: size for step, (size, _) in updates[0].items()}
    for step, size in ranks.items():
        for made in updates[:size]:
            assert made[step][0] == size
            for epoch, index in made[step][1]:
                epochs.setdefault(epoch, Counter())[index] += 1
    return epochs, ranks


@pytest.mark.quick
def test_fewer_and_more_ranks_go_on_by_themselves(fork_server: ForkServer, tmp_path: Path):
    """Two ranks are killed in their sixth update, one goes on for two updates, and three train to the end."""
    config, output, log = tmp_path / "run.yaml", tmp_path / "run", tmp_path / "log"
    config.write_text(yaml.safe_dump(RUN))
    command = [str(config), *ELASTIC, "--output", str(output)]
    kill = ("engine.training.exchange.UpdateExchange.accepts", 6, "SIGKILL")
    launches = [(2, [kill], None), (1, [("train.nn.utils.clip_grad_norm_", 1, "SIGTERM")], [75]), (3, [], [0] * 3)]
    for number, (ranks, faults, expected) in enumerate(launches):
        own = tmp_path / f"log{number}"
        statuses, job = fork_server.run(command, own, dict.fromkeys(range(ranks), faults), ranks)
        assert expected in (statuses, None), job.text
        for rank in range(3):
            text = Path(f"{own}.{rank}").read_text() if rank < ranks else ""
            with Path(f"{log}.{rank}").open("a") as file:
                file.write(text)
    epochs, ranks = images_of_epochs(log, 3)
    assert [ranks[step] for step in range(1, 9)] == [2, 2, 2, 2, 1, 1, 3, 3]
    assert [sorted(counts.values()) for counts in epochs.values()] == [[1] * 48] * 2
    changed = [
        (line["option"], line["before"], line["now"], line["step"])
        for line in records(output)[:99]
        if line["kind"] == "change"
    ]
    assert changed == [("processes", 2, 1, 4), ("processes", 1, 3, 6)]
    statuses, job = fork_server.run([*command, "optim.lr=1.0"], tmp_path / "refused")  # alone, after three
    assert statuses == [2]
    assert "\n  optim.lr: " in job.text


# Nodes


@contextmanager
def nodes(directory: Path, *options: str) -> Iterator[tuple[Callable[[], subprocess.Popen], Job]]:
    """A function that starts a launcher, a node of one rank of up to four, and the job of all."""
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    log, started = directory / "log", []
    for name in ("log", "log.0", "log.1", "log.2", "log.3", "hold"):
        (directory / name).write_text("")
    command = [str(directory / "run.yaml"), *ELASTIC, *options, "--output", str(directory / "run")]
    slow = ("engine.training.exchange.UpdateExchange.accepts", 0, "hold")
    request = {"start": "train", "command": command, "log": str(log), "faults": {}, "always": [slow]}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc_per_node=1", "--max-restarts=9"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={place}", "--local-addr=127.0.0.1", "--monitor-interval=0.3"]
    waits = "--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"

    def start() -> subprocess.Popen:
        with (directory / f"node{len(started)}.log").open("w") as file:
            process = subprocess.Popen(
                [*launcher, *meeting, waits, str(ROOT / "tests/support/launcher.py"), json.dumps(request)],
                cwd=ROOT, stdout=file, stderr=file, env=os.environ | ENVIRONMENT,
            )  # fmt: skip
        started.append(process)
        return process

    try:
        yield start, Job(None, [0, 0, 0, 0], log)
    finally:
        for process in started:
            process.kill()
            process.wait()
        for pid in session_of(str(directory)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill_node(launcher: subprocess.Popen, with_ranks: bool) -> None:
    """Kills a launcher, and with it its rank, as a node does that loses power."""
    children = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.exists() and int(path.read_text().rpartition(")")[2].split()[1]) == launcher.pid
    ]
    launcher.kill()
    for pid in children if with_ranks else []:
        os.kill(pid, signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: not any(is_alive(pid) for pid in children) or not with_ranks)


@pytest.mark.stress
@pytest.mark.parametrize("with_ranks", [True, False], ids=["power", "launcher"])
def test_a_node_goes_and_comes_back(with_ranks: bool, tmp_path: Path, figure: Callable):
    """The node's rank dies with its launcher, or outlives it: then it stops the run, which is saved."""
    options = ["schedule.epochs=100", "train.eval_every=1000", "train.checkpoint_steps=4", "train.timeout_minutes=0.5"]
    with nodes(tmp_path, *options) as (start, job):

        def is_trained_by(size: int, more: int = 6) -> Callable[[], bool]:
            def count() -> int:
                return sum(words[1] == str(size) for words in job.recorded("ranks"))

            before = count()
            return lambda: count() - before >= more * size

        first = start()  # its launcher holds the store where nodes meet
        second, third, fourth = start(), start(), start()
        wait_for(is_trained_by(4), 120)
        kill_node(fourth, with_ranks)
        lost = wait_for(is_trained_by(3), 120)
        fifth = start()
        back = wait_for(is_trained_by(4), 120)
        (tmp_path / "hold").unlink()
        assert [process.wait(240) for process in (first, second, third, fifth)] == [0] * 4, job.text
    epochs, ranks = images_of_epochs(tmp_path / "log", 4)
    assert sorted(ranks) == list(range(1, 401))
    assert len(epochs) == 100
    assert all(sorted(counts.values()) == [1] * 48 for counts in epochs.values())
    sizes = [size for step, size in sorted(ranks.items()) if step == 1 or ranks[step - 1] != size]
    assert sizes == [4, 3, 4]
    starts = [line for line in job.text.splitlines() if line.startswith("start ")]
    changes = [step for step in range(2, 401) if ranks[step - 1] != ranks[step]]
    assert f"step {changes[0] - 1}/400" in starts[1]
    assert f"step {changes[1] - 1}/400" in starts[-1]
    assert find_checkpoint(tmp_path / "run", "last")[1]["progress"]["step"] == 400
    figure("P2", f"a node lost, {lost:.0f} s until three train, {back:.0f} s until four; every image once an epoch")
