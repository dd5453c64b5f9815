"""Reads YAML files of options and command-line overrides as plain options, with the place where each was written."""

import codecs
import dataclasses
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import yaml

from engine.runtime.errors import ConfigError, as_config_error
from engine.runtime.reading import open_regular
from engine.runtime.text import one_line

_MAX_BYTES, _MAX_DEPTH, _MAX_NODES = 2**15, 50, 2_000
"""Limits of a file: size in bytes, depth of nesting, and number of values with aliases written out. Files are not
trusted, and PyYAML takes about a second for this much."""

_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")
"""Numbers that YAML 1.1 reads in base 8 or 60: ``010`` as 8, ``1:30`` as 90."""

_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
"""Numbers that are text in YAML 1.1, for want of a point or of a sign: ``1e-3``, ``1.0e3``. YAML 1.2 has them."""

SWEEP = {"grid", "runs", "bases"}
"""Keys that a sweep has, see `ablation.schema.Ablation`, and no run."""

Keys = tuple[str, ...]
"""Keys that lead to a value: ``("attention", "0", "window_size")``."""


@dataclasses.dataclass
class Tree:
    """Plain options, and where each was written.

    Attributes:
        values: nested dicts and lists. origins: path of keys -> ``"FILE:LINE"`` or ``"override 'KEY=VALUE'"``.
    """

    values: Any
    origins: dict[Keys, str]

    def origin(self, key: str) -> str:
        """Returns the place of the option that an OptionError's `key` names, or of the nearest mapping above it."""
        key = re.sub(r"\(\w+\)", "", key)
        spellings = (key, key.replace("[", ".").replace("]", ""))  # a wrong key may contain brackets
        leading = (
            path
            for path in self.origins
            if not path or any(f"{spelling}.".startswith(f"{'.'.join(path)}.") for spelling in spellings)
        )
        return self.origins[max(leading, key=lambda path: (len(".".join(path)), -len(path)))]

    def locating(self) -> AbstractContextManager[None]:
        """Context in which an `OptionError` becomes a `ConfigError` that begins with the place of the option."""
        return as_config_error(lambda key: f"{self.origin(key)}: ")


def read_config(path: str | Path) -> Tree:
    """Reads a YAML file of options and merges its `base` in; options are not checked.

    Raises:
        ConfigError: unreadable file, YAML error, duplicate key, anything but a mapping, a sweep, or a base with a base.
    """
    tree = read_yaml(path)
    if tree.values.keys() & SWEEP:
        raise ConfigError(f"{path}: a sweep of several runs; give it to ablate.py")
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
        has_host = section == "model" and isinstance(options, dict) and ":" in str(options.get("name"))
        is_whole = section == "attention" or has_host  # models of timm and transformers have none of a base's options
        if not is_whole and isinstance(options, dict) and isinstance(inherited, dict):
            for option in options:
                _forget(base.origins, (section, option))
            base.values[section] = inherited | options
        else:
            _forget(base.origins, (section,))
            base.values[section] = options
    return Tree(base.values, base.origins | tree.origins)


def read_yaml(path: str | Path) -> Tree:
    """Reads a YAML file that holds a mapping, with the line of every value.

    Raises:
        ConfigError: unreadable file, YAML error, duplicate key, or anything but a mapping.
    """
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{one_line(str(path))}: {error.strerror}") from None
    if content.startswith(codecs.BOM_UTF8):
        raise ConfigError(f"{path}:1: begins with a byte order mark; save it as UTF-8 without one")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None
    tree = parse_yaml(text, lambda line: f"{path}:{line}")
    if not isinstance(tree.values, dict):
        found = "an empty file" if tree.values is None else type(tree.values).__name__
        raise ConfigError(f"{path}: expected a mapping of options, got {found}")
    return tree


def override(tree: Tree, text: str) -> None:
    """Sets the option of ``"key.path=value"`` in `tree`.

    Raises:
        ConfigError: a path through something that is no mapping or list, or a value that is missing or not YAML.
    """
    origin = f"override {text if len(text) < 100 else text[:97] + '...'!r}"
    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path) or len(path) > _MAX_DEPTH:
        raise ConfigError(f"{origin}: expected key.path=value")
    new = parse_yaml(value, lambda line: origin, path)
    if new.values is None and value.strip().lower() not in ("null", "~"):  # as of a shell variable that is not set
        raise ConfigError(f"{origin}: has no value; write {key}=null for none")
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


def _forget(origins: dict[Keys, str], path: Keys) -> None:
    """Removes the origins of a value that is replaced, and of all values inside it."""
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]


def parse_yaml(text: str, place: Callable[[int], str], option: Keys = ()) -> Tree:
    """Parses YAML `text`, the value of `option`, as safe_load does, but refuses duplicate keys and takes ``1e-3`` for a
    number; `place(line)` names a line of the text.
    """
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{place(1)}: larger than {_MAX_BYTES} bytes; that is no configuration")
    try:
        reader = _Reader(text, place, option)
        node = reader.get_single_node()
        return Tree(None if node is None else reader.plain(node, (), ()), reader.origins)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{place(mark.line + 1 if mark else 1)}: {error.problem}") from None
    except (ValueError, OverflowError):  # of chr(), which raises either; Python's versions differ in which
        raise ConfigError(f"{place(reader.line + 1)}: an escape that is no character") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{place(line)}: the character {chr(error.character)!r} is not allowed") from None


class _Reader(yaml.SafeLoader):
    """PyYAML's safe loader; records the line of every value (`origins`), refuses what is ambiguous or too large."""

    def __init__(self, text: str, place: Callable[[int], str], option: Keys):
        super().__init__(text)
        self.place, self.option = place, option
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
        """Returns the plain value of `node`; `path` leads to it through the nodes `parents`."""
        here, name = self.place(node.start_mark.line + 1), ".".join((*self.option, *path))
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
                    raise ConfigError(f"{line}: {'.'.join((*self.option, *path, key))}: duplicate key")
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


class _Writer(yaml.SafeDumper):
    """PyYAML's safe dumper; quotes text that `_Reader` would read as a number."""


for _class in (_Reader, _Writer):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
_Writer.add_multi_representer(dict, _Writer.represent_dict)


def dump_yaml(value: Any, **style: Any) -> str:
    """Formats plain options as YAML, which `read_yaml` reads as the same; `style` is for `yaml.dump`."""
    return yaml.dump(value, Dumper=_Writer, sort_keys=False, **style)
