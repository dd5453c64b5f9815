"""Checkpoints of a run: written completely or not at all, verified when read, plain types only.

A run directory holds `step_S.pt`, made within an epoch and before its evaluation, and `step_S_epoch_E.pt`, made after
epoch E and its evaluation. CRCs inside it tell damage. A checkpoint is a dict. Its metadata: `config` (the resolved
configuration, plain), `processes` and `images` (their numbers), `progress` (the fields of `Progress`), and `IDENTITY`.
Its state dicts: `model`, `optimizer`, `scaler`, if a weight average is kept `model_ema`, timm's name for it. Random
state is not saved: see `engine.data.sampler`.
"""

import io
import json
import math
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from attention.options import parse_options
from engine.checkpoints.format import check_plain, read_archive
from engine.checkpoints.identify import CHECKPOINT_NAME, Found, Kind, damaged, identify, identify_file, list_checkpoints
from engine.checkpoints.local_dir import read_local_dir
from engine.checkpoints.progress import WEIGHTS, Progress, Weights, check_progress
from engine.checkpoints.released import Unsupported, from_released_file
from engine.runtime.errors import UserError
from engine.runtime.files import write_atomically
from engine.runtime.text import names_to_nfc

METADATA = ("config", "processes", "images", "progress")
"""Metadata of every checkpoint."""

IDENTITY = ("classes", "train_files", "train_content", "val_files", "val_content", "teacher_weights")
"""Metadata of the data (`engine.data.identity.identify_data`); also the teacher's digest if the run has a teacher."""

TRAINED = "trained_config"
"""Metadata of an export: the `config` of the training, where `config` is that of the exported model."""

NOISE = 2.0
"""Standard errors of a difference of accuracies that count as noise."""


class Opened(NamedTuple):
    """Weights of a source: their checkpoint, its content, their kind, and why they are not the averaged ones ("").

    `kept` has path and content of the checkpoint for each kind that is kept, averaged weights last.
    """

    path: Path
    checkpoint: dict[str, Any]
    weights: Weights
    note: str
    kept: Mapping[Weights, tuple[Path, dict[str, Any]]]


def newest_checkpoint(directory: Path, quiet: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """Returns the path and content of the newest checkpoint in `directory`, from which its run resumes; None: no one.

    Args:
        quiet: do not name on stderr the damaged checkpoints that are passed over.
    Raises:
        UserError: all of them are damaged.
    """
    paths = list_checkpoints(directory)
    if (last := _first_whole(paths, quiet)) is None and paths:
        if list_checkpoints(directory) == paths:
            remedy = "copy them again, or start afresh in another directory"
            raise UserError(f"{directory}: none of its checkpoints is whole; {remedy}")
        # a running training has replaced them meanwhile
        return newest_checkpoint(directory, quiet)
    return last


def open_weights(
    source: Path | Found, which: Literal["best", "last"] = "best", weights: Weights | None = None
) -> Opened:
    """Opens the weights of a run, a checkpoint or an export; of two kinds, those that `prefer` takes by the last
    evaluations that their checkpoints record.

    Args:
        source: a run directory, a file, or what `identify` has found there.
        which: checkpoint of a run directory: "best", of each kind of weights that of the epoch that ranks first by it,
            see `Progress`, or the newest if none has a finite score; "last", the newest.
        weights: None: any kind that is kept.
    Raises:
        UserError: there is no checkpoint, or none with such weights.
    """
    found = identify(source) if isinstance(source, Path) else source
    last = newest_checkpoint(found.path) if found.kind is Kind.RUN else (found.path, _load(found))
    if last is None:
        raise UserError(f"{found.path}: no checkpoint there")
    kept: dict[Weights, tuple[Path, dict[str, Any]]] = {}
    for kind in [weights] if weights else WEIGHTS:
        best = _best(found.path, last[1], kind) if found.kind is Kind.RUN and which == "best" else None
        at, content = best or last
        if WEIGHTS[kind] in content:
            kept[kind] = at, content
    if not kept:
        raise UserError(f"{at}: holds no {weights} weights, only {', '.join(kept_weights(content))}")
    chosen, note = prefer({kind: _recorded(checkpoint, kind) for kind, (_, checkpoint) in kept.items()})
    return Opened(*kept[chosen], chosen, note, kept)


def _best(directory: Path, last: Mapping[str, Any], weights: Weights) -> tuple[Path, dict[str, Any]] | None:
    """Returns the best checkpoint by one kind of weights, by the ranking that the checkpoint `last` has."""
    progress = parse_options(Progress, last["progress"])
    ranking = progress.ranking if weights == "plain" else progress.ema_ranking
    matches = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in list_checkpoints(directory))
    ranked = {match[2]: path for match, path in matches if match and match[2]}
    best = [ranked[str(epoch)] for score, epoch in ranking if str(epoch) in ranked and math.isfinite(score)]
    return _first_whole(best, quiet=False)


def prefer(metrics: Mapping[Weights, Mapping[str, Any]]) -> tuple[Weights, str]:
    """Chooses a kind of weights by its metrics, and says why if both are there and it is not the averaged one.

    Plain weights are better if their top-1 is higher by more than `NOISE` standard errors of the difference of two
    proportions. A loss has no such bound: plain weights are better only where theirs alone is finite.

    Args:
        metrics: kind -> `top1` (percent), `images` and `loss`; those that were measured.
    """
    if len(metrics) < 2:
        return next(iter(metrics)), ""
    plain, averaged = metrics["plain"], metrics["ema"]
    rates = [each.get("top1", math.nan) / 100 for each in (plain, averaged)]
    if all(0 <= rate <= 1 for rate in rates):
        error = math.sqrt(sum(rate * (1 - rate) for rate in rates) / max(1, plain.get("images", 1)))
        if rates[0] - rates[1] > NOISE * error:
            found = f"top-1 {plain['top1']:.2f} %, that of the averaged ones {averaged['top1']:.2f} %"
            return "plain", f"the plain weights, which were measured as better: {found}"
    elif math.isfinite(plain.get("loss", math.nan)) and not math.isfinite(averaged.get("loss", 0.0)):
        return "plain", "the plain weights, as the loss of the averaged ones is not finite"
    return "ema", ""


def _recorded(checkpoint: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Returns the metrics of one kind of weights in a checkpoint."""
    metrics, prefix = checkpoint["progress"].get("metrics", {}), "ema_" if weights == "ema" else ""
    names = {"top1": f"{prefix}top1", "loss": f"{prefix}loss", "images": "images"}
    return {name: metrics[key] for name, key in names.items() if key in metrics}


def _first_whole(paths: Sequence[Path], quiet: bool) -> tuple[Path, dict[str, Any]] | None:
    for path in paths:
        try:
            return path, load_checkpoint(path)
        except UserError as error:
            if not quiet:
                print(f"{error}; passed over", file=sys.stderr, flush=True)
    return None


def save_checkpoint(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Writes `checkpoint` to `path`.

    Raises:
        ValueError: `load_checkpoint` would refuse it; nothing is written. OSError: it cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    content = buffer.getvalue()
    try:
        _check_values(read_archive(content).own())
    except (ValueError, pickle.UnpicklingError) as error:  # too little memory is another matter
        raise ValueError(f"{path}: not written, as it could not be read again: {error}") from error
    write_atomically(path, content)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint file into main memory; the file need not be trusted.

    No code in the file is run, and no more memory is used than a few times its size.

    Raises:
        UserError: there is no such file, or it is not a regular file, is damaged, or describes no model of this
            project.
    """
    return _load(identify_file(path))


def _load(found: Found) -> dict[str, Any]:
    try:
        checkpoint = _read(found)
        dict.pop(checkpoint.get("progress", {}), "num_skipped", None)  # of earlier checkouts
        _check_values(checkpoint)
        if checkpoint.get("classes"):
            checkpoint["classes"] = names_to_nfc(checkpoint["classes"])  # as those of data
    except UserError:
        raise
    except Exception as error:  # a hostile file may fail in any way, and is refused in every case
        raise damaged(found.path, error) from error
    return checkpoint


def _read(found: Found) -> dict[str, Any]:
    """Reads a checkpoint of any kind. Exception: it is damaged, or none that this project can run."""
    content = found.content
    match found.kind:
        case Kind.LOCAL_DIR:
            return read_local_dir(found)
        case Kind.RELEASED:
            try:
                return from_released_file(found.values())
            except Unsupported as error:
                raise Unsupported(f"{found.path}: {error}") from None
        case Kind.EXPORT:
            assert content is not None
            assert content.metadata is not None, "an export is a safetensors file"
            checkpoint = json.loads(content.metadata["run"])
            return checkpoint | {WEIGHTS[checkpoint["weights"]]: content.values}
        case Kind.GRAPH:
            problem = "an exported graph, which only other programs run (docs/validation.md, Export)"
            raise UserError(f"{found.path}: {problem}; name the run, checkpoint or .safetensors that it was made of")
        case Kind.CHECKPOINT:
            assert content is not None, "a checkpoint has content"
            return content.own()
    raise UserError(
        f"{found.path}: no checkpoint of train.py: it holds no configuration; it seems to be {found.kind.value}, and"
        f" `python -m engine.checkpoints.export {found.path} FILE.safetensors --config CONFIG.yaml` makes one of it,"
        " where CONFIG.yaml describes its model"
    )


def trained_config(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the training, plain; that of an exported model may have other options."""
    return checkpoint.get(TRAINED, checkpoint["config"])


def kept_weights(checkpoint: Mapping[str, Any]) -> list[Weights]:
    """Returns the kinds of weights that `checkpoint` holds."""
    return [kind for kind, key in WEIGHTS.items() if key in checkpoint]


def _check_values(checkpoint: Mapping[str, Any]) -> None:
    """Checks the metadata and the weights of a checkpoint."""
    if not {*METADATA} <= checkpoint.keys() or not kept_weights(checkpoint):
        raise ValueError(f"holds {', '.join(map(repr, checkpoint))} only")
    check_plain({name: checkpoint[name] for name in METADATA} | {TRAINED: trained_config(checkpoint)})
    for config in (checkpoint["config"], trained_config(checkpoint)):
        if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
            raise ValueError("a configuration that is no mapping with a model")
    check_progress(checkpoint["progress"])
    classes, digests = checkpoint.get("classes", []), [checkpoint.get(name, "") for name in IDENTITY[1:]]
    if not isinstance(classes, list) or not all(isinstance(text, str) for text in classes + digests):
        raise ValueError("class names or digests that are none")  # check_plain would refuse them: they may be many
    for key in WEIGHTS.values():
        weights = checkpoint.get(key, {}).items()
        if not all(isinstance(name, str) and name.isprintable() and torch.is_tensor(x) for name, x in weights):
            raise ValueError(f"{key} are no weights")
