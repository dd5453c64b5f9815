"""Parser of command lines with `--plugin`; refuses an option given twice where only one of its values would count."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from attention.plugins import FLAG, take_plugins
from engine.runtime.errors import refuse_bad_input


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, in which an option that stores its value can be given once (`action="append"`: repeatedly).

    Plugins are imported before any other argument is parsed, wherever `--plugin` stands.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register("action", None, StoreOnce)
        text = "module or .py file that registers mechanisms of your own; repeatable"
        self.add_argument(FLAG, metavar="MODULE", help=text, default=argparse.SUPPRESS)  # for the help alone

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if "" in arg_strings:  # which Path takes for the working directory, and `if` for no value
            raise argparse.ArgumentError(action, "'' is empty and names nothing; give a value, or leave it out")
        return super()._get_values(action, arg_strings)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_args(_load_plugins(args), namespace)

    def parse_intermixed_args(  # type: ignore[override]  # typeshed overloads both by the type of a namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        return super().parse_intermixed_args(_load_plugins(args), namespace)


def _load_plugins(arguments: Sequence[str] | None) -> list[str]:
    """Loads the plugins that a command line names, by default this process's; returns its other arguments."""
    with refuse_bad_input():
        return take_plugins(sys.argv[1:] if arguments is None else arguments)


class StoreOnce(argparse.Action):
    """Stores the value of an argument; a second value of an option is an error."""

    is_given = False

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string and self.is_given:
            remedy = "give it once, with all its values" if self.nargs else "give it once"
            raise argparse.ArgumentError(self, f"given twice, and only the last would count; {remedy}")
        self.is_given = True
        setattr(namespace, self.dest, values)
