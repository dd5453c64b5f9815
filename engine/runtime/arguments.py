"""Parser of command lines that refuses an option given twice where only one of its values would be taken."""

import argparse
from typing import Any


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, in which an option that stores its value can be given once (`action="append"`: repeatedly)."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register("action", None, StoreOnce)


class StoreOnce(argparse.Action):
    """Stores the value of an argument; a second value of an option is an error."""

    is_given = False

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string and self.is_given:
            remedy = "give it once, with all its values" if self.nargs else "give it once"
            raise argparse.ArgumentError(self, f"given twice, and only the last would count; {remedy}")
        self.is_given = True
        setattr(namespace, self.dest, values)
