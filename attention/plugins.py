"""Plugins: modules outside this package that register mechanisms when they are imported.

An installed package names its module as an entry point of the group `GROUP`. Such modules are imported when an
unregistered name is requested, and at the start of every command. The user names other modules by `--plugin MODULE`.
MODULE is the name of a module that Python finds there or in the current directory, or the path of a .py file.
Nothing else is imported: a checkpoint may name the plugins of its mechanisms, and the error names the flag.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from .options import OptionError
from .registry import ATTENTION, UnknownMechanism, is_built_in

if TYPE_CHECKING:
    from .base import Attention

GROUP = "efficient_attention_vision.mechanisms"
"""Group of the entry points of installed packages."""

FLAG = "--plugin"


class Plugin(NamedTuple):
    """A plugin that is loaded.

    Attributes:
        name: module or path, as `--plugin` takes it. version: of its distribution, or the SHA-256 of its file.
        is_installed: an entry point names it.
    """

    name: str
    version: str
    is_installed: bool = False


LOADED: dict[str, Plugin] = {}
"""Module -> plugin, of all that are loaded."""

_failed: list[str] = []
"""The installed plugins that could not be imported, with their errors."""

_asked = False
"""True once the entry points were read."""


def find_mechanism(name: Any, key: str = "attention.name") -> "type[Attention]":
    """The class of the mechanism `name`: built in, registered, or of an installed package.

    Raises:
        UnknownMechanism: there is none; `key` begins the message.
    """
    if isinstance(name, str) and name not in ATTENTION:
        load_installed()
    if not isinstance(name, str) or name not in ATTENTION:
        raise UnknownMechanism(key, name, "".join(f"; {problem}" for problem in _failed))
    return ATTENTION[name]


def load_installed() -> None:
    """Imports the plugins of installed packages, once. One that fails is left out, with a line on stderr."""
    global _asked
    if _asked:
        return
    _asked = True
    for entry in entry_points(group=GROUP):
        assert entry.dist is not None, "entry points are those of distributions"
        try:
            entry.load()
        except (Exception, SystemExit) as error:  # of the plugin's own code
            _failed.append(f"the plugin {entry.module} of {entry.dist.name} is left out: {_describe(error)}")
            if os.environ.get("RANK", "0") == "0":
                print(f"warning: {_failed[-1]}", file=sys.stderr)
        else:
            LOADED[entry.module] = Plugin(entry.module, f"{entry.dist.name} {entry.dist.version}", is_installed=True)


def load_plugin(name: str, option: str = FLAG) -> None:
    """Imports the plugin that the user names: a module, or the path of a .py file. A loaded one is left as it is.

    Raises:
        OptionError: it is neither, cannot be imported, or registers no mechanism; `option` begins the message.
    """
    before = {*ATTENTION}
    try:
        module = _import_file(Path(name)) if name.endswith(".py") else _import_module(name)
    except (Exception, SystemExit) as error:  # of the plugin's own code
        raise OptionError(option, f" {name}: cannot be imported: {_describe(error)}") from error
    if module.__name__ in LOADED:
        return
    if before == {*ATTENTION} and not any(_is_below(cls.__module__, module.__name__) for cls in ATTENTION.values()):
        raise OptionError(option, f" {name}: registers no mechanism; write @attention.register above the class of each")
    LOADED[module.__name__] = Plugin(name, f"sha256 {_digest(Path(str(module.__file__)))}")


def take_plugins(arguments: Sequence[str]) -> list[str]:
    """Imports the installed plugins and those of `--plugin MODULE` in a command line; returns its other arguments.

    Raises:
        OptionError: `--plugin` without a module, or with a module that is not a plugin.
    """
    load_installed()
    rest, words = [], iter(arguments)
    for word in words:
        flag, equals, name = word.partition("=")
        if flag != FLAG:
            rest.append(word)
            continue
        name = name if equals else next(words, "")
        if not name or name.startswith("-"):
            raise OptionError(FLAG, "expected a module, or the path of a .py file")
        load_plugin(name)
    return rest


def as_arguments() -> list[str]:
    """The arguments with which another process loads the plugins that the user named in this one."""
    return [word for plugin in LOADED.values() if not plugin.is_installed for word in (FLAG, plugin.name)]


def versions() -> dict[str, str]:
    """Name -> version of every plugin that is loaded."""
    return {plugin.name: plugin.version for plugin in LOADED.values()}


def plugin_of(name: str) -> str | None:
    """The argument of `--plugin` that loads the mechanism `name`; None for a mechanism of this package."""
    cls = ATTENTION[name]
    if is_built_in(cls):
        return None
    found = (plugin.name for module, plugin in LOADED.items() if _is_below(cls.__module__, module))
    return next(found, cls.__module__)


def _is_below(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ImportError("expected the name of a module, as in my_package.my_module, or the path of a .py file")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last, so that no file there stands in the place of another module
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """Imports a file as the module of its name, once."""
    if not path.is_file():
        raise FileNotFoundError("there is no such file")
    name, path = path.stem, path.resolve()
    known = sys.modules.get(name)
    other = known or importlib.util.find_spec(name)
    origin = getattr(other, "__file__", None) or getattr(other, "origin", None)
    if other and Path(str(origin)).resolve() != path:
        raise ImportError(f"{name} is the name of another module ({origin}); rename the file")
    if known:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _describe(error: BaseException) -> str:
    """An error on one line, with the line of the plugin's code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _digest(path: Path) -> str:
    """The SHA-256 of a module's file, or of the digests of a package's files in the order of their paths."""
    if path.name != "__init__.py":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.parent.rglob("*.py"))]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
