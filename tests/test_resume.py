"""Nothing is lost: killed, stopped and repeated, a run ends in the same bits as one that was left alone.

The rows R1 to R5, S1, G1 and M1 of the battery; all that is random is on.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml

from engine.checkpoint import find
from launcher import Fault, Job, Nursery

RUN = {
    "model": {
        "name": "deit",
        "img_size": 28,
        "patch_size": 4,
        "stem": "conv",
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 3,
        "num_classes": 10,
        "drop_path_rate": 0.2,
    },
    "attention": {"name": "eva", "window_size": 3, "num_landmarks": 4},
    "data": {"dataset": "digits", "workers": 0},
    "optim": {"lr": 0.002, "lr_base_size": 8},
    "schedule": {"epochs": 2, "warmup_epochs": 1},
    "train": {
        "total_batch_size": 8,
        "device": "cpu",
        "amp": None,
        "ema_decay": 0.9,
        "keep_checkpoints": 2,
        "checkpoint_steps": 2,
        "log_every": 4,
    },
}
"""Two epochs of six updates, on the 50 digits to which the launcher keeps."""

LARA = "attention={name: lara, num_landmarks: 4}"

STEPS = 12

WITHIN_STEP = [
    "train.seed_everything",
    "train.nn.utils.clip_grad_norm_",
    "engine.finite.FiniteGuard.see_loss",
    "train.ModelEmaV3.update",
    "engine.report.Report.end_step",
]
"""Functions called once an update."""

KILLS: dict[str, list[tuple[str, int, str]]] = {
    "step": [(target, STEPS, "SIGKILL") for target in WITHIN_STEP],
    "write": [("os.replace", 16, "SIGKILL"), ("os.fsync", 32, "SIGKILL"), ("engine.files.write_whole", 16, "half")],
    "evaluation": [("engine.evaluate.autocast", 12, "SIGKILL")],
}
"""Where a run is killed: function, how often an undisturbed run calls it at least, what happens."""


def digest(value, hasher=None) -> str:
    """SHA-256 of a checkpoint: every tensor, number and string in it, with its key."""
    hasher = hasher or hashlib.sha256()
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            hasher.update(str(key).encode())
            digest(value[key], hasher)
    elif isinstance(value, list | tuple):
        for item in value:
            digest(item, hasher)
    else:
        hasher.update(repr(value).encode())
    return hasher.hexdigest()


def records(directory: Path) -> list[dict]:
    """What `metrics.jsonl` says of the training, but for times and memory."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    measured = {"images_per_second", "step_seconds", "memory_mb"}
    return [{k: v for k, v in line.items() if k not in measured} for line in lines if line["kind"] != "start"]


def outcome(job: Job, directory: Path) -> dict[str, str | list]:
    """All that two runs must share: every part of the last checkpoint, random state, records."""
    _, last = find(directory, "last")
    parts = {name: digest(part) for name, part in last.items() if name != "config"}
    assert {"model", "ema", "optimizer", "scaler", "progress"} <= parts.keys()
    return parts | {"random": job.random_state, "records": records(directory)}


class Runs:
    """Runs of RUN with the same overrides, and what the undisturbed one comes to."""

    def __init__(self, nursery: Nursery, directory: Path, overrides: Sequence[str] = (), ranks: int = 1):
        self.nursery, self.directory, self.ranks, self.count = nursery, directory, ranks, 0
        directory.mkdir(exist_ok=True)
        config = directory / "run.yaml"
        config.write_text(yaml.safe_dump(RUN))
        self.command = [str(config), *overrides]
        statuses, job, output = self.launch()
        assert statuses == [0] * ranks, job.text
        self.expected = outcome(job, output)

    def launch(self, *faults: Fault, output: Path | None = None, rank: int = 0, more: Sequence[str] = ()):
        """Statuses, job and directory of a launch: in a new directory unless one is given."""
        self.count += 1
        output = output or self.directory / f"run{self.count}"
        command = [*self.command, *more, "--output", str(output)]
        log = self.directory / f"{self.count}.log"
        return *self.nursery.run(command, log, {rank: faults}, self.ranks), output

    def survives(self, *faults: Fault, rank: int = 0) -> list[int]:
        """Exit statuses of a launch with faults, after which the same command ends as if there had been none."""
        statuses, job, output = self.launch(*faults, rank=rank)
        if statuses != [0] * self.ranks:
            again, job, _ = self.launch(output=output)
            assert again == [0] * self.ranks, job.text
        assert outcome(job, output) == self.expected, faults
        return statuses


@pytest.fixture(scope="module")
def runs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(nursery, tmp_path_factory.mktemp("runs"))


def light_and_full(light: int, full: int):
    return pytest.mark.parametrize("amount", [light, pytest.param(full, marks=pytest.mark.battery)])


def choose_kill(rng: random.Random, place: str) -> Fault:
    target, calls, action = rng.choice(KILLS[place])
    return target, rng.randint(1, calls), action


@light_and_full(3, 20)
@pytest.mark.parametrize("place", KILLS)
def test_a_killed_run_ends_in_the_same_bits(place: str, amount: int, runs: Runs, figure: Callable):
    rng = random.Random(place)
    for _ in range(amount):
        assert runs.survives(choose_kill(rng, place)) == [-9]
    figure("R1", f"{amount}/{amount} runs killed in {place} end in the same SHA-256")


@light_and_full(2, 10)
def test_log_steps_increase_through_many_kills(amount: int, runs: Runs, figure: Callable):
    rng, output, more = random.Random(2), None, [f"schedule.epochs={amount}"]
    for _ in range(amount):
        fault = ("engine.finite.FiniteGuard.see_loss", rng.randint(2, 5), "SIGKILL")
        statuses, _, output = runs.launch(fault, output=output, more=more)
        assert statuses == [-9]
    assert runs.launch(output=output, more=more)[0] == [0]
    steps = [record["step"] for record in records(output) if record["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6 * amount
    figure("R2", f"{amount} kills in one run: {len(steps)} log steps strictly increase")


def test_digest_sees_a_single_bit():
    assert digest({"a": [torch.zeros(3)]}) != digest({"a": [torch.tensor([0.0, 0.0, 1e-45])]})
