"""Checkpoints that are written beside training (`train.async_checkpoint`): as whole and as exact as the others.

Row A1 of the stress suite.
"""

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.checkpoints.background import BackgroundTask, copy_to_memory
from engine.checkpoints.files import find_checkpoint, list_checkpoints, save_checkpoint
from engine.checkpoints.progress import Progress
from engine.config.load import load_run
from engine.runtime.distributed import World
from engine.training import resume
from engine.training.resume import Checkpoints
from tests.engine.test_resume import LAST, Runs, choose_kill, light_and_full, outcome
from tests.support.launcher import ROOT, ForkServer, Job

BESIDE = "train.async_checkpoint=true"


@pytest.fixture(scope="module")
def runs(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(fork_server, tmp_path_factory.mktemp("runs"), [BESIDE])


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    run = load_run(ROOT / "configs/quickstart.yaml", [BESIDE, "train.checkpoint_minutes=1"])
    return Checkpoints(tmp_path, run, World(torch.device("cpu")), 100)


def test_a_copy_does_not_change():
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": {"ranking": [[0.5, 1]]}}
    copied = copy_to_memory(state)
    before = [value.clone() for value in (*copied["model"].values(), copied["optimizer"]["state"][0]["exp_avg"])]
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state["progress"]["ranking"][0][1] = 2
    after = [*copied["model"].values(), copied["optimizer"]["state"][0]["exp_avg"]]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not torch.equal(copied["model"]["running_mean"], model.running_mean)
    assert copied["progress"] == {"ranking": [[0.5, 1]]}
    assert copied["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]


def test_one_task_at_a_time_and_its_failure_is_raised_once():
    task, going, order = BackgroundTask(), threading.Event(), []
    task.start(lambda: (going.wait(10), order.append(1)))
    task.raise_failure()
    assert task.is_running
    threading.Timer(0.1, going.set).start()
    task.start(lambda: order.append(2))
    assert order[0] == 1
    task.wait()
    assert order == [1, 2]
    assert not task.is_running
    task.start(lambda: 1 // 0)
    task.thread.join()
    with pytest.raises(ZeroDivisionError):
        task.raise_failure()
    task.raise_failure()
    task.wait()


def test_no_two_saves_at_once_and_each_is_of_its_step(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The weights change while they are written. What is overdue waits for the store, what is due waits in line."""
    running, going = [], threading.Event()

    def save_slowly(path: Path, content: dict) -> None:
        running.append(path.name)
        assert len(running) == 1
        going.wait(10)
        save_checkpoint(path, content)
        running.remove(path.name)

    monkeypatch.setattr(resume, "save_checkpoint", save_slowly)
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    checkpoints.save(Progress(step=1, images=8), {"model": model})
    nn.init.constant_(model.weight, 2.0)
    checkpoints.saved_at -= 120
    assert not checkpoints.is_overdue()
    assert not list_checkpoints(tmp_path)
    threading.Timer(0.2, going.set).start()
    checkpoints.save(Progress(step=2, images=16), {"model": model})
    checkpoints.wait()
    checkpoints.saved_at -= 120
    assert checkpoints.is_overdue()
    for path in list_checkpoints(tmp_path):
        content = torch.load(path)
        assert content["model"]["weight"].eq(float(content["progress"]["step"])).all()
    assert len(list_checkpoints(tmp_path)) == 2


@pytest.mark.parametrize("error", [None, ValueError("a bug"), KeyboardInterrupt()])
def test_the_end_of_a_run_waits_unless_it_is_interrupted(
    error: BaseException | None, checkpoints: Checkpoints, capsys: pytest.CaptureFixture
):
    going = threading.Event()
    checkpoints.writing.start(lambda: going.wait(10))
    if not isinstance(error, KeyboardInterrupt):
        threading.Timer(0.1, going.set).start()
    checkpoints.close(type(error), error, None)
    assert checkpoints.writing.is_running == isinstance(error, KeyboardInterrupt)
    going.set()
    checkpoints.wait()
    if not isinstance(error, KeyboardInterrupt):
        checkpoints.writing.start(lambda: 1 // 0)
        if error is None:
            with pytest.raises(ZeroDivisionError):
                checkpoints.close(None, None, None)
        else:
            checkpoints.close(type(error), error, None)
            assert "no checkpoint was made of the last save: " in capsys.readouterr().err


@light_and_full(2, 20)
@pytest.mark.parametrize("place", ["step", "write"])
def test_a_killed_run_ends_in_the_same_bits(place: str, amount: int, runs: Runs, figure: Callable):
    rng = random.Random(place)
    for _ in range(amount):
        assert runs.survives(choose_kill(rng, place)) == [-9]
    figure("A1", f"{amount}/{amount} runs killed in {place} while they write beside training: same SHA-256")


def test_a_run_ends_as_without(runs: Runs, fork_server: ForkServer, tmp_path: Path):
    """In the same bits, and with the same files."""
    others = Runs(fork_server, tmp_path / "others")
    assert others.expected == runs.expected
    names = [[path.name for path in list_checkpoints(r.directory / "run1")] for r in (runs, others)]
    assert names[0] == names[1]
    assert runs.survives(LAST) == [-9]


SLOW = ("engine.training.resume.save_checkpoint", 0, "slow")
"""Every checkpoint takes a second."""


def updates_within_saves(job: Job) -> int:
    begins = [float(began) for (began,) in job.recorded("fault")]
    ends = [float(end) for _, _, end in job.recorded("ranks")]
    return sum(any(began < end < began + 0.95 for began in begins) for end in ends)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_updates_go_on_while_a_checkpoint_is_written(name: str, runs: Runs):
    """Without the option none is made meanwhile. A stopped run ends when its last update is saved."""
    few = ["train.checkpoint_steps=6", "schedule.epochs=2"]
    statuses, job, output = runs.launch(SLOW, more=few)
    assert statuses == [0], job.text
    assert updates_within_saves(job) > 0
    assert outcome(job, output)["model"] == runs.expected["model"]
    statuses, job, _ = runs.launch(SLOW, more=[*few, "train.async_checkpoint=false"])
    assert statuses == [0], job.text
    assert updates_within_saves(job) == 0
    statuses, job, output = runs.launch(SLOW, ("train.seed_everything", 10, name), more=few)
    assert statuses == [75], job.text
    assert job.text.splitlines()[-1] == "saved; the same command continues the run"
    step = find_checkpoint(output, "last")[1]["progress"]["step"]
    assert step == max(int(words[0]) for words in job.recorded("random"))
    statuses, job, _ = runs.launch(output=output, more=few)
    assert statuses == [0], job.text
    assert outcome(job, output)["model"] == runs.expected["model"]


@pytest.mark.parametrize("case", ["full", "interrupted"])
def test_a_failure_to_write_ends_the_run(case: str, runs: Runs):
    """As without the option: one line, older checkpoints unchanged, no unfinished file that stays."""
    full = ("engine.runtime.files.write_atomically", 6, "full")
    hurry = [SLOW, *[("train.nn.utils.clip_grad_norm_", 4, "SIGINT")] * 2]
    statuses, job, output = runs.launch(*([full] if case == "full" else hurry))
    assert statuses == [1 if case == "full" else 130], job.text
    if case == "full":
        errors = [line for line in job.text.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "No space left" in errors[0]
        assert "the last checkpoint stands" in errors[0]
        assert "Traceback" not in job.text
        assert not list(output.glob("*.tmp"))
        assert find_checkpoint(output, "last")[1]["progress"]["step"] == 4
    statuses, job, _ = runs.launch(output=output)
    assert statuses == [0], job.text
    assert outcome(job, output) == runs.expected
