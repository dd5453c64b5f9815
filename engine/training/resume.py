"""Checkpoints of a run: those that are kept in its directory, and the one that it resumes from."""

import re
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from attention.options import nearest, parse_options
from engine.checkpoints.files import IDENTITY, load_checkpoint, newest_checkpoint, save_checkpoint
from engine.checkpoints.identify import CHECKPOINT_NAME, list_checkpoints
from engine.checkpoints.progress import Progress, Resumption
from engine.checkpoints.weights import list_not_finite, load_weights
from engine.config.schema import Run
from engine.run.load import dump_run, parse_run
from engine.runtime.distributed import World
from engine.runtime.errors import ConfigError, UserError
from engine.runtime.ownership import claim, owned_files, remove_owned
from engine.training.differences import TEACHER, find_differences, flatten_metadata, list_differences
from engine.training.optim import create_optimizer, restore_optimizer

Stateful = Mapping[str, nn.Module | Optimizer | torch.amp.GradScaler]
"""Name of a state dict in a checkpoint -> object that has it."""

NUM_LAST = 2
"""Number of newest checkpoints that are kept besides the best: a file may be damaged after it was written."""


class Checkpoints:
    """The checkpoints of `run`, on `num_images` training images, in `directory`, which this process has locked.

    Args:
        identity: metadata of the data, see `identify_data`, and of a teacher, see `Distillation.identity`.
    Attributes:
        resumed_from: checkpoint that the run resumes from, see `Resumed`.
    """

    def __init__(self, directory: Path, run: Run, world: World, num_images: int, identity: Mapping[str, Any] = {}):
        self.directory, self.run, self.world = directory, run, world
        self.metadata = {"config": dump_run(run), "processes": world.size, "images": num_images, **identity}
        self.saved_at = time.monotonic()
        self.resumed_from: Path | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after update `step` of the run."""
        steps = self.run.train.checkpoint_steps
        return bool(steps and step % steps == 0)

    def is_overdue(self) -> bool:
        """Returns whether the last checkpoint is too old by the clock of this rank; clocks of ranks may differ."""
        minutes = self.run.train.checkpoint_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, progress: Progress, stateful: Stateful) -> None:
        """Writes a checkpoint on the primary rank, and removes all others except the newest and the best ones.

        Raises:
            FloatingPointError: a weight, or the optimiser's state, is not finite; nothing is written.
            OSError: it cannot be written; existing files are unchanged.
        """
        if self.world.is_primary:
            if bad := _find_not_finite(stateful):
                raise FloatingPointError(f"step {progress.step}: {bad} is not finite; no checkpoint was made of it")
            name = f"step_{progress.step}" + (f"_epoch_{progress.epoch}" if not progress.images else "")
            path = self.directory / f"{name}.pt"
            # A checkpoint that the user put there, from which the run resumes, has this very state.
            if path != self.resumed_from or path in owned_files(self.directory):
                claim(self.directory, [path.name])
                states = {key: source.state_dict() for key, source in stateful.items()}
                save_checkpoint(path, self.metadata | {"progress": asdict(progress)} | states)
                self._rotate({epoch for _, epoch in progress.ranking + progress.ema_ranking})
        self.saved_at = time.monotonic()

    def _rotate(self, best: Collection[int]) -> None:
        newest, *others = list_checkpoints(self.directory)
        try:
            load_checkpoint(newest)
        except UserError as error:
            print(f"{error}; all older checkpoints are kept", file=sys.stderr, flush=True)
            return
        for path in others[NUM_LAST - 1 :]:
            match = CHECKPOINT_NAME.fullmatch(path.name)
            if match is None or match[2] is None or int(match[2]) not in best:
                remove_owned(self.directory, [path.name])


class Resumed:
    """The state from which a run begins: its newest valid checkpoint, or without one the beginning.

    Args:
        checkpoints: those of the run.
        allowed: options, or names in the metadata, that may differ from the checkpoint's, besides
            `engine.training.differences.RESUMABLE_OPTIONS`.
    Attributes:
        progress: that of the checkpoint. resumption: the checkpoint and what differs.
    Raises:
        UserError: the checkpoint's run has other options or data, or unknown options; it has more epochs than the
            configuration; or ranks have different data, or find different checkpoints.
    """

    def __init__(self, checkpoints: Checkpoints, allowed: Collection[str] = ()):
        directory, world, metadata = checkpoints.directory, checkpoints.world, checkpoints.metadata
        self.directory, self.is_primary = directory, world.is_primary
        self.resumption, self.former, self.content = Resumption(), checkpoints.run, dict[str, Any]()
        world.check_same_files({name: metadata.get(name) for name in IDENTITY})
        found = newest_checkpoint(directory, quiet=not world.is_primary)
        progress = self.progress = parse_options(Progress, found[1]["progress"]) if found else Progress()
        if world.gather([progress.epoch, progress.step]) != [[progress.epoch, progress.step]] * world.size:
            raise UserError(f"{directory}: not every rank sees the same checkpoint; use a file system that all share")
        for path in {*list_checkpoints(directory)} - {*owned_files(directory)}:
            match = CHECKPOINT_NAME.fullmatch(path.name)
            if match and (int(match[1]), bool(match[2])) > (progress.step, not progress.images):
                problem = "no whole checkpoint, and none that this run made; it would be written over"
                raise UserError(f"{path}: {problem}; move it away")
        known = flatten_metadata(metadata)
        for key in allowed:
            if key not in known:
                raise UserError(f"--allow-change: {key!r} is no option{nearest(key, known)}")
        if found is not None:
            checkpoints.resumed_from, self.content = found
            self._compare(*found, known, allowed)

    def _compare(self, path: Path, checkpoint: dict[str, Any], here: dict[str, Any], allowed: Collection[str]) -> None:
        """Compares the run of the checkpoint `path` with this one, whose options and metadata are `here`.

        Sets `resumption` and `former`.

        Raises:
            UserError: this run cannot go on from there.
        """
        try:  # new options have their defaults
            run = parse_run(checkpoint["config"], "its configuration", resumes=True)
        except ConfigError as error:
            raise UserError(f"{path}: this version cannot resume it; {error}") from None
        there = flatten_metadata(checkpoint | {"config": dump_run(run)})
        if TEACHER not in here:  # a run without a teacher
            there.pop(TEACHER, None)
        if lines := list_differences(there, here, allowed):
            raise UserError(
                f"{self.directory}: holds a run with other options or data; resume it with its own, start afresh in"
                " another directory, or allow a change with --allow-change KEY\n  " + "\n  ".join(lines)
            )
        epochs, before = here["schedule.epochs"], there["schedule.epochs"]
        if epochs <= (done := self.progress.epoch) and epochs != before:
            problem = f"schedule.epochs = {epochs}, but {done} of {before} epochs are done there"
            raise UserError(f"{self.directory}: {problem}; choose more than {done}")
        pairs = {key: (there.get(key), here.get(key)) for key in sorted(there.keys() | here.keys())}
        differences = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        changes = {key: pairs[key] for key in sorted(find_differences(there, here))}
        self.resumption, self.former = Resumption(path, differences, changes), run
        if any(re.match(r"val_|data\.(crop_|interpolation|mean|std)", key) for key in changes):  # other images
            self.progress.ranking, self.progress.ema_ranking = [], []

    def restore(self, stateful: Stateful) -> Progress:
        """Loads the checkpoint into `stateful`; without one, nothing changes. Returns the progress.

        Args:
            stateful: name of a state dict -> object that it is loaded into.
        Raises:
            UserError: the weights or the optimiser do not fit.
        """
        if not self.content:
            return self.progress
        afresh = self.resumption.changes.keys() & {"optim.opt", "train.freeze"}  # the optimiser's state does not fit
        if afresh and self.is_primary:
            names = " and ".join(sorted(afresh))
            print(f"{names} changed: the optimiser's state of all weights starts afresh", flush=True)
        for name, target in stateful.items():
            state = self.content.get(name)
            if isinstance(target, nn.Module):  # a new average starts from the weights
                load_weights(target, state or self.content.get("model", {}), f"{self.directory}: {name}")
            elif not isinstance(target, Optimizer):
                target.load_state_dict(state or target.state_dict())
            elif not afresh:
                model, options = cast(nn.Module, stateful["model"]), self.former
                former = create_optimizer(model, options.optim, options.train.total_batch_size)
                restore_optimizer(target, self.content[name], former, f"{self.directory}: {name}")
        return self.progress


def _find_not_finite(stateful: Stateful) -> str | None:
    """Returns the name of a weight, or of a tensor of the optimiser, that is not finite; None if all are."""
    for key, source in stateful.items():
        if isinstance(source, nn.Module):
            bad = list_not_finite(source, source.state_dict())
        elif isinstance(source, Optimizer):
            states = enumerate(source.state.values())
            named = ((f"{i}.{name}", x) for i, state in states for name, x in state.items() if torch.is_tensor(x))
            bad = [name for name, tensor in named if not tensor.isfinite().all()]
        else:
            continue
        if bad:
            return f"{key}.{bad[0]}"
    return None
