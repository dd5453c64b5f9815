"""Checkpoints of a run: written completely or not at all, verified when read, plain types only.

A run directory holds `step_S.pt`, made within an epoch and before its evaluation, and `step_S_epoch_E.pt`, made after
epoch E and its evaluation, each with its SHA-256 beside it in the format of sha256sum. A checkpoint is a dict. Its
metadata: `config` (the resolved configuration, plain), `processes` and `images` (their numbers), `progress` (the fields
of `Progress`), and what identifies the data and a teacher (`IDENTITY`). Its state dicts: `model`, `optimizer`, `scaler`
and, if a weight average is kept, `model_ema`, timm's name for it. Random state is not saved: see `engine.sampler`.
"""

import argparse
import hashlib
import io
import json
import pickle
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from attention.options import nearest, parse_options
from engine.checkpoint_format import (
    ForeignFile,
    ReleasedFile,
    check_plain,
    read_archive,
    read_foreign,
    read_safetensors,
)
from engine.config import ConfigError, dump_run, flatten, parse_run
from engine.data import difference
from engine.distributed import World
from engine.errors import UserError, one_line
from engine.files import digest_path, is_intact, read_digests, read_regular, write_verified
from engine.local_dir import find_weights_file, is_local_dir, read_local_dir
from engine.optim import create_optimizer, restore_optimizer
from engine.progress import Progress, check_progress
from engine.released import from_released_file
from engine.schema import Run
from engine.weights import is_finite, list_not_finite, load_weights

RESUMABLE_OPTIONS = {
    "data.root",
    "data.classes",
    "data.workers",
    "data.max_broken",
    "data.broken_val",
    "train.log_every",
    "train.keep_checkpoints",
    "train.checkpoint_steps",
    "train.checkpoint_minutes",
    "train.timeout_minutes",
    "train.max_skipped",
    "train.max_overflows",
    "report.wandb",
    "report.mlflow",
}
"""Options that do not affect what is learned: a run may be resumed with other values."""

METADATA = ("config", "processes", "images", "progress")
"""What a checkpoint holds besides state dicts."""

IDENTITY = ("classes", "train_files", "val_files", "teacher_weights")
"""Metadata that checkpoints of earlier versions lack: `engine.data.identify_data`, and of a teacher a digest."""

CHANGEABLE = "what may differ: an option, processes, images, classes, train_files, val_files or teacher_weights"
"""Help on --allow-change: how a run may differ from the one that it continues."""

Weights = Literal["plain", "ema"]

WEIGHTS: dict[Weights, str] = {"plain": "model", "ema": "model_ema"}
"""Kind of weights, as trained or averaged -> its state dict in a checkpoint."""

Stateful = nn.Module | Optimizer | torch.amp.GradScaler
"""What has a state dict in a checkpoint."""

NAME = re.compile(r"step_(\d+)(?:_epoch_(\d+))?\.pt")

NUM_LAST = 2
"""How many of the newest checkpoints are kept, besides the best: a file may be damaged after it was written."""


class ForeignCheckpoint(UserError):
    """A healthy file of another program: it holds no run, or one that cannot be had here."""


class Checkpoints:
    """The checkpoints of `run`, on `num_images` training images, in `directory`, which this process has locked.

    Args:
        identity: of the data, see `engine.data.identify_data`, and of a teacher, `engine.distill.Criterion.identity`.
    """

    def __init__(
        self, directory: Path, run: Run, world: World, num_images: int, identity: Mapping[str, Any] | None = None
    ):
        self.directory, self.options, self.world = directory, run.train, world
        self.metadata = {"config": dump_run(run), "processes": world.size, "images": num_images, **(identity or {})}
        self.saved_at = time.monotonic()

    def restore(self, stateful: Mapping[str, Stateful], allowed: Collection[str] = ()) -> Progress:
        """Loads the newest valid checkpoint into `stateful`; without one, nothing changes.

        Args:
            stateful: name of a state dict -> what it is loaded into.
            allowed: options, or names in the metadata, that may differ from the checkpoint's, besides
                `RESUMABLE_OPTIONS`.
        Raises:
            UserError: the run there has other options or data, or options that this version cannot read; its weights or
                the optimiser's state do not fit; it has more epochs than are asked for; or not every rank sees the same
                checkpoint.
        """
        found = find_checkpoint(self.directory, "last", quiet=not self.world.is_primary)
        progress = parse_options(Progress, found[1]["progress"]) if found else Progress()
        if self.world.gather([progress.epoch, progress.step]) != [[progress.epoch, progress.step]] * self.world.size:
            problem = "not every rank sees the same checkpoint; use a file system that all share"
            raise UserError(f"{self.directory}: {problem}")
        here = _flatten_metadata(self.metadata)
        for key in allowed:
            if key not in here:
                raise UserError(f"--allow-change: {key!r} is no option{nearest(key, here)}")
        if found is None:
            return progress
        path, checkpoint = found
        run = self._read_run(path, checkpoint)
        there = _flatten_metadata(checkpoint | {"config": dump_run(run)})
        here = {key: value for key, value in here.items() if key not in IDENTITY or key in there}
        if lines := list_differences(there, here, allowed):
            raise UserError(
                f"{self.directory}: holds a run with other options or data; resume it with its own, start afresh in"
                " another directory, or allow a change with --allow-change KEY\n  " + "\n  ".join(lines)
            )
        epochs, before = here["schedule.epochs"], there["schedule.epochs"]
        if epochs <= progress.epoch and epochs != before:
            raise UserError(
                f"{self.directory}: schedule.epochs = {epochs}, but {progress.epoch} of {before} epochs are done there;"
                f" choose more than {progress.epoch}"
            )
        for name, target in stateful.items():
            state = checkpoint.get(name)
            if isinstance(target, nn.Module):  # a new average begins from the weights
                load_weights(target, state or checkpoint.get("model", {}), f"{self.directory}: {name}")
            elif not isinstance(target, Optimizer):
                target.load_state_dict(state or target.state_dict())
            elif all(there[key] == here[key] for key in ("optim.opt", "train.freeze")):  # its state is of these weights
                former = create_optimizer(cast(nn.Module, stateful["model"]), run.optim, run.train.total_batch_size)
                restore_optimizer(target, checkpoint[name], former, f"{self.directory}: {name}")
        return progress

    def _read_run(self, path: Path, checkpoint: Mapping[str, Any]) -> Run:
        """The run in `checkpoint` as this version reads it: options may have been renamed or added since."""
        try:
            return parse_run(checkpoint["config"], "its configuration")
        except ConfigError as error:
            raise UserError(f"{path}: this version cannot resume it; {error}") from None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after update `step` of the run."""
        steps = self.options.checkpoint_steps
        return bool(steps and step % steps == 0)

    def is_overdue(self) -> bool:
        """Whether the last checkpoint is too old; by the clock of this rank, which the others need not share."""
        minutes = self.options.checkpoint_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, progress: Progress, stateful: Mapping[str, Stateful]) -> None:
        """Writes a checkpoint, on the primary rank, and removes those that are neither among the newest nor the best.

        Raises:
            FloatingPointError: a weight, or the optimiser's state, is not finite; nothing is written.
            OSError: it cannot be written; existing files are unchanged.
        """
        if self.world.is_primary:
            self._save(progress, stateful)
        self.saved_at = time.monotonic()

    def _save(self, progress: Progress, stateful: Mapping[str, Stateful]) -> None:
        if bad := _find_not_finite(stateful):
            raise FloatingPointError(f"step {progress.step}: {bad} is not finite; no checkpoint was made of it")
        name = f"step_{progress.step}" + (f"_epoch_{progress.epoch}" if not progress.images else "")
        self.write(self.directory / f"{name}.pt", progress, stateful)
        self._rotate(progress)

    def write(self, path: Path, progress: Progress, stateful: Mapping[str, Stateful]) -> None:
        """Writes a checkpoint to `path`, whatever its state is."""
        states = {name: source.state_dict() for name, source in stateful.items()}
        save_checkpoint(path, self.metadata | {"progress": asdict(progress)} | states)

    def _rotate(self, progress: Progress) -> None:
        newest, *others = list_checkpoints(self.directory)
        if not is_intact(newest):
            print(f"{newest}: not what was written to it; all older checkpoints are kept", file=sys.stderr, flush=True)
            return
        best = {epoch for _, epoch in progress.ranking + progress.ema_ranking}
        for path in others[NUM_LAST - 1 :]:
            match = NAME.fullmatch(path.name)
            if match is None or match[2] is None or int(match[2]) not in best:
                path.unlink()
                digest_path(path).unlink(missing_ok=True)


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, newest first."""
    found = [(match, path) for path in directory.glob("step_*.pt") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda entry: (int(entry[0][1]), entry[0][2] or ""), reverse=True)]


def find_checkpoint(
    directory: Path, which: Literal["best", "last"], quiet: bool = False, weights: Weights = "plain"
) -> tuple[Path, dict[str, Any]] | None:
    """The path and content of the best or the newest checkpoint in `directory`; None if there is none.

    Args:
        which: "best": of the epoch that ranks first, see `Progress`, or the newest if none has been ranked.
        quiet: do not name on stderr the damaged ones that are passed over. weights: by whose ranking.
    Raises:
        UserError: all of them are damaged.
    """
    paths = list_checkpoints(directory)
    last = _first_whole(paths, quiet)
    if last is None and paths:
        if list_checkpoints(directory) == paths:
            raise UserError(f"{directory}: none of its checkpoints is whole; start afresh in another directory")
        return find_checkpoint(directory, which, quiet, weights)  # a running training has replaced them meanwhile
    if last is None or which == "last":
        return last
    progress = parse_options(Progress, last[1]["progress"])
    ranking = progress.ranking if weights == "plain" else progress.ema_ranking
    ranked = {match[2]: path for path in paths if (match := NAME.fullmatch(path.name)) and match[2]}
    return _first_whole([ranked[str(epoch)] for _, epoch in ranking if str(epoch) in ranked], quiet) or last


def find_weights(
    path: Path, which: Literal["best", "last"], weights: Weights | None
) -> list[tuple[Path, dict[str, Any], list[Weights]]]:
    """Path and content of the checkpoints to take weights from, and the kinds to take from each, averaged ones last.

    Args:
        path: a checkpoint file, the directory of a run, in which `find_checkpoint` chooses for each kind, or one in
            timm's `local-dir:` layout.
        weights: None: all kinds that are kept.
    Raises:
        UserError: there is no checkpoint, or none with such weights.
    """
    if not path.exists():
        raise UserError(f"{path}: no such run directory or checkpoint")
    file: tuple[Path, dict[str, Any]] | None
    if is_local_dir(path) and not list_checkpoints(path):
        file = find_weights_file(path), load_local_dir(path)
    else:
        file = None if path.is_dir() else (path, load_checkpoint(path))
    chosen: dict[Path, tuple[dict[str, Any], list[Weights]]] = {}
    for kind in [weights] if weights else WEIGHTS:
        found = file or find_checkpoint(path, which, weights=kind)
        if found is None:
            raise UserError(f"{path}: no checkpoint there")
        at, content = found
        if WEIGHTS[kind] in content:
            chosen.setdefault(at, (content, []))[1].append(kind)
    if not chosen:
        raise UserError(f"{at}: holds no {weights} weights, only {', '.join(kept_weights(content))}")
    return [(at, *entry) for at, entry in chosen.items()]


def parse_weights(text: str) -> Weights:
    """The kind of weights that the argument --weights names."""
    for kind in WEIGHTS:
        if kind == text:
            return kind
    renamed = f"; the {text} checkpoint is --select {text}" if text in ("best", "last") else ""
    raise argparse.ArgumentTypeError(f"{text!r} is no kind of weights, {' or '.join(WEIGHTS)}{renamed}")


def _first_whole(paths: Sequence[Path], quiet: bool) -> tuple[Path, dict[str, Any]] | None:
    for path in paths:
        try:
            return path, load_checkpoint(path, need_digest=True)
        except UserError as error:
            if not quiet:
                print(f"{error}; passed over", file=sys.stderr, flush=True)
    return None


def save_checkpoint(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes `checkpoint` to `path`, with its SHA-256, if `load_checkpoint` will read it.

    Raises:
        ValueError: it would not; nothing is written. OSError: it cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    content = buffer.getvalue()
    try:
        _check_values(read_archive(content))
    except (ValueError, pickle.UnpicklingError) as error:  # of the reader; too little memory is another matter
        raise ValueError(f"{path}: not written, as it could not be read again: {error}") from error
    write_verified(path, content)


def load_checkpoint(path: Path, need_digest: bool = False) -> dict[str, Any]:
    """Reads the checkpoint at `path` into main memory; the file need not be trusted.

    No code in the file is run, and no more memory is used than a few times its size. A SHA-256 beside it must match.

    Args:
        need_digest: refuse a file without a SHA-256 beside it.
    Raises:
        UserError: there is no such file, or it is not a regular file, is damaged, or is no checkpoint of a run.
    """
    if path.suffix in (".onnx", ".pt2"):
        raise UserError(f"{path}: a graph without a configuration; name the run or checkpoint that it was made of")
    digests = read_digests(path)  # a running training removes the file before its digest,
    content = read_regular(path)
    digests += read_digests(path)  # and replaces both
    if not digests and need_digest:
        raise UserError(f"{path}: without the SHA-256 that should stand beside it")
    if digests and hashlib.sha256(content).hexdigest() not in digests:
        raise UserError(f"{path}: damaged, or no checkpoint that can be loaded safely: its SHA-256 is another")
    return parse_checkpoint(content, str(path))


def load_local_dir(directory: Path) -> dict[str, Any]:
    """The checkpoint in a directory in timm's `local-dir:` layout, which need not be trusted; timm's keep no history.

    Raises:
        UserError: it is damaged, or holds no model of `models.MODELS`.
    """
    try:
        return load_checkpoint(find_weights_file(directory))
    except ForeignCheckpoint:
        return read_local_dir(directory)


def parse_checkpoint(content: bytes, source: str) -> dict[str, Any]:
    """The checkpoint in the bytes of a file, as `save_checkpoint`, `engine.export` or the released code of EVA and LARA
    writes it.

    Raises:
        UserError: damaged, or no checkpoint of a run (ForeignCheckpoint where another program wrote it); the message
            begins with `source`.
    """
    try:
        try:
            checkpoint = _read_own(content)
        except ReleasedFile:
            checkpoint = from_released_file(read_foreign(content))
        _check_values(checkpoint)
    except UserError as error:  # what only the released code can do
        raise ForeignCheckpoint(f"{source}: {error}") from None
    except ForeignFile as error:
        raise ForeignCheckpoint(
            f"{source}: no checkpoint of train.py: it holds no configuration; it seems to be {error}, and"
            f" `python -m models.convert {source} FILE.safetensors --config CONFIG.yaml` makes one of it, where"
            " CONFIG.yaml describes its model"
        ) from None
    except Exception as error:  # a hostile file may fail in any way, and is refused in every case
        reason = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
        raise UserError(f"{source}: damaged, or no checkpoint that can be loaded safely ({reason})") from error
    return checkpoint


def _read_own(content: bytes) -> dict[str, Any]:
    """The checkpoint in a file of this project."""
    if content[8:9] == b"{":
        weights, metadata = read_safetensors(content)
        checkpoint = json.loads(metadata)
        return checkpoint | {WEIGHTS[_exported_weights(checkpoint)]: weights}
    checkpoint = read_archive(content)
    if not isinstance(checkpoint, dict):
        raise ValueError(f"holds a {type(checkpoint).__name__}")
    if "ema" in checkpoint:  # its name in earlier versions
        checkpoint["model_ema"] = checkpoint.pop("ema")
    return checkpoint


def kept_weights(checkpoint: Mapping[str, Any]) -> list[Weights]:
    """The kinds of weights that `checkpoint` holds."""
    return [kind for kind, key in WEIGHTS.items() if key in checkpoint]


def _exported_weights(metadata: Mapping[str, Any]) -> Weights:
    """The kind of weights in an exported file. Earlier versions exported the average where there was one."""
    return metadata.get("weights") or ("ema" if metadata["config"]["train"].get("ema_decay") else "plain")


def _check_values(checkpoint: Mapping[str, Any]) -> None:
    """Checks the metadata and the weights of a checkpoint that has been read."""
    if not {*METADATA} <= checkpoint.keys() or not kept_weights(checkpoint):
        raise ValueError(f"holds {', '.join(map(repr, checkpoint))} only")
    check_plain({name: checkpoint[name] for name in METADATA})
    check_progress(checkpoint["progress"])
    _check_identity(checkpoint)
    for key in WEIGHTS.values():
        weights = checkpoint.get(key, {}).items()
        if not all(isinstance(name, str) and name.isprintable() and torch.is_tensor(x) for name, x in weights):
            raise ValueError(f"{key} are no weights")


def _check_identity(checkpoint: Mapping[str, Any]) -> None:
    """Checks the metadata `IDENTITY`, whose number of values is that of the classes."""
    classes, digests = checkpoint.get("classes", []), [checkpoint.get(name, "") for name in IDENTITY[1:]]
    if not isinstance(classes, list) or not all(isinstance(text, str) for text in classes + digests):
        raise ValueError("class names or digests that are none")


def _find_not_finite(stateful: Mapping[str, Stateful]) -> str | None:
    """The name of a weight, or of a tensor of the optimiser, that is not finite."""
    for key, source in stateful.items():
        if isinstance(source, nn.Module):
            bad = list_not_finite(source, source.state_dict())
        elif isinstance(source, Optimizer):
            states = enumerate(source.state.values())
            named = ((f"{i}.{name}", x) for i, state in states for name, x in state.items() if torch.is_tensor(x))
            bad = [name for name, tensor in named if not is_finite(tensor)]
        else:
            continue
        if bad:
            return f"{key}.{bad[0]}"
    return None


def _flatten_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    names = ("processes", "images", *IDENTITY)
    return flatten(metadata["config"]) | {name: metadata[name] for name in names if name in metadata}


def list_differences(there: Mapping[str, Any], here: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """One line for each option in which the run `here` may not differ from the run `there`, but does.

    Besides `RESUMABLE_OPTIONS` and `allowed`, a mechanism's `released` may differ: it only chooses the defaults of
    other options, which are compared themselves.

    Args:
        there, here: dotted path of an option -> value.
    """
    absent = "absent"

    def describe(key: str) -> str:
        if key == "classes":
            return difference(there.get(key, []), here.get(key, []), ("the run there", "the data here"))
        return f"{there.get(key, absent)} there, {here.get(key, absent)} here"

    changed = {key for key in there.keys() | here.keys() if there.get(key, absent) != here.get(key, absent)}
    modes = {key for key in changed if key.startswith("attention.") and key.endswith(".released")}
    return [f"{key}: {describe(key)}" for key in sorted(changed - modes - RESUMABLE_OPTIONS - set(allowed))]
