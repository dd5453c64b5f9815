"""What happens to a run that meets signals, dead ranks, full disks, spoilt numbers and a second launch.

The rows S2, D1, P1, N1 and X1 of the battery.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from test_resume import RUN, STEPS, Runs, light_and_full, outcome

import train
from engine.checkpoint import find, list_checkpoints, load
from engine.interrupt import StopWish
from launcher import ROOT, Fault, Job, Nursery, use_few_images


@pytest.fixture(scope="module")
def runs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(nursery, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pairs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of two ranks."""
    return Runs(nursery, tmp_path_factory.mktemp("pairs"), ranks=2)


# Signals


@pytest.mark.parametrize(("signals", "status"), [(["SIGINT"], 75), (["SIGINT"] * 2, 1), (["SIGUSR1"], 75)])
def test_signals(signals: list[str], status: int, runs: Runs):
    """After the ranks' exchange a signal waits for the next. A second SIGINT waits for nothing and saves nothing."""
    statuses, job, output = runs.launch(*[("train.nn.utils.clip_grad_norm_", 4, name) for name in signals])
    assert statuses == [status], job.text
    assert find(output, "last")[1]["progress"]["step"] == (5 if status == 75 else 2)
    statuses, job, _ = runs.launch(output=output)
    assert statuses == [0]
    assert outcome(job, output) == runs.expected


def test_a_rank_notices_that_its_parent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    parent = os.getpid()
    with StopWish() as stop:
        assert not stop
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop
    monkeypatch.delenv("WORLD_SIZE")
    with StopWish() as stop:
        monkeypatch.setattr(os, "getppid", lambda: parent)
        assert not stop  # without a launcher: a shell may go away


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> float:
    """Waits until `condition` is true; how long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds
        time.sleep(0.05)
    return time.monotonic() - begin


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def session_of(text: str) -> set[int]:
    """Processes whose command line contains `text`."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text.encode() in path.read_bytes() and is_alive(int(path.parent.name)):
                found.add(int(path.parent.name))
    return found


def torchrun(directory: Path, faults: dict[int, list[Fault]], *flags: str, options: Sequence[str] = ()):
    """torchrun of two ranks of RUN in the directory, and the facts they tell."""
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    command = [str(directory / "run.yaml"), "--output", str(directory / "run"), *options]
    for name in ("log", "log.0", "log.1"):
        (directory / name).write_text("")
    request = {"start": "train", "command": command, "log": str(directory / "log"), "faults": faults}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *flags]
    with (directory / "torchrun.log").open("w") as log:
        process = subprocess.Popen(
            [*launcher, str(ROOT / "tests" / "launcher.py"), json.dumps(request)],
            cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    return process, Job(None, [0, 0], directory / "log")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("SIGUSR1", ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]),
        pytest.param("SIGUSR1", [], marks=pytest.mark.battery),  # torchrun dies of it, and leaves its ranks behind
        pytest.param("SIGTERM", [], marks=pytest.mark.battery),
        pytest.param("SIGINT", [], marks=pytest.mark.battery),
        pytest.param("SIGINT SIGINT", [], marks=pytest.mark.battery),
        pytest.param("SIGKILL", [], marks=pytest.mark.battery),
    ],
)
def test_signals_through_torchrun(name: str, flags: list[str], pairs: Runs, tmp_path: Path, figure: Callable):
    """No process is left, and nothing is lost."""
    process, job = torchrun(tmp_path, {}, *flags, options=["data.workers=1", "schedule.epochs=200"])
    wait_for(lambda: len(job.said("random")) > 8, 120)
    for one in name.split():
        process.send_signal(signal.Signals[one])
        time.sleep(0.2)
    process.wait(60)
    seconds = wait_for(lambda: not session_of(str(tmp_path)), 30)
    step = find(tmp_path / "run", "last")[1]["progress"]["step"]
    done = max(int(words[0]) for words in job.said("random"))
    assert done - step <= (1 if " " not in name else 2)
    how = f"{name}, {'with' if flags else 'without'} the flag"
    figure("S2", f"{how}: no process {seconds:.0f} s after torchrun, {done - step} steps lost")


# Ranks


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("SIGKILL", "error: rank 0: no answer from another rank"),
        ("raise", "error: rank 0: no answer from another rank"),
        ("SIGSTOP", "error: rank 0: no answer from rank 1 "),
    ],
)
def test_a_lost_rank_ends_the_job(action: str, message: str, pairs: Runs, nursery: Nursery, tmp_path: Path):
    command = [*pairs.command, "--output", str(tmp_path / "run")]
    fault = {1: [("engine.finite.FiniteGuard.see_loss", 4, action)]}
    job = nursery.start([*command, "train.timeout_minutes=0.05"], tmp_path / "log", fault, 2)
    assert nursery.ask(wait=job.pids[0], timeout=60) == 1
    assert message in job.text
    if action == "SIGSTOP":
        job.signal("SIGKILL", 1)
    nursery.ask(wait=job.pids[1], timeout=60)
    statuses, job = nursery.run(command, tmp_path / "log", ranks=2)
    assert statuses == [0, 0], job.text
    assert outcome(job, tmp_path / "run") == pairs.expected


@pytest.mark.battery
@pytest.mark.parametrize("action", ["SIGKILL", "raise", "SIGSTOP"])
def test_torchrun_restarts_a_lost_rank(action: str, pairs: Runs, tmp_path: Path, figure: Callable):
    fault = {1: [("engine.finite.FiniteGuard.see_loss", 4, action)]}
    process, job = torchrun(tmp_path, fault, "--max-restarts=1", options=["train.timeout_minutes=0.1"])
    assert process.wait(240) == 0, job.text
    assert outcome(job, tmp_path / "run") == pairs.expected
    named = (
        "no answer from rank 1" in job.text
        if action == "SIGSTOP"
        else "local_rank: 1" in ((tmp_path / "torchrun.log").read_text())
    )
    assert named
    figure("P1", f"rank 1 {action}: named, restarted by torchrun, same bits")


# Disks


DISKS = {
    "checkpoint": {"faults": [("engine.files.write_whole", 6, "full")]},
    "checkpoint, by the system": {"limit": 100_000},
    "events, by the system": {"limit": 20_000},
    "log, by the system": {"limit": 400},
    "log": {"faults": [("engine.report.json.dumps", 3, "full")]},
    "directory removed": {"faults": [("engine.files.write_whole", 6, "remove")]},
}


@pytest.mark.parametrize("case", DISKS)
def test_a_disk_that_fails(case: str, runs: Runs, nursery: Nursery, tmp_path: Path, figure: Callable):
    """One line says what failed; what was saved before stands, nothing unfinished is left, and the run goes on."""
    more = dict(DISKS[case])
    command, output = [*runs.command, "--output", str(tmp_path / "run")], tmp_path / "run"
    statuses, job = nursery.run(command, tmp_path / "log", {0: more.pop("faults", [])}, **more)
    assert statuses == [1], job.text
    errors = [line for line in job.text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "the last checkpoint stands" in errors[0]
    assert any(reason in errors[0] for reason in ("No space left", "File too large", "No such file"))
    assert not list(tmp_path.rglob("*.tmp"))
    if "removed" not in case and "system" not in case:
        assert find(output, "last", quiet=True)[1]["progress"]["step"] == 4
    statuses, job = nursery.run(command, tmp_path / "log")
    assert statuses == [0], job.text
    assert outcome(job, output) == runs.expected
    figure("D1", f"{case}: {errors[0][:60]}...; goes on to the same bits")


@pytest.mark.battery
@pytest.mark.parametrize("megabytes", [2, 4, 8])
def test_a_small_disk_fills(megabytes: int, runs: Runs, nursery: Nursery, tmp_path: Path, figure: Callable):
    """A real one; it needs the right to mount. Then it is read-only."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(tmp_path)]
    subprocess.run(mount, check=True)
    try:
        log = runs.directory / "small.log"
        big = [*runs.command, "model.embed_dim=60", "train.keep_checkpoints=100", "schedule.epochs=100"]
        command = [*big, "--output", str(tmp_path / "run")]
        statuses, job = nursery.run(command, log)
        assert statuses == [1]
        assert "No space left" in job.text
        assert not list(tmp_path.rglob("*.tmp"))
        step = find(tmp_path / "run", "last")[1]["progress"]["step"]
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        statuses, job = nursery.run(command, log)
        assert statuses == [2]
        assert "cannot be written: Read-only file system" in job.text
        assert find(tmp_path / "run", "last")[1]["progress"]["step"] == step
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    figure("D1", f"tmpfs of {megabytes} MB: full after step {step}, which loads; read-only: refused")


# Memory


def test_out_of_memory_says_what_to_lower(runs: Runs):
    statuses, job, _ = runs.launch(("train.nn.utils.clip_grad_norm_", 3, "memory"))
    assert statuses == [1]
    error = job.text.splitlines()[-1]
    assert error.startswith("error: out of memory; raise train.grad_accum_steps = 1 (8 images a pass), or set train.")
    assert "lower train.total_batch_size = 8" in error


# Numbers


class Spoiler:
    """Spoils one value of the fourth pass of a run."""

    def __init__(self, place: str, value: float, monkeypatch: pytest.MonkeyPatch):
        self.value, self.count = value, 0
        if place == "weight":
            self.wrap(monkeypatch, train, "create_model", lambda model: setattr(self, "model", model))
        target = {
            "loss": (torch.nn.CrossEntropyLoss, "forward", lambda loss: loss.data.fill_(value)),
            "input": (train, "create_loaders", None),
            "gradient": (train.nn.utils, "clip_grad_norm_", None),
            "weight": (train, "seed_everything", lambda _: self.model.head.bias.data.fill_(value)),
        }[place]
        owner, name, spoil = target
        if place == "input":
            real = train.create_loaders

            def create_loaders(*args, **kwargs):
                train_loader, val_loader, augment = real(*args, **kwargs)
                return train_loader, val_loader, lambda images, targets: augment(self.spoil(images), targets)

            monkeypatch.setattr(train, "create_loaders", create_loaders)
        elif place == "gradient":
            real = train.nn.utils.clip_grad_norm_

            def clip(parameters, *args):
                parameters = list(parameters)
                self.spoil(parameters[0].grad)
                return real(parameters, *args)

            monkeypatch.setattr(owner, name, clip)
        else:
            offset = place == "weight"  # the first call seeds the weights
            self.wrap(monkeypatch, owner, name, spoil, 4 + offset)

    def spoil(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 4:
            tensor.view(-1)[0] = self.value
        return tensor

    def wrap(self, monkeypatch: pytest.MonkeyPatch, owner, name: str, after: Callable, call: int = 1) -> None:
        real, count = getattr(owner, name), 0

        def function(*args, **kwargs):
            nonlocal count
            count += 1
            result = real(*args, **kwargs)
            if count == call:
                after(result)
            return result

        monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["loss", "gradient", "input", "weight"])
def test_what_is_not_finite_spoils_nothing(
    place: str, value: float, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, figure: Callable
):
    """A weight that is spoilt stays so: skipping ends with the next checkpoint."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    plain = ["attention={name: softmax}", "augment.auto_augment=null", "schedule.epochs=1", "schedule.warmup_epochs=0"]
    skip = ["train.max_skipped=2"] * (policy == "skip")
    command = [str(tmp_path / "run.yaml"), *plain, *skip, "--output", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        use_few_images(50, 24, patch.setattr)
        Spoiler(place, value, patch)
        if policy == "skip" and place != "weight":
            train.main(command)
        else:
            with pytest.raises(SystemExit) as caught:
                train.main(command)
            assert caught.value.code == 1
    failed = json.loads((tmp_path / "run" / "failed_step_3.json").read_text())
    assert len(failed["images"]) == 8
    assert all(name.endswith(".pgm") for _, name in failed["images"])
    assert load(tmp_path / "run" / "failed_step_3.pt")["progress"]["step"] in (3, 4)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    saved = [load(path) for path in list_checkpoints(tmp_path / "run")]
    if policy == "skip" and place != "weight":
        assert not errors
        assert saved[0]["progress"] | {"step": 6, "num_skipped": 1} == saved[0]["progress"]
    else:
        what = "step 3: the " if policy == "stop" else "step 4: model.head.bias is not finite"
        assert [error.startswith(f"error: {what}") for error in errors] == [True]
        assert saved[0]["progress"]["step"] == 2
    for checkpoint in saved:
        for part in ("model", "ema"):
            assert all(tensor.isfinite().all() for tensor in checkpoint[part].values())
    figure("N1", f"{value} in {place}, {policy}: told, dumped; {len(saved)} checkpoints are clean")


# Owners


@light_and_full(3, 20)
def test_of_two_launches_one_wins(amount: int, runs: Runs, nursery: Nursery, tmp_path: Path, figure: Callable):
    rng = random.Random(0)
    for race in range(amount):
        output = tmp_path / str(race)
        command = [*runs.command, "--output", str(output)]
        jobs = []
        for name in "ab":
            jobs.append(nursery.start(command, tmp_path / f"{race}{name}.log"))
            time.sleep(rng.random() * 0.1)
        statuses = [job.wait()[0] for job in jobs]
        assert sorted(statuses) == [0, 2]
        winner, loser = (jobs[statuses.index(status)] for status in (0, 2))
        assert f"{output}: in use by process {winner.pids[0]} on " in loser.text
        assert outcome(winner, output) == runs.expected
    figure("X1", f"{amount}/{amount} races: one winner, undisturbed")


def test_a_dead_owner_is_no_owner(runs: Runs):
    statuses, _, output = runs.launch(("train.nn.utils.clip_grad_norm_", 3, "SIGKILL"), more=["data.workers=2"])
    assert statuses == [-9]
    assert runs.launch(output=output)[0] == [0]


def test_the_number_of_steps_is_that_of_the_rows():
    assert RUN["schedule"]["epochs"] * (50 // RUN["train"]["total_batch_size"]) == STEPS
