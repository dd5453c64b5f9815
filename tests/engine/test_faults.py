"""Runs that meet signals, dead ranks and workers, full disks, numbers that are not finite, and a second launch.

The rows S2, D1, P1, W1, N1 and X1 of the stress suite.
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
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from torch import nn

import train
from engine.checkpoints.files import list_checkpoints, load_checkpoint, newest_checkpoint
from engine.checkpoints.progress import Progress
from engine.config.schema import Data, Schedule, Train
from engine.data.augment import PairMixup
from engine.objectives.classification import Classification
from engine.reporting.runs import summarise
from engine.runtime.distributed import World
from engine.runtime.signals import SIGNALS, SignalHandler
from engine.training.exchange import UpdateExchange
from tests.engine.test_resume import RUN, Runs, light_and_full, outcome, records
from tests.support.launcher import ROOT, Fault, ForkServer, Job, use_few_images
from tests.support.partition import chosen


@pytest.fixture(scope="module")
def runs(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(fork_server, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pairs(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of two ranks."""
    return Runs(fork_server, tmp_path_factory.mktemp("pairs"), ranks=2)


# Signals


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        (["SIGINT"], 75),
        (["SIGINT"] * 2, 130),
        (["SIGUSR1"], 75),
        pytest.param(["SIGHUP"] * 2, 75, marks=pytest.mark.stress),
        pytest.param(["SIGQUIT"] * 2, 75, marks=pytest.mark.stress),
    ],
)
def test_signals(signals: list[str], status: int, runs: Runs):
    """A signal after the ranks' exchange takes effect at the next. A second SIGINT ends the run at once, unsaved."""
    statuses, job, output = runs.launch(*[("train.nn.utils.clip_grad_norm_", 4, name) for name in signals])
    assert statuses == [status], job.text
    last = "saved; the same command continues the run" if status == 75 else "interrupted"
    assert job.text.splitlines()[-1] == last
    assert newest_checkpoint(output)[1]["progress"]["step"] == (5 if status == 75 else 2)
    statuses, job, _ = runs.launch(output=output)
    assert statuses == [0]
    assert f"resumes from {output}/step_{5 if status == 75 else 2}.pt  epoch 0/2  step " in job.text
    assert outcome(job, output) == runs.expected


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize(("previous", "is_rank", "is_heeded"), [("DFL", 0, 1), ("IGN", 0, 0), ("IGN", 1, 1)])
def test_signals_that_were_ignored_stay_ignored_but_by_a_rank(
    number: signal.Signals, previous: str, is_rank: bool, is_heeded: bool, monkeypatch: pytest.MonkeyPatch
):
    """nohup ignores SIGHUP. torchrun kills a rank that ignores the signal that it was sent."""
    if is_rank:
        monkeypatch.setenv("WORLD_SIZE", "2")
    previous = getattr(signal, f"SIG_{previous}")
    before = signal.signal(number, previous)
    try:
        with SignalHandler() as signals:
            signal.raise_signal(number)
            assert signals.stop_requested() == is_heeded
        assert signal.getsignal(number) == previous
    finally:
        signal.signal(number, before)


def test_a_rank_notices_that_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    parent = os.getppid()  # 1, where the tests outlive the shell that began them
    with SignalHandler() as signals:
        assert not signals.stop_requested()
        monkeypatch.setattr(os, "getppid", lambda: parent + 1)
        assert signals.stop_requested()
    monkeypatch.delenv("WORLD_SIZE")
    with SignalHandler() as signals:
        monkeypatch.setattr(os, "getppid", lambda: parent + 2)
        assert not signals.stop_requested()  # without a launcher: a shell may go away


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> float:
    """Waits until `condition` is true, and returns the seconds that it took."""
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
    """Returns the processes whose command line contains `text`."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text.encode() in path.read_bytes() and is_alive(int(path.parent.name)):
                found.add(int(path.parent.name))
    return found


@contextmanager
def torchrun(directory: Path, faults: dict[int, list[Fault]], *flags: str, options: Sequence[str] = ()):
    """torchrun with two ranks of RUN in the directory: its process, and the job."""
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    command = [str(directory / "run.yaml"), "--output", str(directory / "run"), *options]
    for name in ("log", "log.0", "log.1"):
        (directory / name).write_text("")
    request = {"start": "train", "command": command, "log": str(directory / "log"), "faults": faults}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else restarted ranks look for the addresses of dead ones
    with (directory / "torchrun.log").open("w") as log:
        process = subprocess.Popen(
            [*launcher, str(ROOT / "tests" / "support" / "launcher.py"), json.dumps(request)],
            cwd=ROOT, stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    try:
        yield process, Job(None, [0, 0], directory / "log")
    finally:
        process.kill()
        process.wait()


@pytest.mark.complete
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("SIGUSR1", ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]),
        *(  # SIGUSR1 kills torchrun, whose ranks stay behind
            pytest.param(names, [], marks=pytest.mark.stress)
            for names in ("SIGUSR1", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT", "SIGINT SIGINT", "SIGKILL")
        ),
    ],
)
def test_signals_through_torchrun(name: str, flags: list[str], tmp_path: Path, figure: Callable):
    """All processes end, and no update is lost."""
    options = ["data.workers=1", "schedule.epochs=200"]
    with torchrun(tmp_path, {}, *flags, options=options) as (process, job):
        wait_for(lambda: len(job.recorded("random")) > 8, 120)
        for one in name.split():
            process.send_signal(signal.Signals[one])
            time.sleep(0.2)
        process.wait(60)
        seconds = wait_for(lambda: not session_of(str(tmp_path)), 30)
    step = newest_checkpoint(tmp_path / "run")[1]["progress"]["step"]
    done = max(int(words[0]) for words in job.recorded("random"))
    assert done - step <= (1 if " " not in name else 2)
    how = f"{name}, {'with' if flags else 'without'} the flag"
    figure("S2", f"{how}: no process {seconds:.1f} s after torchrun, {done - step} steps lost")


# Ranks


@pytest.mark.parametrize("action", ["SIGKILL", "raise", "SIGSTOP"])
def test_a_lost_rank_ends_the_job(action: str, pairs: Runs, fork_server: ForkServer, tmp_path: Path):
    command = [*pairs.command, "--output", str(tmp_path / "run")]
    fault = {1: [("engine.training.exchange.UpdateExchange.send", 4, action)]}
    job = fork_server.start([*command, "train.timeout_minutes=0.05"], tmp_path / "log", fault, 2)
    assert fork_server.ask(wait=job.pids[0], timeout=60) == 1
    assert "error: rank 0: no answer from another rank " in job.text
    if action == "SIGSTOP":
        job.signal("SIGKILL", 1)
    fork_server.ask(wait=job.pids[1], timeout=60)
    statuses, job = fork_server.run(command, tmp_path / "log", ranks=2)
    assert statuses == [0, 0], job.text
    assert outcome(job, tmp_path / "run") == pairs.expected


@pytest.mark.stress
@pytest.mark.parametrize("action", ["SIGKILL", "raise", "SIGSTOP"])
def test_torchrun_restarts_a_lost_rank(action: str, pairs: Runs, tmp_path: Path, figure: Callable):
    fault = {1: [("engine.training.exchange.UpdateExchange.send", 4, action)]}
    with torchrun(tmp_path, fault, "--max-restarts=1", options=["train.timeout_minutes=0.2"]) as (process, job):
        assert process.wait(240) == 0, job.text
    assert outcome(job, tmp_path / "run") == pairs.expected
    figure("P1", f"rank 1 {action}: restarted by torchrun, same bits")


def test_a_run_that_cannot_record_its_end_is_not_finished(runs: Runs):
    """The same command goes on with the last evaluation; nothing that can fail follows the last checkpoint."""
    statuses, failed, output = runs.launch(("train.Recorder.final", 1, "full"))
    assert statuses == [1], failed.text
    assert summarise(output)["state"].startswith("failed: ")
    statuses, job, _ = runs.launch(output=output)
    assert statuses == [0], job.text
    assert summarise(output)["state"] == "finished"
    assert outcome(job, output, failed) == runs.expected


# Broken images


def test_a_broken_validation_image_costs_no_epoch(runs: Runs):
    """Image 2 of the first evaluation, after 48 for training: the epoch's updates are saved, and not made again."""
    more = ["train.checkpoint_steps=0", "train.ema_decay=null"]
    statuses, job, output = runs.launch(("engine.data.splits.decode", 50, "bad sector"), more=more)
    assert statuses == [1]
    assert job.text.splitlines()[-1].startswith("error: ")
    assert "data.broken_val=skip leaves them out" in job.text.splitlines()[-1]
    assert [path.name for path in list_checkpoints(output)] == ["step_6.pt"]
    statuses, job, _ = runs.launch(
        ("engine.data.splits.decode", 2, "bad sector"), output=output, more=[*more, "data.broken_val=skip"]
    )
    assert statuses == [0], job.text
    assert {epoch for _, epoch, _ in job.recorded("place")} == {"1"}
    first, second = (record for record in records(output) if record["kind"] == "eval")
    assert (first["epoch"], first["images"], first["broken"]) == (1, 23, 1)
    assert (second["images"], second.get("broken")) == (24, None)


def test_the_count_of_broken_images_survives_a_stop(runs: Runs):
    statuses, _, output = runs.launch(
        ("engine.data.splits.decode", 3, "bad sector"), ("train.nn.utils.clip_grad_norm_", 3, "SIGTERM")
    )
    assert statuses == [75]
    statuses, job, _ = runs.launch(
        ("engine.data.splits.decode", 2, "bad sector"), output=output, more=["data.max_broken=1"]
    )
    assert statuses == [1]
    assert "error: 2 images of this epoch are broken, more than data.max_broken = 1" in job.text
    statuses, job, _ = runs.launch(output=output)
    assert statuses == [0], job.text
    counts = [(record["step"], record["broken"]) for record in records(output) if record["kind"] == "train"]
    assert counts == [(4, 1), (6, 1), (10, 0), (12, 0)]


def test_an_error_of_the_machine_in_reading_an_image_ends_the_run_and_it_goes_on_later(runs: Runs):
    """Also in an evaluation that leaves broken images out."""
    statuses, failed, output = runs.launch(("engine.data.splits.decode", 50, "full"), more=["data.broken_val=skip"])
    assert statuses == [1]
    assert "No space left on device: an error of this machine or its storage, and no broken image" in failed.text
    assert "Traceback" not in failed.text
    assert runs.launch(output=output, more=["data.broken_val=skip"])[0] == [0]


@pytest.mark.stress
@pytest.mark.parametrize("call", [26, 2])
def test_ranks_that_meet_a_broken_image_end_alike(call: int, pairs: Runs, fork_server: ForkServer, tmp_path: Path):
    """The second rank meets the image, in validation (after 24 images for training) or in training."""
    command = [*pairs.command, "data.max_broken=0", "--output", str(tmp_path / "run")]
    statuses, job = fork_server.run(
        command, tmp_path / "log", {1: [("engine.data.splits.decode", call, "bad sector")]}, 2
    )
    assert statuses == [1, 1], job.text


# Disks


DISKS = {
    "checkpoint": {"faults": [("engine.checkpoints.files.write_atomically", 3, "full")]},
    "checkpoint, by the system": {"limit": 100_000},
    "events, by the system": {"limit": 20_000},
    "log, by the system": {"limit": 400},
    "log": {"faults": [("engine.reporting.recorder.json.dumps", 7, "full")]},
    "events": {"faults": [("engine.reporting.charts.append_whole", 15, "full")]},
    "directory not synced": {"faults": [("os.fsync", 25, "full")]},
    "directory removed": {"faults": [("engine.checkpoints.files.write_atomically", 3, "remove")]},
}


@pytest.mark.parametrize("case", DISKS)
def test_a_disk_that_fails(case: str, runs: Runs, fork_server: ForkServer, tmp_path: Path, figure: Callable):
    """One line says what failed; older checkpoints are unchanged, no unfinished file is left, and the run resumes."""
    more = dict(DISKS[case])
    command, output = [*runs.command, "--output", str(tmp_path / "run")], tmp_path / "run"
    statuses, job = fork_server.run(command, tmp_path / "log", {0: more.pop("faults", [])}, **more)
    assert statuses == [1], job.text
    errors = [line for line in job.text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in job.text
    assert "the last checkpoint stands" in errors[0]
    assert any(reason in errors[0] for reason in ("No space left", "File too large", "No such file"))
    assert not list(tmp_path.rglob("*.tmp"))
    if "removed" not in case and "system" not in case:
        step = 6 if "synced" in case else 4  # the file was replaced, and stays
        assert newest_checkpoint(output, quiet=True)[1]["progress"]["step"] == step
    statuses, job = fork_server.run(command, tmp_path / "log")
    assert statuses == [0], job.text
    assert outcome(job, output) == runs.expected
    figure("D1", f"{case}: {errors[0][:60]}...; goes on to the same bits")


# Memory


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (("train.nn.utils.clip_grad_norm_", 3, "workers"), "oader worker"),  # or a reset connection
        (("engine.data.splits.decode", 30, "hang"), "DataLoader timed out after 1.2 seconds"),
    ],
)
def test_loader_workers_that_are_killed_or_hang(fault: Fault, reason: str, runs: Runs, figure: Callable):
    """The run ends with one line within a limit, and resumes from its last checkpoint."""
    status, job, output = runs.launch(fault, more=["data.workers=1", "train.timeout_minutes=0.04"])
    assert status == [1], job.text
    assert "Traceback" not in job.text
    error = job.text.splitlines()[-1]
    assert error.startswith("error: ")
    assert reason in error
    assert error.endswith("or check the storage of data.root and train.timeout_minutes")
    status, job, _ = runs.launch(output=output)
    assert status == [0]
    assert outcome(job, output) == runs.expected
    figure("W1", f"{fault[2]}: ended with one line, resumed to the same bits")


def test_out_of_memory_says_what_to_lower(runs: Runs):
    statuses, job, _ = runs.launch(("train.nn.utils.clip_grad_norm_", 3, "memory"))
    assert statuses == [1]
    error = job.text.splitlines()[-1]
    assert error.startswith("error: out of memory; raise train.grad_accum_steps = 1 (8 images a pass), or set train.")
    assert "lower train.total_batch_size = 8" in error


# Numbers


SPOILERS = {
    "loss": (torch.nn.CrossEntropyLoss, "forward", lambda value, args, loss: loss.data.fill_(value)),
    "gradient": (torch.amp.GradScaler, "unscale_", lambda value, args, _: gradient_of(args[1]).fill_(value)),
    "input": (PairMixup, "__call__", lambda value, args, result: result[0][0].fill_(value)),
    "weight": (Classification, "__call__", lambda value, args, _: args[1].head.bias.data.fill_(value)),
}
"""Spoilt value -> owner and name of a function that every pass calls once, and the action after it."""


def gradient_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return optimizer.param_groups[0]["params"][0].grad


def spoil(place: str, value: float, call: int, patch: pytest.MonkeyPatch) -> None:
    """Overwrites a number with `value`, once, at the `call`-th call."""
    owner, name, act = SPOILERS[place]
    real, count = getattr(owner, name), 0

    def function(*args, **kwargs):
        nonlocal count
        count += 1
        result = real(*args, **kwargs)
        if count == call:
            act(value, args, result)
        return result

    patch.setattr(owner, name, function)


def plain_run(directory: Path) -> list[str]:
    """Writes RUN to the directory, and returns arguments of one plain epoch of it."""
    (directory / "run.yaml").write_text(yaml.safe_dump(RUN))
    plain = ["attention={name: softmax}", "augment.auto_augment=null", "schedule.epochs=1", "schedule.warmup_epochs=0"]
    return [str(directory / "run.yaml"), *plain]


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.complete)])
@pytest.mark.parametrize("place", chosen(["loss", "gradient", "input", "weight"], ("loss", "gradient").__contains__))
def test_what_is_not_finite_reaches_no_checkpoint(
    place: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, figure: Callable
):
    """A weight that goes bad after a forward pass is found by the next checkpoint."""
    command = [*plain_run(tmp_path), "--output", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        use_few_images(50, 24, patch.setattr)
        spoil(place, value, 4, patch)
        with pytest.raises(SystemExit) as caught:
            train.main(command)
        assert caught.value.code == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    saved = [load_checkpoint(path) for path in list_checkpoints(tmp_path / "run")]
    what = "step 4: model.head.bias is not finite" if place == "weight" else "step 3: the "
    assert [error.startswith(f"error: {what}") for error in errors] == [True]
    assert saved[0]["progress"]["step"] == 2
    for checkpoint in saved:
        for name in ("model", "model_ema"):
            assert all(tensor.isfinite().all() for tensor in checkpoint[name].values())
    figure("N1", f"{value} in {place}: reported; {len(saved)} checkpoints are clean")


class Two(World):
    """Two ranks, of which the second sends the values that a test chooses."""

    def send(self, values):
        rows = [[float(value) for value in values], list(self.second)]
        return lambda: rows


def two(second: list[float]) -> Two:
    world = Two(torch.device("cpu"), 0, 2)
    object.__setattr__(world, "second", second)
    return world


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([1.0, 0.5, 0.0, 0.0, 0.0], (2.0, 0.5, False, 2, True)),
        ([5.0, 0.5, 1.0, 0.0, 1.0], (4.0, 0.5, True, 2, True)),
        # The norm is that of all ranks, and the clock that counts the first's: the first rank's are read.
        ([1.0, math.inf, 0.0, 1.0, 0.0], (2.0, 0.5, False, 3, True)),
    ],
)
def test_one_exchange_carries_losses_norm_flags_and_broken_images(second: list[float], expected: tuple):
    exchange = exchange_of(Train(), Progress(), two(second))
    exchange.send(torch.tensor(3.0), torch.tensor(0.5), False, 2, True)
    progress = exchange.progress
    assert (progress.loss_sum, exchange.norm, exchange.stopped, progress.broken, exchange.overdue) == expected


def exchange_of(options: Train, progress: Progress, world: World, late: bool = False) -> UpdateExchange:
    """An exchange; on a GPU it reads `late`."""
    exchange = UpdateExchange(SimpleNamespace(train=options, data=Data()), world, progress)
    exchange.reads_late = late
    return exchange


def update_twice(exchange: UpdateExchange, **values: float) -> None:
    """An update, and one after it, which reads it if it is read late."""
    update(exchange, **values)
    update(exchange)


def update(
    exchange: UpdateExchange, loss: float = 1.0, norm: float = 1.0, stop: bool = False, overdue: bool = False
) -> None:
    """One update, as train.py makes it."""
    exchange.send(torch.tensor(loss), torch.tensor(norm), stop, 0, overdue)
    exchange.progress.step += 1


@pytest.mark.parametrize("late", [False, True])
def test_the_rank_is_named(late: bool):
    world = two([1.0, 0.5, 0.0, 0.0, 0.0])
    exchange = exchange_of(Train(), Progress(), world, late)
    update(exchange, 3.0)
    world.second[0] = math.nan
    end = "no checkpoint was made after it" if late else "stopped before the update"
    with pytest.raises(FloatingPointError, match=f"step 1: the loss is not finite on rank 1; {end}"):
        update_twice(exchange)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf)])
def test_what_is_read_late_is_read_before_the_next_update_and_before_a_checkpoint(loss: float, norm: float):
    for end in (update, UpdateExchange.settle):
        exchange = exchange_of(Train(), Progress(), World(torch.device("cpu")), late=True)
        update(exchange)
        update(exchange, loss, norm)
        assert exchange.progress.num_summed == 1
        with pytest.raises(FloatingPointError, match=r"step 1: .* no checkpoint was made after it"):
            end(exchange)


def test_what_is_read_late_is_not_lost():
    progress = Progress()
    exchange = exchange_of(Train(), progress, World(torch.device("cpu")), late=True)
    update(exchange, 2.0, 3.0)
    update(exchange, 4.0, 5.0, stop=True)
    assert (progress.loss_sum, progress.num_summed, exchange.norm, exchange.stopped) == (2.0, 1, 3.0, False)
    for _ in range(2):
        exchange.settle()
        assert (progress.loss_sum, progress.num_summed, exchange.norm, exchange.stopped) == (6.0, 2, 5.0, True)


@pytest.mark.parametrize(("first", "late", "saved"), [(0, 0, []), (0, 1, []), (1, 0, [1, 2, 3, 4]), (1, 1, [2, 4])])
def test_all_ranks_save_by_the_clock_of_the_first(first: int, late: int, saved: list[int]):
    """All ranks save at the same update, so that none ends alone while the others wait for it in the next."""
    world = Two(torch.device("cpu"), 1, 2)
    object.__setattr__(world, "send", lambda values: lambda: [[1.0, 1.0, 0.0, 0.0, first], [*map(float, values)]])
    exchange = exchange_of(Train(), Progress(), world, bool(late))
    steps: list[int] = []
    trainer = MagicMock(
        options=Train(total_batch_size=1), progress=exchange.progress, exchange=exchange, model=nn.Identity()
    )
    trainer.sampler = SimpleNamespace(stop=4, updates_per_epoch=4)
    trainer.update = lambda batches: exchange.send(torch.tensor(1.0), torch.tensor(1.0), False, 0, not first)
    trainer.run = SimpleNamespace(train=Train(eval_every=9), schedule=Schedule())
    trainer.checkpoints.is_due = lambda number: False
    trainer.checkpoints.save = lambda progress, stateful: steps.append(progress.step)
    trainer.save = partial(train.Trainer.save, trainer)
    trainer.optimizer.param_groups = [{"lr": 1.0}]
    train.Trainer.train_epoch(trainer, iter(()))
    assert steps == saved


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_only_a_gpu_is_read_late(device: str):
    run = SimpleNamespace(train=Train(), data=Data())
    assert UpdateExchange(run, World(torch.device(device)), Progress()).reads_late == (device == "cuda")


@pytest.mark.parametrize("late", [False, True])
def test_with_loss_scaling_only_so_many_overflows_in_a_row_are_skipped(late: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.training.exchange.MAX_OVERFLOWS", 3)
    options, progress = Train(amp="fp16"), Progress()
    exchange = exchange_of(options, progress, World(torch.device("cpu")), late)
    for norm in (math.inf, math.nan, math.inf, 1.0, math.inf, math.inf):
        update(exchange, norm=norm)
    exchange.settle()
    exchange.settle()
    assert progress.num_overflows == 2
    exchange = exchange_of(options, Progress(**vars(progress)), exchange.world, late)  # resumed
    update(exchange, norm=math.inf)
    message = r"^step 7: the gradient was not finite in 4 updates in a row, at any loss scale; lower optim\.lr"
    with pytest.raises(FloatingPointError, match=message):
        update_twice(exchange, norm=math.inf)


def test_loss_scaling_does_not_skip_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The count of skipped updates outlives the process."""
    command = [*plain_run(tmp_path), "train.amp=fp16", "--output", str(tmp_path / "run")]
    use_few_images(50, 24, monkeypatch.setattr)
    scale = torch.amp.GradScaler.scale
    monkeypatch.setattr(torch.amp.GradScaler, "scale", lambda self, loss: scale(self, loss) * math.inf)
    for limit, step in ((2, 2), (3, 3)):
        monkeypatch.setattr("engine.training.exchange.MAX_OVERFLOWS", limit)
        with pytest.raises(SystemExit) as caught:
            train.main(command)
        assert caught.value.code == 1
        assert f"error: step {step}: the gradient was not finite in {limit + 1} " in capsys.readouterr().err


# Locks


@light_and_full(3, 20)
def test_of_two_launches_one_wins(amount: int, runs: Runs, fork_server: ForkServer, tmp_path: Path, figure: Callable):
    rng = random.Random(0)
    for race in range(amount):
        output = tmp_path / str(race)
        command = [*runs.command, "--output", str(output)]
        jobs = []
        for name in "ab":
            jobs.append(fork_server.start(command, tmp_path / f"{race}{name}.log"))
            time.sleep(rng.random() * 0.1)
        statuses = [job.wait()[0] for job in jobs]
        assert sorted(statuses) == [0, 2]
        winner, loser = (jobs[statuses.index(status)] for status in (0, 2))
        assert f"{output}: in use by process {winner.pids[0]} on " in loser.text
        assert outcome(winner, output) == runs.expected
    figure("X1", f"{amount}/{amount} races: one winner, undisturbed")
