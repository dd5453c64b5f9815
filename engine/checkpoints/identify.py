"""The kind of a source of weights: a run, a checkpoint, an export, a file of another program, a name of timm's hub.

`identify` alone decides it. It reads a file once; the readers of its content follow the kind that it found.
"""

import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoints.format import Content, read_archive, read_safetensors
from engine.runtime.errors import UserError
from engine.runtime.reading import parsing, read_bounded
from engine.runtime.text import describe_error
from models.convert import is_released
from models.hosted import TIMM, is_host

CONFIG, WEIGHTS_FILES = "config.json", ("model.safetensors", "pytorch_model.bin")
"""Files of timm's `local-dir:` layout. Of the files with weights, timm takes the first that exists."""

CHECKPOINT_NAME = re.compile(r"step_(\d+)(?:_epoch_(\d+))?\.pt")
"""Names of the checkpoints in a run directory."""


class Kind(Enum):
    """Kind of a source of weights, in words."""

    HUB = "a name of timm's hub"
    TRANSFORMERS = "a model of transformers"
    RUN = "a run directory"
    LOCAL_DIR = "a directory in timm's local-dir: layout, written by another program"
    GRAPH = "an exported graph"
    CHECKPOINT = "a checkpoint of a run"
    EXPORT = "an exported checkpoint"
    RELEASED = "weights of the released code of EVA and LARA"
    TIMM = "a checkpoint of timm's train.py"
    WEIGHTS = "weights of another program"


FOREIGN = {Kind.TIMM, Kind.WEIGHTS}
"""Kinds of files that do not describe their model."""


class Found(NamedTuple):
    """A source of weights.

    Attributes:
        kind: its kind. path: the file or run directory; of a directory in timm's layout, the file with the weights.
        content: the content of a file; None for a hub name, a run directory or a graph.
    """

    kind: Kind
    path: Path
    content: Content | None = None

    def values(self) -> Mapping[str, Any]:
        """Returns the mapping in a file."""
        assert self.content is not None, "a file has content"
        return self.content.values


def identify(name: str | Path, follow_links: bool = False) -> Found:
    """Identifies what a command line or an option names.

    Args:
        name: a path, or as a str also a name of timm's hub or of a model of transformers.
        follow_links: accept a symbolic link to a file; those in timm's layout, as in the hub's cache, always are.
    Raises:
        UserError: it does not exist, cannot be read, or is damaged.
    """
    if isinstance(name, str) and is_host(name):
        return Found(Kind.HUB if name.startswith(TIMM) else Kind.TRANSFORMERS, Path(name))
    path = Path(name).expanduser() if isinstance(name, str) else name
    if follow_links:
        with parsing(repr(str(path))):
            path = Path(os.path.realpath(path))  # resolve() would raise an error for a link to itself
    if not path.exists():
        raise UserError(f"{path}: no such run directory or checkpoint")
    if not path.is_dir():
        return identify_file(path)
    if list_checkpoints(path) or not (path / CONFIG).is_file():
        return Found(Kind.RUN, path)
    weights = next((path / name for name in WEIGHTS_FILES if (path / name).is_file()), None)
    if weights is None:
        raise UserError(f"{path}: has a {CONFIG}, but neither {' nor '.join(WEIGHTS_FILES)}")
    found = identify_file(weights, follow_links=True)
    return found._replace(kind=Kind.LOCAL_DIR) if found.kind in FOREIGN else found


def identify_file(path: Path, follow_links: bool = False) -> Found:
    """Identifies a file by its suffix or its content.

    Raises:
        UserError: there is no such file, or it is not a regular file, or is damaged.
    """
    if path.suffix == ".onnx":
        return Found(Kind.GRAPH, path)
    if path.is_symlink() and not follow_links:
        raise UserError(f"{path}: a symbolic link; name the file itself")
    try:
        content = read_bounded(path, None)
    except FileNotFoundError:
        raise UserError(f"{path}: no checkpoint there") from None
    try:
        found = read_safetensors(content) if content[8:9] == b"{" else read_archive(content)
        return Found(_kind_of(found), path, found)
    except Exception as error:  # a hostile file may fail in any way, and is refused in every case
        raise damaged(path, error) from error


def _kind_of(content: Content) -> Kind:
    """Returns the kind of a file by the names in it. One with unknown names counts as a damaged checkpoint."""
    names = content.values.keys()
    nested = {name for value in content.values.values() if isinstance(value, Mapping) for name in value}
    if "run" in (content.metadata or {}):
        return Kind.EXPORT
    if {"config", "progress"} <= names:
        return Kind.CHECKPOINT
    if is_released(map(str, {*names, *nested})):
        return Kind.RELEASED
    if content.metadata is None and {"arch", "state_dict"} <= names:
        return Kind.TIMM
    is_nested = names & {"state_dict", "model", "student", "teacher"}  # the last two: DINO
    is_flat = content.metadata is not None or any(str(name).endswith(("weight", "bias")) for name in names)
    return Kind.WEIGHTS if is_nested or is_flat else Kind.CHECKPOINT


def damaged(path: Path, error: Exception) -> UserError:
    """Returns the refusal of a file whose reading failed with `error`."""
    return UserError(f"{path}: damaged, or no checkpoint that can be loaded safely ({describe_error(error)})")


def list_checkpoints(directory: Path) -> list[Path]:
    """Returns the checkpoints of the run in `directory`, newest first."""
    found = [(match, path) for path in directory.glob("step_*.pt") if (match := CHECKPOINT_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda entry: (int(entry[0][1]), entry[0][2] or ""), reverse=True)]
