"""Errors of input, which the user can correct, and the end of a script with such an error."""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attention.options import OptionError
from engine.runtime.text import one_line

PATIENCE = 10.0
"""Time (s) within which a launcher ends the other ranks of a node after one of them has ended."""


class UserError(Exception):
    """Input that cannot be used: a file, a directory, a data set, a device.

    The message names the place, the problem and, if there is one, the remedy; a script prints it instead of a
    traceback. A wrong option raises `attention.options.OptionError`, which carries its key.
    """


class ConfigError(UserError):
    """A configuration that cannot be honoured. The message is a line for each problem, which names the place."""

    def __init__(self, *messages: str):
        super().__init__("\n       ".join(map(one_line, messages)))


@contextmanager
def as_config_error(prefix_of: Callable[[str], str] = lambda key: "") -> Iterator[None]:
    """Context in which an `OptionError` becomes a `ConfigError` whose message begins with the prefix of its key."""
    try:
        yield
    except OptionError as error:
        raise ConfigError(f"{prefix_of(error.key)}{error}") from None


@contextmanager
def refuse_bad_input() -> Iterator[None]:
    """Context in which refused input ends a script with one line on stderr and exit status 2.

    A reader of the output that has enough, as `head`, ends it silently, with the status that shells use.
    Of ranks that refuse the same input, one of each node prints the line: the first prints it at once, and the launcher
    ends the others. A rank that the launcher does not end within `PATIENCE` is alone with its refusal, and prints it.
    """
    try:
        yield
        print(end="", flush=True)  # nothing where there is no stdout
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # the pipe is another
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it ends
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (UserError, OptionError) as error:
        rank = os.environ.get("RANK", "0")
        try:
            if os.environ.get("LOCAL_RANK", rank).strip("0").isdecimal():
                time.sleep(PATIENCE)
        except KeyboardInterrupt:  # by the launcher
            raise SystemExit(2) from None
        names_rank = rank.strip("0").isdecimal() and not str(error).startswith("rank ")
        print(f"error: {f'rank {rank}: ' * names_rank}{error}", file=sys.stderr)
        raise SystemExit(2) from None
