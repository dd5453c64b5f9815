"""Values on the command lines of benchmarks."""

import argparse
import itertools
import math
from collections.abc import Iterable

from attention import ATTENTION, Grid
from engine.runtime.arguments import Count
from engine.runtime.errors import UserError

positive = Count()
"""Type of a count: channels, heads, images, tokens or pixels along a side."""


def image_size(text: str) -> Grid:
    """Parses ``"224"`` or ``"224x320"`` as rows and columns."""
    sides = [positive(side) for side in text.split("x")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a side nor HxW")
    return sides[0], sides[-1]


def token_grid(text: str) -> Grid:
    """Parses ``"784"``, a square number, or ``"14x28"`` as rows and columns."""
    if "x" in text:
        return image_size(text)
    side = math.isqrt(positive(text))
    if side**2 != int(text):
        nearest = round(int(text) ** 0.5) ** 2
        raise argparse.ArgumentTypeError(f"{text} is no square number; nearest: {nearest}; or give HxW")
    return side, side


def every_mechanism(entries: Iterable[str]) -> list[str]:
    """Returns entries of ``--attention``, with all mechanisms in the place of ``"all[@PATH]"``."""
    split = [(entry, *entry.partition("@")) for entry in entries]
    every = [[each + at + path for each in ATTENTION] if name == "all" else [entry] for entry, name, at, path in split]
    return list(dict.fromkeys(itertools.chain.from_iterable(every)))


def check_arguments(args: argparse.Namespace) -> None:
    """Raises a UserError for options of benchmark.py that do not go together."""
    if not (args.macs or args.attention or args.models):
        raise UserError("give --attention, --models or --macs")
    if args.budget and (args.macs or args.models or not args.attention):
        raise UserError("--budget: give --attention, without --models and --macs")
