"""Loads configurations: YAML files and command-line overrides -> a checked `Run`, and back.

A run is checked completely before a script touches data or weights: every option, contradictions between options, and
the geometry of the model, which is built once on the meta device, without memory. An error is
one line: the file and line (or the override), the dotted path, the value and the remedy.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attention import AttentionFactory
from attention.options import OptionError, parse_options
from engine.config.checks import check_run
from engine.config.schema import Run
from engine.config.yaml_files import Tree, override, read_config
from engine.runtime.errors import ConfigError
from models import create_model, parse_model, resolve_attention
from models.freeze import freeze

MISSING = "???"
"""Value of an option that the user must give, as in OmegaConf: a checkpoint of other code may lack it."""

_SHIPPED = Path(__file__).parents[2]
"""Directory that holds `configs`: the root of a clone, or of the installed packages."""


class MissingOptions(ConfigError):
    """A configuration with options that are `MISSING`."""


def find_config(path: str) -> Path:
    """Returns the file for a command line's `path`: the project's if only the project has such a ``configs/...``.

    So ``configs/quickstart.yaml`` means the same file in a clone and, with the project installed, in any directory.
    """
    shipped = _SHIPPED / path
    return shipped if path.startswith("configs/") and shipped.exists() and not Path(path).exists() else Path(path)


def load_run(path: str | Path, overrides: Sequence[str] = (), world_size: int = 1) -> Run:
    """Reads and checks a configuration file.

    Args:
        path: YAML file with the sections of `Run`, and optionally ``base: FILE`` (relative to this file), whose options
            apply where this file gives none. `attention` is taken as a whole from one of the two.
        overrides: ``"key.path=value"``, the value in YAML; items of a list by their index. The last one wins.
        world_size: ranks the run is to be trained with.
    Returns:
        The run, with every option of model and attention written out.
    Raises:
        ConfigError: anything that cannot be honoured.
    """
    tree = read_config(path)
    return _parse(tree, overrides, world_size)


def parse_run(options: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> Run:
    """Checks plain `options`, as `dump_run` returns them, and returns their `Run`; `source` names their origin.

    Raises:
        ConfigError: anything that cannot be honoured.
    """
    tree = Tree(copy.deepcopy(options), {(): source})
    return _parse(tree, overrides, world_size=1)


def dump_run(run: Run) -> dict[str, Any]:
    """Returns `run` in plain types (dict, list, str, numbers), for YAML and checkpoints; `parse_run` inverts it."""
    return _plain(dataclasses.asdict(run))


def flatten(options: Any, path: str = "") -> dict[str, Any]:
    """Flattens nested mappings and lists of mappings to dotted path -> value: ``{"attention.0.name": "eva", ...}``."""
    if isinstance(options, list) and any(isinstance(item, Mapping) for item in options):
        options = dict(enumerate(options))
    if not isinstance(options, Mapping):
        return {path: options}
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= flatten(value, f"{path}.{key}" if path else str(key))
    return flat


def _parse(tree: Tree, overrides: Sequence[str], world_size: int) -> Run:
    for text in overrides:
        override(tree, text)
    try:
        _check_plain(tree.values, "")
        if missing := [key for key, value in flatten(tree.values).items() if value == MISSING]:
            raise MissingOptions(
                f"{tree.origin('')}: does not say all options, and none is guessed: give {'=... '.join(missing)}=..."
                " (python -m engine.checkpoints.convert writes a file that says them)"
            )
        run = parse_options(Run, tree.values)
        options = dict(run.model)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise OptionError("model.name", f"expected the name of a model, got {name!r}")
        config = parse_model(name, options)
        attention = resolve_attention(name, run.attention)
        try:
            with torch.device("meta"):
                model = create_model(name, attention=attention, **options)
        except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond 64 bits
            raise OptionError("model", f"cannot be built: {error}") from None
        run = dataclasses.replace(
            run, model={"name": name, **_plain(dataclasses.asdict(config))}, attention=_written_out(attention)
        )
        check_run(run, world_size)
        freeze(model, run.train.freeze)
    except OptionError as error:
        raise ConfigError(f"{tree.origin(error.key)}: {error}") from None
    return run


def _written_out(attention: Any) -> Any:
    """Adds the defaults of its mechanism to `attention`, or those of each stage's mechanism."""
    if isinstance(attention, list):
        return [_written_out(stage) for stage in attention]
    factory = AttentionFactory.from_options(attention)
    return {"name": factory.name, **_plain(dataclasses.asdict(factory.config))}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _check_plain(value: Any, key: str) -> None:
    """Refuses values that no option can have: numbers of more than 64 bits, text that cannot be printed."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OptionError(key, "expected a number of at most 64 bits")
    if isinstance(value, str) and not value.isprintable():
        raise OptionError(key, f"{value!r} holds a character that cannot be printed")
    for name, item in (
        value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list) else ())
    ):
        _check_plain(item, f"{key}.{name}" if key else str(name))
