"""Parser of command lines with `--plugin`; refuses numbers outside their range."""

import argparse
import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from attention.plugins import FLAG, take_plugins
from engine.runtime.errors import refuse_bad_input
from engine.runtime.signals import begin
from engine.runtime.text import one_line

MOST = 10**9
"""Largest count on a command line, where nothing else bounds it."""


@dataclass(frozen=True)
class Count:
    """Type of an argument that is a whole number from `low` to `high`."""

    low: int = 1
    high: int = MOST

    def __call__(self, text: str) -> int:
        """Parses the number; an ArgumentTypeError refuses one outside the range, and text that is no whole number."""
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        shown = text if len(text) <= 20 else f"{text[:8]}..., of {len(text)} characters,"
        value = int(text) if len(text) <= 20 else (self.low - 1 if text.startswith("-") else self.high + 1)
        if value < self.low:
            raise argparse.ArgumentTypeError(f"{shown} is below the least valid value {self.low}")
        if value > self.high:
            raise argparse.ArgumentTypeError(f"{shown} is above the largest valid value {self.high}")
        return value


SEED = Count(0, 2**63 - 1)
"""Type of a seed, of which torch takes 63 bits."""

PROCESSES = Count(high=1024)
"""Type of a number of processes."""

_SHIPPED = Path(__file__).parents[2]
"""Directory that holds `configs`: the root of a clone, or of the installed packages."""


def find_config(path: str) -> Path:
    """Returns the file for a command line's `path`: the project's if only the project has such a ``configs/...``.

    So ``configs/quickstart.yaml`` means the same file in a clone and, with the project installed, in any directory.

    Raises:
        argparse.ArgumentTypeError: there is no such file; the message has one of the project's of a similar name.
    """
    shipped = _SHIPPED / path
    if Path(path).exists():
        return Path(path)
    if path.startswith("configs/") and shipped.exists():
        return shipped
    known = [file.relative_to(_SHIPPED).as_posix() for file in (_SHIPPED / "configs").rglob("*.yaml")]
    found = difflib.get_close_matches(f"configs/{path.removeprefix('configs/')}", known, 1, 0.8)
    remedy = f"; did you mean {found[0]}?" if found else ""
    raise argparse.ArgumentTypeError(f"{one_line(path)}: no such file{remedy}")


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser.

    Plugins are imported before any other argument is parsed, wherever `--plugin` stands.

    Attributes:
        keys: name that a user may take for an option of the command line, as epochs -> key that is meant.
    """

    keys: Mapping[str, str] = {}

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)
        text = "module or .py file that registers mechanisms of your own; repeatable"
        # For the help, and for abbreviations: `take_plugins` takes the flag away.
        self.given = set[str]()
        self.add_argument(FLAG, metavar="MODULE", type=_refuse_abbreviation, help=text, default=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        found = re.match(r"unrecognized arguments: --([\w-]+)(?:[ =](\S+))?", message)
        if found and (key := self.keys.get(found[1].replace("-", "_"))):
            message += f"; {key} is an option of the run: write {key}={found[2] or 'VALUE'}"
        super().error(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if "" in arg_strings:  # which Path takes for the working directory, and `if` for no value
            raise argparse.ArgumentError(action, "'' is empty and names nothing; give a value, or leave it out")
        text = arg_strings[0] if action.dest in ("config", "checkpoint") and arg_strings else ""
        if re.match(r"\w+(\.\w+)*=", text) and not Path(text).exists():
            problem = f"{text!r} is no file; the {action.dest} comes before any key.path=value"
            raise argparse.ArgumentError(action, problem)
        if action.nargs and action.option_strings and action.dest in self.given:
            raise argparse.ArgumentError(action, "given twice; give all its values after one")
        self.given.add(action.dest)
        return super()._get_values(action, arg_strings)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_args(_load_plugins(args), namespace)

    def parse_intermixed_args(  # type: ignore[override]  # typeshed overloads both by the type of a namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        return super().parse_intermixed_args(_load_plugins(args), namespace)


def _refuse_abbreviation(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"write {FLAG} {text} in full")


def _load_plugins(arguments: Sequence[str] | None) -> list[str]:
    """Loads the plugins that a command line names, by default this process's; returns its other arguments."""
    if arguments is None:
        begin()
    with refuse_bad_input():
        return take_plugins(sys.argv[1:] if arguments is None else arguments)
