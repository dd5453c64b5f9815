"""Sweeps of tests, read beside their file, and runs that stand for finished ones."""

import csv
import json
from pathlib import Path

import pytest
import yaml

from ablation.runs import Case, Setting
from ablation.schema import Ablation
from ablation.sweep import read_ablation
from engine.run.load import dump_run
from engine.runtime.errors import ConfigError

BASE = """\
model: {name: deit, img_size: 32, patch_size: 8, embed_dim: 12, depth: 1, num_heads: 2, num_classes: 10}
attention: {name: local, window_size: 2}
data: {dataset: digits, workers: 0}
augment: {auto_augment: null, mixup: 0.0, cutmix: 0.0}
schedule: {epochs: 1, warmup_epochs: 0}
train: {total_batch_size: 64, amp: null, device: cpu}
"""
GRID = """\
caption: Windows
base: base.yaml
grid:
  attention.window_size: [1, 2]
  attention.position_bias: [table]
runs:
  - {attention: {name: softmax}, paper: 77.16}
"""


def read(config: Path, text: str = "") -> tuple[Ablation, list[Setting], list[str]]:
    """Reads a sweep, of this text if there is one, whose runs go to the directory `out` beside it."""
    if text:
        config.write_text(text if text.startswith(("base", "caption", "bases")) else f"base: base.yaml\n{text}")
    return read_ablation(config, [], config.parent / "out", ["python"])


def refusal(config: Path) -> str:
    """Returns the one line that refuses a sweep, without the directory of the file."""
    with pytest.raises(ConfigError) as caught:
        read(config)
    text = str(caught.value).replace(f"{config.parent}/", "")
    assert "\n" not in text
    return text


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_records(case: Case, *records: dict[str, object]) -> None:
    """Writes the files of a run of train.py with these records."""
    case.directory.mkdir(parents=True, exist_ok=True)
    (case.directory / "config.yaml").write_text(yaml.safe_dump(dump_run(case.run)))
    (case.directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def finish(case: Case, **values: float) -> None:
    """Writes the files of a finished run of train.py."""
    final = {"kind": "final", "epoch": 1, "step": 9, "top1": 90.0, "step_seconds": 0.0123, "memory_mb": 321.4}
    write_records(case, final | values)
