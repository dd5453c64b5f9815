"""A further objective is one file and one line of `OBJECTIVES`: scripts and loaders need no other change."""

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

import train
import validate
from engine.objectives import OBJECTIVES
from engine.objectives.objective import Measure, Objective, Run
from tests.support.launcher import ROOT

SEED = 41
"""Seed of the runs that have the objective of this file."""


def squared_error(network: Callable[[Tensor], Tensor], images: Tensor, positions: Tensor) -> Tensor:
    return (network(images)[:, 0] - positions).square()


class Position(Objective):
    """Regression of an image's position in its split, over 1,000."""

    measure, predicts_classes = Measure(("loss",), lambda model, x, y, rows: [squared_error(model, x, y).sum()]), False
    identity = MappingProxyType({"scale": "1000"})

    @staticmethod
    def applies(run: Run) -> bool:
        return run.train.seed == SEED

    @staticmethod
    def refuse_prediction(source: str, of_metrics: bool) -> str:
        return "it predicts positions; name another run"

    @staticmethod
    def create_targets(run: Run, is_training: bool) -> Callable[[int], Tensor]:
        return lambda index: torch.tensor(index / 1000)

    def __call__(self, network: Callable[[Tensor], Tensor], images: Tensor, positions: Tensor, /) -> Tensor:
        return squared_error(network, images, positions).mean()


def test_a_fifth_objective_trains_evaluates_and_is_known_to_the_other_scripts(tmp_path, monkeypatch, capsys):
    last = OBJECTIVES["classification"]
    monkeypatch.delitem(OBJECTIVES, "classification")
    monkeypatch.setitem(OBJECTIVES, "position", Position)
    monkeypatch.setitem(OBJECTIVES, "classification", last)
    small = ["model.embed_dim=12", "model.depth=1", "model.num_classes=1", "schedule.epochs=2", "data.workers=0"]
    options = [*small, f"train.seed={SEED}", "train.total_batch_size=256", "schedule.warmup_epochs=0"]
    train.main([str(ROOT / "configs/quickstart.yaml"), *options, "--output", str(tmp_path)])
    records = [json.loads(line) for line in Path(tmp_path, "metrics.jsonl").read_text().splitlines()]
    losses = {kind: [record["loss"] for record in records if record["kind"] == kind] for kind in ("train", "eval")}
    assert losses["train"][1] < losses["train"][0]  # held-out images have positions of another mean
    assert len(losses["eval"]) == 2
    assert "top1" not in records[-1]
    with pytest.raises(SystemExit) as ended:
        validate.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "it predicts positions; name another run" in capsys.readouterr().err
