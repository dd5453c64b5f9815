"""Configuration files: YAML and command-line overrides -> a checked `Run`, and back.

A run is checked completely before a script touches data or weights: every option, contradictions between options, and
the geometry of the model, which is built once on the meta device, without memory. What does not fit is refused in one
line: the file and line (or the override), the dotted path, the value and the remedy.
"""

import codecs
import copy
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from attention import AttentionFactory
from attention.options import OptionError, parse_options
from engine.errors import UserError, one_line
from engine.files import open_regular
from engine.freeze import freeze
from engine.schema import Run, check_run
from models import create_model, parse_model, resolve_attention

_MAX_BYTES, _MAX_DEPTH, _MAX_NODES = 2**15, 50, 2_000
"""Limits of a file: its size, the nesting of values and their number, with aliases written out. Files are not trusted,
and PyYAML takes about a second for this much."""

MISSING = "???"
"""The value of an option that must be given, as in OmegaConf: a checkpoint of another code may not say it."""

_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")
"""Numbers that YAML 1.1 reads in base 8 or 60: ``010`` as 8, ``1:30`` as 90."""

_SHIPPED = Path(__file__).parents[1]
"""Where `configs` lies: the root of a clone, or of the installed packages."""

Keys = tuple[str, ...]
"""Keys that lead to a value: ``("attention", "0", "window_size")``."""


class ConfigError(UserError):
    """A configuration that cannot be honoured. The message is one line that names the place."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


class MissingOptions(ConfigError):
    """A configuration with options that are `MISSING`."""


@contextmanager
def refuse_bad_input() -> Iterator[None]:
    """Inside it, refused input ends a script with one line on stderr and exit status 2.

    All ranks refuse the same input, and only the first prints it.
    """
    try:
        yield
    except (UserError, OptionError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@dataclasses.dataclass
class Tree:
    """Plain options, and where each was written.

    Attributes:
        values: nested dicts and lists. origins: path of keys -> ``"FILE:LINE"`` or ``"override 'KEY=VALUE'"``.
    """

    values: Any
    origins: dict[Keys, str]

    def origin(self, key: str) -> str:
        """Where the option named by an OptionError's `key` was written, or else the nearest mapping above it."""
        key = re.sub(r"\(\w+\)", "", key)
        spellings = (key, key.replace("[", ".").replace("]", ""))  # a wrong key may contain brackets
        leading = (
            path
            for path in self.origins
            if not path or any(f"{spelling}.".startswith(f"{'.'.join(path)}.") for spelling in spellings)
        )
        return self.origins[max(leading, key=lambda path: (len(".".join(path)), -len(path)))]


def find_config(path: str) -> Path:
    """The file that a command line names: `path`, or if only the project has such a ``configs/...``, the project's.

    So ``configs/quickstart.yaml`` means the same in a clone and, where the project is installed, in any directory.
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
    for text in overrides:
        override(tree, text)
    return _parse(tree, world_size)


def parse_run(options: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> Run:
    """The checked `Run` of plain `options`, as `dump_run` made them; `source` names their place, e.g. a checkpoint.

    Raises:
        ConfigError: anything that cannot be honoured.
    """
    tree = Tree(copy.deepcopy(options), {(): source})
    for text in overrides:
        override(tree, text)
    return _parse(tree, world_size=1)


def dump_run(run: Run) -> dict[str, Any]:
    """`run` in plain types (dict, list, str, numbers), for YAML files and checkpoints; `parse_run` inverts it."""
    return _plain(dataclasses.asdict(run))


def flatten(options: Any, path: str = "") -> dict[str, Any]:
    """Nested mappings and lists of mappings -> dotted path -> value: ``{"attention.0.name": "eva", ...}``."""
    if isinstance(options, list) and any(isinstance(item, Mapping) for item in options):
        options = dict(enumerate(options))
    if not isinstance(options, Mapping):
        return {path: options}
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= flatten(value, f"{path}.{key}" if path else str(key))
    return flat


def read_config(path: str | Path) -> Tree:
    """A YAML file of options with its `base` merged in, unchecked.

    Raises:
        ConfigError: unreadable file, YAML error, duplicate key, anything but a mapping, or a base with a base.
    """
    tree = read_yaml(path)
    if "base" not in tree.values:
        return tree
    name, origin = tree.values.pop("base"), tree.origins.pop(("base",))
    if not isinstance(name, str):
        raise ConfigError(f"{origin}: base: expected the name of a file, got {name!r}")
    try:
        base = read_yaml(Path(path).parent / name)
    except ConfigError as error:
        raise ConfigError(f"{origin}: base: {error}") from None
    if "base" in base.values:
        raise ConfigError(f"{origin}: base: {name!r} has a base itself; only one level is followed")
    for section, options in tree.values.items():
        inherited = base.values.get(section)
        if section != "attention" and isinstance(options, dict) and isinstance(inherited, dict):
            for option in options:
                _forget(base.origins, (section, option))
            base.values[section] = inherited | options
        else:
            _forget(base.origins, (section,))
            base.values[section] = options
    return Tree(base.values, base.origins | tree.origins)


def read_yaml(path: str | Path) -> Tree:
    """A YAML file that holds a mapping, with the line of every value.

    Raises:
        ConfigError: unreadable file, YAML error, duplicate key, or anything but a mapping.
    """
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # a null character
        raise ConfigError(f"{str(path)!r}: {error}") from None
    if content.startswith(codecs.BOM_UTF8):
        raise ConfigError(f"{path}:1: begins with a byte order mark; save it as UTF-8 without one")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None
    tree = _parse_yaml(text, lambda line: f"{path}:{line}")
    if not isinstance(tree.values, dict):
        found = "an empty file" if tree.values is None else type(tree.values).__name__
        raise ConfigError(f"{path}: expected a mapping of options, got {found}")
    return tree


def override(tree: Tree, text: str) -> None:
    """Sets the option of ``"key.path=value"`` in `tree`.

    Raises:
        ConfigError: a path through something that is no mapping or list, or a value that is not YAML.
    """
    origin = f"override {text if len(text) < 100 else text[:97] + '...'!r}"
    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path) or len(path) > _MAX_DEPTH:
        raise ConfigError(f"{origin}: expected key.path=value")
    new = _parse_yaml(value, lambda line: origin)
    container = tree.values
    for depth, name in enumerate(path):
        where = ".".join(path[:depth])
        at: int | str = name
        if isinstance(container, list):
            if not name.isdecimal() or int(name) >= len(container):
                raise ConfigError(f"{origin}: {where} is a list; expected an index from 0 to {len(container) - 1}")
            at = int(name)
        elif not isinstance(container, dict):
            raise ConfigError(f"{origin}: {where} is {container!r}, not a mapping; give {where} as a whole")
        if depth < len(path) - 1:
            if isinstance(container, dict) and name not in container:
                container[name], tree.origins[path[: depth + 1]] = {}, origin
            container = container[at]
        else:
            container[at] = new.values
    _forget(tree.origins, path)
    tree.origins.update({path + below: origin for below in new.origins})


def _parse(tree: Tree, world_size: int) -> Run:
    try:
        _check_plain(tree.values, "")
        if missing := [key for key, value in flatten(tree.values).items() if value == MISSING]:
            raise MissingOptions(
                f"{tree.origin('')}: does not say all options, and none is guessed: give {'=... '.join(missing)}=..."
                " (python -m models.convert writes a file that says them)"
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
    """`attention` with the defaults of its mechanism, or of the mechanism of every stage."""
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


def _forget(origins: dict[Keys, str], path: Keys) -> None:
    """Removes the origins of a value that is replaced, and of all values inside it."""
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]


def _parse_yaml(text: str, place: Callable[[int], str]) -> Tree:
    """YAML `text` as safe_load reads it, but without duplicate keys; `place(line)` names a line of it."""
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{place(1)}: larger than {_MAX_BYTES} bytes; that is no configuration")
    try:
        reader = _Reader(text, place)
        node = reader.get_single_node()
        return Tree(None if node is None else reader.plain(node, (), ()), reader.origins)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{place(mark.line + 1 if mark else 1)}: {error.problem}") from None
    except OverflowError:
        raise ConfigError(f"{place(reader.line + 1)}: an escape that is no character") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{place(line)}: the character {chr(error.character)!r} is not allowed") from None


class _Reader(yaml.SafeLoader):
    """PyYAML's safe loader; records the line of every value (`origins`), refuses what is ambiguous or too large."""

    def __init__(self, text: str, place: Callable[[int], str]):
        super().__init__(text)
        self.place = place
        self.origins: dict[Keys, str] = {(): place(1)}
        self.num_nodes = self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """PyYAML's method, with limits."""
        self.num_nodes += 1
        self.depth += 1
        here = self.place(self.peek_event().start_mark.line + 1)
        if self.num_nodes > _MAX_NODES:
            raise ConfigError(f"{here}: more than {_MAX_NODES} values")
        if self.depth > _MAX_DEPTH:
            raise ConfigError(f"{here}: nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def plain(self, node: yaml.Node, path: Keys, parents: tuple[yaml.Node, ...]) -> Any:
        """The plain value of `node`, which `path` leads to through the nodes `parents`."""
        here, name = self.place(node.start_mark.line + 1), ".".join(path)
        self.origins[path] = here
        if len(self.origins) > _MAX_NODES:
            raise ConfigError(f"{here}: more than {_MAX_NODES} values")
        if any(node is parent for parent in parents):
            raise ConfigError(f"{here}: {name} contains itself")
        if node.tag != self.resolve(type(node), node.value, (True, False)) and node.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{here}: {name}: the tag {node.tag!r} has no use here")
        parents = (*parents, node)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, (*path, str(i)), parents) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            values = {}
            for key_node, value_node in node.value:
                line = self.place(key_node.start_mark.line + 1)
                if key_node.tag != "tag:yaml.org,2002:str" or not isinstance(key_node, yaml.ScalarNode):
                    got = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else f"a {key_node.id}"
                    raise ConfigError(f"{line}: {name or 'the file'}: expected text as a key, got {got}")
                key = key_node.value
                if key in values:
                    raise ConfigError(f"{line}: {'.'.join((*path, key))}: duplicate key")
                values[key] = self.plain(value_node, (*path, key), parents)
                self.origins[*path, key] = line
            return values
        try:
            value = self.construct_object(node)
        except (ValueError, OverflowError) as error:  # looks like a date or a number to YAML, but is not one
            raise ConfigError(f"{here}: {name}: {error}") from None
        if isinstance(value, int | float) and not isinstance(value, bool) and _OTHER_BASE.fullmatch(node.value):
            raise ConfigError(f"{here}: {name}: {node.value} is a number in base 8 or 60 to YAML; write it in base 10")
        return value
