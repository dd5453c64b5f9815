"""Errors of input, which the user can correct, and the end of a script with such an error."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from attention.options import OptionError
from engine.runtime.text import one_line


class UserError(Exception):
    """Input that cannot be used: a file, a directory, a data set, a device.

    The message names the place, the problem and, if there is one, the remedy; a script prints it instead of a
    traceback. A wrong option raises `attention.options.OptionError`, which carries its key.
    """


class ConfigError(UserError):
    """A configuration that cannot be honoured. The message is one line that names the place."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


@contextmanager
def refuse_bad_input() -> Iterator[None]:
    """Context in which refused input ends a script with one line on stderr and exit status 2.

    All ranks refuse the same input, and only the first prints it.
    """
    try:
        yield
    except (UserError, OptionError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
