"""One launch says all that is wrong, of whatever kind, each once and with its place; nothing that follows from it."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml

import train
from engine.data import splits
from tests.engine.test_train import RUN
from tests.support.refusals import refusal

WRONG = (
    *("optim.lr=abc", "data.wrkers=1", "model.depth=x"),  # of a wrong form
    *("train.total_batch_size=7", "schedule.warmup_epochs=99", "optim.opt=sgdd", "data.fold=2"),  # not together
    *("attention=evva", "train.kernels=triton"),  # not here
    *(
        "data.val_split=test",
        "model.num_classes=20",
        "init.weights=timm:vit_tinny",
        "distill.teacher=/nowhere",
    ),  # absent
)
FOLDER = "data.dataset=folder", "data.root=/nowhere"
CONSEQUENCES = {  # overrides -> the only ones that are named
    ("optim.lrr=1", "schedule.min_lr=0.9"): "optim.lrr=1",
    ("optim.opt=3", "optim.betas=[0.9,0.9,0.9]"): "optim.opt=3",
    ("train.total_batch_size=1", "train.grad_accum_steps=2"): "train.total_batch_size=1",
    ("model.num_classes=20", *FOLDER): "data.root=/nowhere",
    ("model.num_classes=auto", "train.class_weights=[1,2]", *FOLDER): "data.root=/nowhere",
    ("train.device=cuda", "train.cuda_graph=true"): "train.device=cuda",
    ("attention=evva", "train.budgets=[4]"): "attention=evva",
    ("distill.typ=soft", "distill.tau=2"): "distill.typ=soft",
}


def places(capsys: pytest.CaptureFixture, directory: Path, overrides: Sequence[str], *more: str) -> list[str]:
    """The places that a refused launch names, in order; nothing is written."""
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump(RUN | {"optim": {}}))
    error = refusal(train.main, [config, *overrides, "--output", directory / "run", *more], capsys)
    assert {path.name for path in directory.iterdir()} == {"run.yaml"}
    return [line.split(": ")[0].strip() for line in error.removeprefix("error: ").splitlines()]


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_one_launch_says_all_that_is_wrong(more: list[str], tmp_path: Path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "triton" else find(name, *of))
    overrides = "train.device=cpu", "train.grad_accum_steps=2"
    found = places(capsys, tmp_path, [*WRONG, *overrides], *more)
    assert sorted(found) == sorted(f"override '{text}'" for text in WRONG)


@pytest.mark.parametrize("overrides", CONSEQUENCES)
def test_what_follows_from_another_problem_is_not_said(overrides: tuple[str, ...], tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert places(capsys, tmp_path, overrides) == [f"override '{CONSEQUENCES[overrides]}'"]


def test_a_launch_opens_its_data_once(tmp_path: Path, monkeypatch, capsys):
    opened, open_split = [], splits.open_split
    monkeypatch.setattr(splits, "open_split", lambda data, option: opened.append(option) or open_split(data, option))
    places(capsys, tmp_path, ["optim.lr=abc"])
    train.main([str(tmp_path / "run.yaml"), "--output", str(tmp_path / "run"), "--dry-run"])
    assert opened == ["train_split", "val_split"] * 2
