"""Checkpoints of a run: written whole or not at all, verified when read, plain types only.

A run directory holds `step_S.pt`, made within an epoch, and `step_S_epoch_E.pt`, made after epoch E and its
evaluation; beside each stands its SHA-256 in the format of sha256sum. A checkpoint is a dict: `config` (the resolved
configuration, plain), `processes` and `images` (how many train, on how many), `progress` (the fields of `Progress`)
and the state dicts `model`, `optimizer`, `scaler` and, where a weight average is kept, `ema`. Random state is no part
of it: see `engine.sampler`.
"""

import hashlib
import io
import json
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import nn
from torch.optim import Optimizer

from attention.options import OptionError, nearest, parse_options
from engine.config import dump_run, flatten
from engine.distributed import World
from engine.files import digest_path, is_intact, read_digest, read_regular, write_verified
from engine.inspection import check_plain, inspect
from engine.schema import Run

FREE = {
    "data.root",
    "data.workers",
    "train.log_every",
    "train.keep_checkpoints",
    "train.checkpoint_steps",
    "train.checkpoint_minutes",
    "train.timeout_minutes",
    "train.max_skipped",
}
"""Options that do not change what is learned: a run may be resumed with others."""

FACTS = ("config", "processes", "images", "progress")
"""What a checkpoint holds beside states."""

NAME = re.compile(r"step_(\d+)(?:_epoch_(\d+))?\.pt")

NUM_LAST = 2
"""How many of the newest checkpoints stay, beside the best: a file may be damaged after it was written."""


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        epoch: finished epochs, evaluation included. step: finished updates, of all epochs.
        images: position in the order of the epoch that is not finished, over all ranks.
        loss_sum, num_summed: of the updates since the last log line. num_skipped: updates that were not finite.
        metrics: of the last evaluation. ranking: [top-1, epoch] of the best epochs, best first.
    """

    epoch: int = 0
    step: int = 0
    images: int = 0
    loss_sum: float = 0.0
    num_summed: int = 0
    num_skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    ranking: list[list] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of `run`, on `num_images` training images, in `directory`, which this process owns."""

    def __init__(self, directory: Path, run: Run, world: World, num_images: int):
        self.directory, self.options, self.world = directory, run.train, world
        self.facts = {"config": dump_run(run), "processes": world.size, "images": num_images}
        self.saved_at = time.monotonic()

    def restore(self, parts: Mapping[str, Any], allowed: Collection[str] = ()) -> Progress:
        """Loads the newest valid checkpoint into `parts`; where there is none, they stay as they are.

        Args:
            parts: name -> module, optimiser or scaler.
            allowed: options that may differ from the checkpoint's, beside `FREE`.
        Raises:
            OptionError: the run there has other options, its weights do not fit, or not every rank sees the same
                checkpoint.
        """
        found = find(self.directory, "last", quiet=not self.world.is_primary)
        checkpoint = found and found[1]
        progress = parse_options(Progress, checkpoint["progress"]) if checkpoint else Progress()
        if self.world.gather([progress.epoch, progress.step]) != [[progress.epoch, progress.step]] * self.world.size:
            problem = "not every rank sees the same checkpoint; use a file system that all share"
            raise OptionError(str(self.directory), problem)
        here = _flatten_facts(self.facts)
        for key in allowed:
            if key not in here:
                raise OptionError("--allow-change", f"{key!r} is no option{nearest(key, here)}")
        if checkpoint is None:
            return progress
        there = _flatten_facts(checkpoint)
        if lines := _differences(there, here, FREE.union(allowed)):
            raise OptionError(
                str(self.directory),
                "holds a run with other options; resume it with its own, start afresh in another directory, or allow a"
                " change with --allow-change KEY\n  " + "\n  ".join(lines),
            )
        for name, part in parts.items():
            state = checkpoint.get(name)
            if isinstance(part, nn.Module):  # an average that is new begins from the weights
                load_weights(part, state or checkpoint["model"], f"{self.directory}: {name}")
            elif not isinstance(part, Optimizer):
                part.load_state_dict(state or part.state_dict())
            elif there["optim.opt"] == here["optim.opt"]:
                new = part.state_dict()["param_groups"]  # of this configuration: a change may have been allowed
                groups = [group | {"lr": old["lr"]} for group, old in zip(new, state["param_groups"], strict=True)]
                part.load_state_dict({"state": state["state"], "param_groups": groups})
        return progress

    def is_due(self, step: int) -> bool:
        """Whether, by steps or by time, a checkpoint is to be made after update `step`, within an epoch."""
        steps, minutes = self.options.checkpoint_steps, self.options.checkpoint_minutes
        by_time = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        return by_time or bool(steps and step % steps == 0)

    def save(self, progress: Progress, parts: Mapping[str, Any]) -> None:
        """Writes a checkpoint, and removes those that are neither among the newest nor the best.

        Raises:
            FloatingPointError: a weight, or the optimiser's state, is not finite; nothing is written.
            OSError: it cannot be written; the files that were there stand.
        """
        if not self.world.is_primary:
            return
        if bad := _find_not_finite(parts):
            raise FloatingPointError(f"step {progress.step}: {bad} is not finite; no checkpoint was made of it")
        name = f"step_{progress.step}" + (f"_epoch_{progress.epoch}" if not progress.images else "")
        self.write(self.directory / f"{name}.pt", progress, parts)
        self._rotate(progress)
        self.saved_at = time.monotonic()

    def write(self, path: Path, progress: Progress, parts: Mapping[str, Any]) -> None:
        """Writes `parts` as they are to `path`."""
        states = {name: part.state_dict() for name, part in parts.items()}
        save(path, self.facts | {"progress": asdict(progress)} | states)

    def _rotate(self, progress: Progress) -> None:
        newest, *others = list_checkpoints(self.directory)
        if not is_intact(newest):
            print(f"{newest}: not what was written to it; all older checkpoints are kept", file=sys.stderr, flush=True)
            return
        best = {epoch for _, epoch in progress.ranking}
        for path in others[NUM_LAST - 1 :]:
            epoch = NAME.fullmatch(path.name)[2]
            if epoch is None or int(epoch) not in best:
                path.unlink()
                digest_path(path).unlink(missing_ok=True)


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, newest first."""
    found = [(match, path) for path in directory.glob("step_*.pt") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda entry: (int(entry[0][1]), entry[0][2] or ""), reverse=True)]


def find(directory: Path, which: Literal["best", "last"], quiet: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The best or the newest checkpoint in `directory`, and its path; None where there has been none.

    Args:
        which: "best": of the epoch with the highest top-1; the newest as long as none was evaluated.
        quiet: do not say on stderr what is passed over, as not whole.
    Raises:
        OptionError: none of them is whole.
    """
    paths = list_checkpoints(directory)
    last = _first_whole(paths, quiet)
    if last is None and paths:
        if list_checkpoints(directory) == paths:
            raise OptionError(str(directory), "none of its checkpoints is whole; start afresh in another directory")
        return find(directory, which, quiet)  # a running training has replaced them meanwhile
    if last is None or which == "last":
        return last
    ranking = parse_options(Progress, last[1]["progress"]).ranking
    ranked = {match[2]: path for path in paths if (match := NAME.fullmatch(path.name))[2]}
    return _first_whole([ranked[str(epoch)] for _, epoch in ranking if str(epoch) in ranked], quiet) or last


def _first_whole(paths: Sequence[Path], quiet: bool) -> tuple[Path, dict[str, Any]] | None:
    for path in paths:
        try:
            return path, load(path, need_digest=True)
        except OptionError as error:
            if not quiet:
                print(f"{error}; passed over", file=sys.stderr, flush=True)
    return None


def save(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes `checkpoint` to `path`, with its SHA-256."""
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    write_verified(path, buffer.getbuffer())


def export(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes the weights alone, those of the average where there is one, to `path` in the safetensors format.

    The configuration goes along as metadata, so that `load` reads the file as a checkpoint.
    """
    weights = checkpoint.get("ema", checkpoint["model"])
    facts = json.dumps({name: checkpoint[name] for name in FACTS})
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    write_verified(path, safetensors.torch.save(contiguous, metadata={"run": facts}))


def load(path: Path, need_digest: bool = False) -> dict[str, Any]:
    """Reads the checkpoint at `path` into main memory, whoever made it.

    It runs no code of the file's, and takes no more memory than a few times the file's size. Where a SHA-256 stands
    beside it, the file must have it.

    Args:
        need_digest: refuse a file without a SHA-256 beside it.
    Raises:
        OptionError: there is no such file, it is no regular file, not whole, or no checkpoint of a run.
    """
    digest = read_digest(path)  # first: a running training removes the file before its digest
    content = read_regular(path)
    if digest is None and need_digest:
        raise OptionError(str(path), "without the SHA-256 that should stand beside it")
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise OptionError(str(path), "damaged, or no checkpoint that can be loaded safely: its SHA-256 is another")
    try:
        if path.suffix == ".safetensors":
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            checkpoint = json.loads(header["__metadata__"]["run"]) | {"model": safetensors.torch.load(content)}
        else:
            inspect(content)
            checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        check_plain({name: checkpoint.get(name) for name in FACTS})
        for part in ("model", "ema"):
            weights = checkpoint.get(part, {})
            if not all(isinstance(name, str) and torch.is_tensor(value) for name, value in weights.items()):
                raise ValueError(f"{part} are no weights")
    except Exception as error:  # a hostile file may fail in any way, and is refused in every case
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise OptionError(str(path), f"damaged, or no checkpoint that can be loaded safely ({reason})") from error
    if not {*FACTS, "model"} <= checkpoint.keys():
        raise OptionError(str(path), "no checkpoint of train.py: it holds no configuration")
    return checkpoint


def load_weights(model: nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Loads `state` into `model`; names may begin with what wrappers of torch put before them.

    Raises:
        OptionError: names or shapes that do not fit, or weights that are not finite; begins with `source`.
    """
    state = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): value for name, value in state.items()}
    own = model.state_dict()
    problems = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)} for {tuple(own[name].shape)}"
            for name in own
            if name in state and state[name].shape != own[name].shape
        ],
        "not finite": [name for name, _ in model.named_parameters() if name in state and not _is_finite(state[name])],
    }
    if any(problems.values()):
        texts = [
            f"{len(names)} {problem}: {', '.join(names[:5])}{', ...' * (len(names) > 5)}"
            for problem, names in problems.items()
            if names
        ]
        raise OptionError(source, f"the checkpoint's weights do not fit: {'; '.join(texts)}")
    model.load_state_dict(state)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _find_not_finite(parts: Mapping[str, Any]) -> str | None:
    """The name of a weight, or of a piece of the optimiser's state, that is not finite. Buffers may be so by design."""
    for part, tensors in parts.items():
        if isinstance(tensors, nn.Module):
            named = tensors.named_parameters()
        elif isinstance(tensors, Optimizer):
            states = enumerate(tensors.state.values())
            named = ((f"{i}.{name}", x) for i, state in states for name, x in state.items() if torch.is_tensor(x))
        else:
            continue
        if bad := next((name for name, tensor in named if not _is_finite(tensor)), None):
            return f"{part}.{bad}"
    return None


def _flatten_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return flatten(facts["config"]) | {name: facts[name] for name in ("processes", "images")}


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], ignored: Collection[str]) -> list[str]:
    """One line per option that two runs do not share, but for the `ignored`."""
    absent = "absent"
    return [
        f"{key}: {there.get(key, absent)} there, {here.get(key, absent)} here"
        for key in sorted((there.keys() | here.keys()) - ignored)
        if there.get(key, absent) != here.get(key, absent)
    ]


def rank_epoch(ranking: list[list], epoch: int, top1: float, keep: int) -> list[list]:
    """The `keep` best [top-1, epoch] of `ranking` and the new epoch, best first; of equals the earlier."""
    return sorted([*ranking, [top1, epoch]], key=lambda entry: (-entry[0], entry[1]))[:keep]
