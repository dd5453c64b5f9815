"""Weights & Biases: off by default, refused in time where it is missing."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from engine.checkpoints.progress import Progress
from engine.config.schema import Report
from engine.reporting.recorder import Recorder
from engine.reporting.trackers import Tracker
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from tests.engine.test_recorder import RUN
from tests.engine.test_train import start


class Fake:
    """The package, and a run of it that keeps what it gets; `broken` makes its `log` fail."""

    launches: ClassVar[list] = []
    broken = False

    def __init__(self, **options: Any):
        self.options, self.logged, self.closed = options, {}, None
        self.launches.append(self)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("no route")
        self.logged.setdefault(step, {}).update(values)

    def finish(self, exit_code: int) -> None:
        self.closed = exit_code


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=Fake, Settings=dict))
    monkeypatch.setattr(Fake, "launches", [])
    return Fake


def train(directory: Path, options: Report, progress: Progress) -> None:
    """A launch of one update."""
    run = replace(RUN, report=options)
    with Recorder(directory, run, progress, total_steps=4, world=World(torch.device("cpu"))) as recorder:
        recorder.start(progress.epoch, processes=1)
        recorder.begin_epoch(progress.epoch + 1)
        recorder.end_step()
        recorder.train(1, loss=2.5, grad_norm=float("inf"))
        recorder.eval(1, {"top1": 50.0})


def test_records_go_there_too_and_a_resumed_run_is_the_same(tmp_path: Path, fake: type[Fake]):
    for step in (0, 1):
        train(tmp_path, Report(wandb="digits"), Progress(step=step))
    first, second = fake.launches
    assert {"project": "digits", "dir": tmp_path, "name": tmp_path.name}.items() <= first.options.items()
    assert (first.options["id"], first.closed) == (second.options["id"], 0)
    assert {"train/loss": 2.5, "eval/top1": 50.0, "images_seen": 8, "epoch": 1}.items() <= first.logged[1].items()
    assert "train/grad_norm" not in first.logged[1]
    assert second.logged[2]["images_seen"] == 16


def test_none_by_default(tmp_path: Path, fake: type[Fake]):
    train(tmp_path, Report(), Progress())
    assert not fake.launches


def test_a_failure_does_not_end_the_run(tmp_path: Path, fake: type[Fake], monkeypatch, capsys):
    monkeypatch.setattr(fake, "broken", True)
    train(tmp_path, Report(wandb="digits"), Progress())
    error = capsys.readouterr().err
    assert error == "warning: report.wandb: ConnectionError: no route; nothing more is sent there\n"


def test_what_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch):
    def refuse(**options: Any) -> None:
        raise ValueError("not logged in")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse, Settings=dict))
    with pytest.raises(UserError, match=r"report\.wandb = 'digits': ValueError: not logged in; or leave it out"):
        Tracker(replace(RUN, report=Report(wandb="digits")), tmp_path, "1")


def test_a_missing_package_is_named_before_any_work(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit) as ended:
        start(tmp_path, "report.wandb=digits")
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n"), (tmp_path / "run").exists()) == (2, 1, False)
    assert error.startswith("error: report.wandb = 'digits': needs the package wandb (")
    assert error.endswith("); pip install wandb, or leave it out\n")


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both launches leave what `wandb sync` sends, for the same run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (0, 1):
        train(tmp_path, Report(wandb="digits"), Progress(step=step))
    first, second = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert first.name == second.name
    for content in (first.read_bytes(), second.read_bytes()):
        assert all(text in content for text in (b"digits", b"train/loss", b"eval/top1", b"images_seen"))
