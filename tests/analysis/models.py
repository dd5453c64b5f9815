"""Checkpoints of small models with random weights, as train.py writes them."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import analyze
from analysis.trained import Trained, load_trained
from engine.checkpoints.files import save_checkpoint
from engine.checkpoints.progress import Progress
from engine.run.load import dump_run, load_run
from models import create_model
from tests.support import refusals
from tests.support.sweeps import read_table as read_rows

ROOT = Path(__file__).parents[2]
SMALL = ["model.depth=2", "model.embed_dim=24", "model.img_size=16", "model.stem=linear"]
"""Options of a model on 4x4 tokens."""


def save_model(directory: Path, options: Sequence[str], scale: float = 1.0, config: str = "quickstart") -> Path:
    """The checkpoint of a model on the embedded digits whose attention's projections are multiplied by `scale`."""
    run = load_run(ROOT / f"configs/{config}.yaml", ["attention=softmax", "train.device=cpu", *options])
    torch.manual_seed(0)
    state = create_model(attention=run.attention, **run.model).state_dict()
    state = {name: scale * x if name.endswith("qkv.weight") else x for name, x in state.items()}
    classes = [str(digit) for digit in range(10)]
    metadata = {"config": dump_run(run), "processes": 1, "images": 100, "classes": classes}
    path = directory / "step_3_epoch_1.pt"
    save_checkpoint(path, metadata | {"progress": vars(Progress(epoch=1, step=3)), "model": state})
    return path


def save_pyramid(directory: Path) -> Path:
    """The checkpoint of a PVT on grids of 16x16, 8x8, 4x4 and 2x2 tokens."""
    return save_model(directory, [], config="quickstart_pvt")


def load_model(path: Path, *overrides: str, reads_images: bool = True) -> Trained:
    args = argparse.Namespace(checkpoint=path, select="best", weights=None, overrides=overrides)
    return load_trained(args, reads_images)


def ask(checkpoint: Path, output: Path, question: str, *arguments: str) -> list[dict[str, str]]:
    """The rows of the table that analyze.py writes."""
    analyze.main([question, str(checkpoint), "--output", str(output), *arguments])
    return read_rows(output / f"{question}.csv")


def refusal(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """Text that analyze.py prints on stderr when it refuses these arguments."""
    return refusals.refusal(analyze.main, arguments, capsys)
