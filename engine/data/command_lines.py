"""Command lines of the programs that make and read data sets."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from engine.config.schema import Data
from engine.runtime.arguments import PROCESSES, SEED, ArgumentParser, Count

KINDS = [kind for kind in get_args(Data.__annotations__["dataset"]) if kind not in ("digits", "copy")]
"""Kinds of data sets that consist of files of the user."""

PIXELS = 4
"""Side of a token of a drawn image, pixels."""

SEPARATION = 7
"""Least distance of two ends along at least one axis, tokens. No window with sides of this length holds both."""


def parse_prepare(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `engine.data.prepare`, by default those of this process."""
    example = "eav prepare /data/imagenet /fast/imagenet --short-side 256"
    parser = ArgumentParser(description=f"Decode a data set once, for faster loading.\n\n    {example}")
    _add_source(parser)
    parser.add_argument("output", type=Path, help="directory of the prepared data set")
    text = "short side of the images, pixels; 0: unchanged (256)"
    parser.add_argument("--short-side", type=Count(0, 2**16), default=256, help=text)
    return parser.parse_intermixed_args(arguments)  # options may stand between root and output


def parse_verify(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `engine.data.verify`, by default those of this process."""
    parser = ArgumentParser(description="List the broken images of a data set.\n\n    eav verify /data/imagenet")
    _add_source(parser)
    return parser.parse_args(arguments)


def _add_source(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a data set."""
    add = parser.add_argument
    add("root", help="directory that holds the splits, as data.root of a run")
    add("--dataset", choices=KINDS, default="folder", help="kind of the data set (folder)")
    add("--splits", nargs="+", default=["train", "val"], help="splits (train val)", metavar="NAME")
    workers = "processes that read (one per core)"
    add("--workers", type=Count(0, PROCESSES.high), default=os.cpu_count(), help=workers)


def parse_draw(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `engine.data.draw`, by default those of this process."""
    example = "eav draw pathfinder runs/pathfinder --images 20000 2000"
    parser = ArgumentParser(description=f"Draw a data set and write it in IDX files.\n\n    {example}")
    add = parser.add_argument
    kinds = "pathfinder: are two marked ends joined by a path? moving: how does a digit move through eight frames?"
    add("kind", choices=("pathfinder", "moving"), help=kinds)
    add("output", type=Path, help="directory of the splits train and t10k")
    images = "number of images of train and of t10k (20000 2000; moving: 10000 2000)"
    add("--images", type=Count(2, 10**7), nargs=2, metavar=("N", "M"), help=images)
    add("--tokens", type=Count(14, 64), default=14, help=f"side, tokens of {PIXELS}x{PIXELS} pixels (14)")
    add("--length", type=Count(8, 200), default=12, help="length of a path, tokens (12)")
    add("--distractors", type=Count(0, 100), default=1, help="number of curves of a third of that length (1)")
    separation = f"least tokens between ends ({SEPARATION})"
    add("--separation", type=Count(7, 63), default=SEPARATION, help=separation)
    scenes = "least and largest number of small scenes along a side of a training image (one scene, as in t10k)"
    add("--scenes", type=Count(1, 16), nargs=2, metavar=("A", "B"), help=scenes)
    add("--seed", type=SEED, default=0, help="seed of the random numbers (0)")
    args = parser.parse_args(arguments)
    args.classes, number = (2, [20_000, 2_000]) if args.kind == "pathfinder" else (10, [10_000, 2_000])
    args.images = args.images or number
    if any(count % args.classes for count in args.images):
        parser.error(f"--images must be multiples of {args.classes}, the number of classes, got {args.images}")
    of_paths = ("tokens", "length", "distractors", "separation", "scenes")
    given = [name for name in of_paths if getattr(args, name) != parser.get_default(name)]
    if given and args.kind == "moving":
        parser.error(f"--{given[0]} is an option of pathfinder alone; leave it out")
    if args.scenes and args.scenes[0] > args.scenes[1]:
        parser.error(f"--scenes must be in ascending order, got {args.scenes}")
    return args
