"""Command line of `benchmark.py`, and values on those of benchmarks."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from engine.runtime.arguments import ArgumentParser, Count
from engine.runtime.errors import UserError

MODES = ("forward", "forward+backward", "train", "inference")
DTYPES = ("fp32", "bf16", "fp16")
EXECUTIONS = ("eager", "compiled", "cuda-graph", "compiled-cuda-graph")
BATCH_TOKENS = {"cpu": 6272, "cuda": 100352}
"""Tokens of a batch: 8 or 128 images of 784 tokens. For a model, patches of 8 x 8 pixels count as tokens."""
BUDGETS = {
    "ms": "milliseconds of a call",
    "memory": "MiB that a call allocates at its peak",
    "macs": "multiply-accumulates relative to softmax attention's layer",
}
"""Key of a budget -> what it limits."""

positive = Count()
"""Type of a count: channels, heads, images, tokens or pixels along a side."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `benchmark.py`, by default those of this process."""
    example = "python benchmark.py --attention eva lara --tokens 784"
    parser = ArgumentParser(description=f"Compare mechanisms and models side by side.\n\n    {example}")
    add, many, entries = parser.add_argument, {"nargs": "+"}, {"nargs": "+", "default": []}
    layers, models = "NAME[@PATH][:OPTION=VALUE,...]", "[timm:]NAME:ATTENTION[@PATH][:OPTION=VALUE,...]"
    batch = f"as many as have {BATCH_TOKENS['cpu']} tokens, on a GPU {BATCH_TOKENS['cuda']}"
    modes = "forward: with a graph, as in training; train: forward, backward and AdamW; inference: without a graph"
    executions = "compiled: for each shape; cuda-graph: eager kernels, launched at once"
    add("--macs", action="store_true", help="parameters and multiply-accumulates beside the papers' figures")
    add("--attention", **entries, metavar=layers, help="single layers, or all; PATH: fast paths, as train.kernels")
    add("--models", **entries, metavar="MODEL", help=f"{models}, timm:NAME[:OPTION=VALUE,...], or a YAML file")
    add("--tokens", **many, type=token_grid, default=[(28, 28)], metavar="N|HxW|TxHxW", help="tokens of a layer")
    pixels = "images of models, in pixels; default: 224"
    add("--image-sizes", **many, type=image_size, default=[(224, 224)], metavar="SIDE|HxW", help=pixels)
    add("--dim", type=positive, default=192, help="channels of a layer")
    add("--num-heads", type=positive, default=3, help="heads of a layer")
    add("--batch-size", type=positive, help=f"images; default: {batch}")
    first = ["forward", "forward+backward"]
    add("--modes", **many, choices=MODES, default=first, help=f"{modes}; default: the first two")
    add("--dtypes", **many, choices=DTYPES, default=["fp32"], help="half precision uses autocast")
    add("--execution", **many, choices=EXECUTIONS, default=["eager"], help=executions)
    add("--rounds", type=Count(2), default=10, help="measurements of each; default: %(default)s")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--output", type=Path, help="directory for table.md and results.csv")
    limits = "; ".join(f"{key}: {meaning}" for key, meaning in BUDGETS.items())
    limits = f"second table of the layers within these limits, sorted by stored quality; {limits}"
    add("--budget", **entries, metavar="KEY=LIMIT", help=limits)
    return parser.parse_args(arguments)


def image_size(text: str) -> tuple[int, ...]:
    """Parses ``"224"`` or ``"224x320"`` as rows and columns."""
    sides = [positive(side) for side in text.split("x")]
    if len(sides) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a side nor HxW")
    return sides[0], sides[-1]


def token_grid(text: str) -> tuple[int, ...]:
    """Parses ``"784"``, a square number, ``"14x28"`` as rows and columns, or ``"8x14x28"`` as frames of them."""
    if "x" in text:
        sides = tuple(map(positive, text.split("x")))
        if len(sides) > 3:
            raise argparse.ArgumentTypeError(f"{text!r} is neither HxW nor TxHxW")
        return sides
    side = math.isqrt(positive(text))
    if side**2 != int(text):
        nearest = round(int(text) ** 0.5) ** 2
        raise argparse.ArgumentTypeError(f"{text} is no square number; nearest: {nearest}; or give HxW or TxHxW")
    return side, side


def check_arguments(args: argparse.Namespace) -> None:
    """Raises a UserError for options of benchmark.py that do not go together."""
    if not (args.macs or args.attention or args.models):
        raise UserError("give --attention, --models or --macs")
    if args.budget and (args.macs or args.models or not args.attention):
        raise UserError("--budget: give --attention, without --models and --macs")
