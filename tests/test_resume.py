"""The same command resumes: interrupted and repeated, a run ends in the same bits as one that was never interrupted."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml

import train
from engine.checkpoint import load

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
    "data": {"dataset": "digits", "train_split": "val"},
    "optim": {"lr": 0.002, "lr_base_size": 72},
    "schedule": {"epochs": 3, "warmup_epochs": 1},
    "train": {
        "total_batch_size": 72,
        "device": "cpu",
        "amp": "fp16",
        "ema_decay": 0.9,
        "keep_checkpoints": 2,
        "log_every": 2,
    },
}
"""Three epochs of five updates; all that is random is on: attention noise, augmentation, mixup, stochastic depth."""


class Interrupted(Exception):
    """Stands for the death of a process."""


def interrupted(command: list[str], updates: int) -> None:
    """Runs `command` until its run has had so many updates, and kills it in the next."""
    real = train.stop_unless_finite

    def check(loss, step, world):
        if step == updates:
            raise Interrupted
        real(loss, step, world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "stop_unless_finite", check)
        with pytest.raises(Interrupted):
            train.main(command)


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


@pytest.mark.parametrize("workers", [0, 1])
def test_interrupted_run_ends_in_the_same_bits(workers: int, tmp_path: Path):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    straight, resumed = (
        [str(config), f"data.workers={workers}", "--output", str(tmp_path / name)] for name in ("straight", "resumed")
    )
    train.main(straight)
    interrupted(resumed, 5)  # right after the first checkpoint
    interrupted(resumed, 13)  # in the middle of the third epoch
    train.main(resumed)

    straight, resumed = ({p.name: load(p) for p in (tmp_path / name).glob("*.pt")} for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    assert straight["last.pt"]["epoch"] == 3
    assert {"model", "ema", "optimizer", "scaler", "ranking", "metrics"} <= straight["last.pt"].keys()
    for name in straight:
        for part in straight[name]:
            assert digest(straight[name][part]) == digest(resumed[name][part]), f"{name}: {part}"
    assert records(tmp_path / "straight") == records(tmp_path / "resumed")


def test_digest_sees_a_single_bit():
    assert digest({"a": [torch.zeros(3)]}) != digest({"a": [torch.tensor([0.0, 0.0, 1e-45])]})


def test_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    command = [str(config), "data.workers=0", "schedule.epochs=1", "--output", str(tmp_path / "run")]
    train.main(command)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    capsys.readouterr()
    train.main(command)
    assert f"{tmp_path / 'run'} is finished: 1 epochs, top-1 " in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_other_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(RUN))
    command = [str(config), "data.workers=0", "schedule.epochs=1", "--output", str(tmp_path / "run")]
    train.main(command)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(SystemExit) as caught:
        train.main([*command, "attention.window_size=1", "optim.lr=0.001"])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["  attention.window_size: 3 there, 1 here", "  optim.lr: 0.002 there, 0.001 here"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
