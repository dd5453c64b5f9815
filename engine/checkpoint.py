"""Checkpoints of a run: written whole or not at all; plain types only, so that torch loads them with `weights_only`.

A checkpoint is a dict: `config` (the resolved configuration, plain), `epoch` and `step` (finished epochs and updates;
the schedule follows from them), `metrics` (of the last evaluation), `ranking` ([top-1, epoch] of the best epochs, best
first), and the state dicts `model`, `optimizer`, `scaler` and, where a weight average is kept, `ema`. Random state is
no part of it: every epoch begins from seeds of its own, made of the run's seed, the epoch and the rank.
"""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from attention.options import OptionError
from engine.config import flatten
from engine.distributed import World


def save(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes `checkpoint` to `path`, which afterwards is either the new file, whole, or what it was before."""
    unfinished = path.with_suffix(".tmp")
    torch.save(dict(checkpoint), unfinished)
    os.replace(unfinished, path)


def load(path: Path) -> dict[str, Any]:
    """Reads the checkpoint at `path` into main memory.

    Raises:
        OptionError: there is no such file, or it is no checkpoint of a run.
    """
    if not path.is_file():
        raise OptionError(str(path), "no checkpoint there")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise OptionError(str(path), "damaged, or no checkpoint that can be loaded safely") from error
    if not isinstance(checkpoint, dict) or "config" not in checkpoint:
        raise OptionError(str(path), "no checkpoint of train.py: it holds no configuration")
    return checkpoint


def find_last(directory: Path, config: Mapping[str, Any], world: World) -> dict[str, Any] | None:
    """The last checkpoint of the run in `directory`, None where there is none yet.

    Raises:
        OptionError: the run there has other options than `config`, or not every rank sees the same checkpoint.
    """
    path = directory / "last.pt"
    checkpoint = load(path) if path.exists() else None
    epoch = checkpoint["epoch"] if checkpoint else 0
    if world.sum(torch.tensor(epoch, device=world.device)) != epoch * world.size:
        raise OptionError(str(directory), "not every rank sees the same checkpoint; use a file system that all share")
    if checkpoint and (lines := _differences(checkpoint["config"], config)):
        raise OptionError(
            str(directory),
            "holds a run with other options; resume it with its own, or start afresh in another directory\n  "
            + "\n  ".join(lines),
        )
    return checkpoint


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """One line per option that two runs do not share, but for those that do not change what is learned."""
    there, here = flatten(there), flatten(here)
    keys = sorted((there.keys() | here.keys()) - {"data.root", "data.workers", "train.log_every"})
    absent = "absent"
    return [
        f"{key}: {there.get(key, absent)} there, {here.get(key, absent)} here"
        for key in keys
        if there.get(key, absent) != here.get(key, absent)
    ]


def rank_epoch(ranking: list[list], epoch: int, top1: float, keep: int) -> list[list]:
    """The `keep` best [top-1, epoch] of `ranking` and the new epoch, best first; of equals the earlier."""
    return sorted([*ranking, [top1, epoch]], key=lambda entry: (-entry[0], entry[1]))[:keep]


def save_epoch(directory: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes `last.pt`; `best.pt` and `epoch_N.pt` too where the epoch earned its place in the ranking.

    `epoch_*.pt` of epochs that left the ranking are removed. `last.pt` is written last: until it stands, a resumed run
    repeats the epoch and all that is written here. timm's `CheckpointSaver` has no place for the step and the ranking.
    """
    epochs = [epoch for _, epoch in checkpoint["ranking"]]
    if checkpoint["epoch"] in epochs:
        save(directory / f"epoch_{checkpoint['epoch']}.pt", checkpoint)
    if checkpoint["epoch"] == next(iter(epochs), None):
        save(directory / "best.pt", checkpoint)
    save(directory / "last.pt", checkpoint)
    for path in set(directory.glob("epoch_*.pt")) - {directory / f"epoch_{epoch}.pt" for epoch in epochs}:
        path.unlink()
