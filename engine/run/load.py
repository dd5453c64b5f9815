"""Loads configurations: YAML files and command-line overrides -> a checked `Run`, and back.

A run is checked completely before a script touches data or weights: every option, contradictions between options, and
the geometry of the model, which is built once on the meta device, without memory. An error is
one line: the file and line (or the override), the dotted path, the value and the remedy.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention.options import OptionError
from attention.plugins import load_plugin, plugin_of
from engine.config.schema import Data, Run
from engine.config.yaml_files import Tree, override, parse_yaml, read_config
from engine.run.advice import naming_origins
from engine.run.checks import list_checks
from engine.run.draft import Draft
from engine.runtime.errors import ConfigError
from models import create_model, is_host, parse_model, split_name
from models.assignment import Entry, as_option, assign, parse_entries, split_place
from models.base import attention_layers
from models.budgets import Budgets, check_order
from models.freeze import freeze
from models.hosted import described

MISSING = "???"
"""Value of an option that the user must give, as in OmegaConf: a checkpoint of other code may lack it."""


class MissingOptions(ConfigError):
    """A configuration with options that are `MISSING`."""


def load_run(path: str | Path, overrides: Sequence[str] = (), world_size: int = 1) -> Run:
    """Reads and checks a configuration file that the user gives, see `draft_run`.

    Returns:
        The run, with every option of model and attention written out.
    Raises:
        ConfigError: anything that cannot be honoured.
    """
    return draft_run(path, overrides, world_size).finish()


def draft_run(
    path: str | Path,
    overrides: Sequence[str] = (),
    world_size: int = 1,
    count_classes: Callable[[Data], int] | None = None,
) -> Draft:
    """Reads and checks a configuration file that the user gives; its `plugins` are imported.

    Args:
        path: YAML file with the sections of `Run`, and optionally ``base: FILE`` (relative to this file), whose options
            apply where this file gives none. `attention`, and the `model` of a host, is taken as a whole from one of
            the two.
        overrides: ``"key.path=value"``, the value in YAML; items of a list by their index. The last one wins.
        world_size: ranks the run is to be trained with.
        count_classes: returns the number of classes of the data, for `model.num_classes` = auto.
    Raises:
        ConfigError: the options cannot be read.
    """
    draft = _read(path, overrides)
    if count_classes is not None and draft.whole.model.get("num_classes") == "auto":
        draft.hidden.add("model.num_classes")
        draft.set(model=draft.readable("model", draft.whole.model))
        with draft.step():
            draft.set(model={**draft.whole.model, "num_classes": count_classes(draft.run.data)})
            draft.hidden.remove("model.num_classes")
    with draft.step():
        name, options = split_name(draft.run.model)
        draft.set(model={"name": name, **described(name, options)})
    _build(draft, world_size)
    if not any(path.startswith(("model", "attention")) for path in draft.hidden):
        with draft.step(), torch.device("meta"):  # not of a checkpoint, which may be asked for other sizes
            if (run := draft.run).train.budgets is not None:
                Budgets(create_model(attention=run.attention, **run.model), run.model, run.attention, run.train.budgets)
                check_order(run.model, run.attention, run.train.budgets)
    return draft


def load_unbuilt(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Like `load_run`, but `model` and `attention` stay as the user gives them. They are not checked, and
    contradictions between options are not checked either.
    """
    return _read(path, overrides).finish()


REMOVED: dict[str, list[Any] | None] = {
    "distill.layers": [None],
    "distill.distance": ["squared"],
    "distill.beside": ["labels"],
    "data.order": ["list"],
    "data.levels": [None],
    "data.timeout_minutes": None,
    "data.shuffle_shards": None,
    "data.cache_dir": None,
    "data.cache_gb": None,
    "train.async_checkpoint": [False, True],
    "train.balanced_sampling": [False],
    "train.max_skipped": None,
    "train.max_overflows": None,
    "model.use_glu": [False],
    "model.patch_drop_rate": None,
    "train.elastic": None,
}
"""Options of earlier versions -> values without an effect on the weights; None: all values."""


def parse_run(options: Mapping[str, Any], source: str, overrides: Sequence[str] = (), resumes: bool = False) -> Run:
    """Checks plain `options`, as `dump_run` returns them, and returns their `Run`; `source` names their origin.

    They may be those of a stranger's checkpoint: their `plugins` are never imported. Those of an earlier version may
    have options of `REMOVED` with values that had no effect; on a run that `resumes`, none in its training.

    Raises:
        ConfigError: anything that cannot be honoured.
    """
    tree = Tree(copy.deepcopy(options), {(): source})
    removed = REMOVED | ({"model.patch_drop_rate": [0.0]} if resumes else {})
    for key, harmless in removed.items():
        section, _, name = key.partition(".")
        if isinstance(there := tree.values.get(section), dict) and name in there:
            if harmless is not None and there[name] not in harmless:
                raise ConfigError(f"{source}: {key} = {there[name]!r}: gone from this version; use an earlier one")
            del there[name]
    tree.values.pop("report", None)  # a section of earlier versions: trackers
    draft = _parse(tree, overrides)
    _build(draft, world_size=1)
    run = draft.finish()
    given = [name for name in ("val_split", "val_fraction", "folds") if is_overridden(f"data.{name}", overrides)]
    if (held_out_by := run.data.held_out_by) and given == ["val_split"]:
        problem = f"{source} has {held_out_by}, and validates on held-out training images"
        remedy = f"add {held_out_by.partition(' ')[0]}=null to use the split"
        raise ConfigError(f"data.val_split = {run.data.val_split!r}: {problem}; {remedy}")
    return run


def dump_run(run: Run) -> dict[str, Any]:
    """Returns `run` in plain types (dict, list, str, numbers), for YAML and checkpoints; `parse_run` inverts it."""
    return plain(dataclasses.asdict(run))


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


def is_overridden(option: str, overrides: Sequence[str]) -> bool:
    """Returns whether one of the valid `overrides` sets `option`."""
    keys_and_values = (override.partition("=")[::2] for override in overrides)
    return any(option in flatten({key: parse_yaml(text, str).values}) for key, text in keys_and_values)


def _read(path: str | Path, overrides: Sequence[str]) -> Draft:
    """Reads a file that the user gives, and imports its plugins."""
    draft = _parse(read_config(path), overrides)
    for plugin in draft.whole.plugins:
        with draft.step():
            load_plugin(plugin, "plugins")
    return draft


def _parse(tree: Tree, overrides: Sequence[str]) -> Draft:
    """Applies `overrides` to `tree`, and checks the form of all options but those of model and attention."""
    for text in overrides:
        with suppress(OptionError):  # the error of a wrong model or mechanism names its origin later
            _write_out_list(tree.values, text.partition("=")[0].split("."))
        override(tree, text)
    with naming_origins(tree, overrides):
        _check_plain(tree.values, "")
    if missing := [key for key, value in flatten(tree.values).items() if value == MISSING]:
        raise MissingOptions(
            f"{tree.origin('')}: does not say all options, and none is guessed: give {'=... '.join(missing)}=..."
            " (python -m engine.checkpoints.export writes a file that says them)"
        )
    return Draft(tree, overrides)


def _write_out_list(values: dict[str, Any], path: Sequence[str]) -> None:
    """Writes out a list that the options do not state, if an override changes one of its items.

    That is an option of the model that its size gives (``model.depths.2``), or the attention of each stage of a pyramid
    that has one mechanism (``attention.2.window_size``).
    """
    model, attention = values.get("model"), values.get("attention")
    index = {"model": 2, "attention": 1}.get(path[0])
    if index is None or not isinstance(model, dict) or not path[index:] or not path[index].isdecimal():
        return
    name, options = split_name(model)
    if path[0] == "model" and path[1] not in model:
        value = plain(getattr(parse_model(name, options), path[1], None))
        model |= {path[1]: value} if isinstance(value, list) else {}
    elif path[0] == "attention" and isinstance(attention, str | dict):
        entries = assign(name, attention, parse_model(name, options).depths)
        if len(entries) > 1:
            values["attention"] = [dict(entry.options) for entry in entries]


def _build(draft: Draft, world_size: int) -> None:
    """Checks all of a run whose form is checked, and writes out the options of model and attention."""
    name, options, config, built = "", dict[str, Any](), None, None
    entries: Any = []  # parsed, and taken as they are
    with draft.step():
        name, options = split_name(draft.run.model)
        config = parse_model(name, options)
    is_parsed = config is not None
    if not is_parsed:
        with suppress(OptionError):
            config = parse_model(name, draft.readable("model", options))
    if config is None:
        draft.hidden.add("model")
    else:
        draft.set(model={"name": name, **plain(dataclasses.asdict(config))})
    with draft.step():
        attention = draft.run.attention
        if attention is None and not is_host(draft.run.model["name"]):
            raise OptionError("attention", " = null: name a mechanism; models of timm: and hf: alone have their own")
        if not is_parsed:
            parse_entries(attention)
        elif attention is not None:
            entries = assign(name, attention, config.depths)
    if is_parsed and "attention" not in draft.hidden:
        with draft.step():
            try:
                with torch.device("meta"):
                    built = create_model(name, attention=entries or None, **options)
            except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond 64 bits
                raise OptionError("model", f"cannot be built: {error}") from None
            plugins = (plugin_of(entry.options["name"]) for entry in entries)  # none of built-in mechanisms
            written = as_option(_write_out(entries, built), attention)
            draft.set(attention=written, plugins=tuple(dict.fromkeys(filter(None, plugins))))
    for check in list_checks(world_size):
        with draft.step() as problems:
            problems.extend(check(draft.run) or ())
    if built is not None:
        with draft.step():
            freeze(built, draft.run.train.freeze)


def _write_out(entries: Sequence[Entry], model: nn.Module) -> list[dict[str, Any]]:
    """Returns the options of `entries` with all options of their layers in `model`.

    The options have the sizes that the layers have: with the option `fit`, those that the grids allow.
    """
    layers, written = attention_layers(model), []
    for entry in entries:
        layer = layers[entry.layers[0]].core
        options = {"name": layer.name(), **plain(dataclasses.asdict(layer.config))}
        place, _ = split_place(entry.options)
        written.append({**place, **options})
    return written


def plain(value: Any) -> Any:
    """Returns a value of a configuration with lists in the place of tuples, and dicts in that of other mappings."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _check_plain(value: Any, key: str) -> None:
    """Refuses values that no option can have: numbers of more than 64 bits, text that cannot be printed."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OptionError(key, "expected a number of at most 64 bits")
    if isinstance(value, str) and not value.isprintable():
        raise OptionError(key, f"{value!r} holds a character that cannot be printed")
    inside = value if isinstance(value, Mapping | list) else ()
    for name, item in inside.items() if isinstance(inside, Mapping) else enumerate(inside):
        _check_plain(item, f"{key}.{name}" if key else str(name))
