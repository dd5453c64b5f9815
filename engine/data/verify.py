"""Reads every image of a data set as training would, and lists the broken ones.

    python -m engine.data.verify /data/imagenet
    python -m engine.data.verify /data/imagenet --statistics    # also images per class, sizes, data.mean and data.std
    python -m engine.data.verify /data/prepared --dataset cache

Exit status: 0 if no image is broken, 1 if some are, 2 if the data set cannot be read at all.
"""

import argparse
import os
import sys
from array import array
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from PIL import Image
from tqdm import tqdm

from attention.options import OptionError
from engine.config.schema import Data
from engine.data.images import BrokenImage
from engine.data.splits import Images, classes_of, describe_ignored, open_split
from engine.data.workers import RestartingLoader
from engine.runtime.arguments import PROCESSES, ArgumentParser, Count
from engine.runtime.errors import refuse_bad_input
from engine.runtime.signals import end_at_interrupt
from engine.runtime.text import describe_difference, one_line

KINDS = [kind for kind in get_args(Data.__annotations__["dataset"]) if kind not in ("digits", "copy")]
"""Kinds of data sets that consist of files of the user."""


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="List the broken images of a data set.")
    add_source(parser)
    parser.add_argument("--statistics", action="store_true", help="also images per class, sizes, mean and std")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        sys.exit(verify(args) > 0)


def verify(args: argparse.Namespace) -> int:
    """Reads all images, prints what is found, and returns the number of broken ones.

    Raises:
        OptionError: a split cannot be opened. UserError: the machine or the store fails.
    """
    splits, num_broken = open_splits(args), 0
    for name, images in splits.items():
        read = replace(images, transform=measure if args.statistics else discard)
        broken, rows = [], array("q")
        for sample in read_all(read, args.workers, name):
            if isinstance(sample, BrokenImage):
                broken.append(sample)
            elif args.statistics:
                rows.extend((*sample[0], sample[1]))
        num_broken += len(broken)
        print(f"{name}: {len(images):,} images of {len(classes_of(images)):,} classes, {len(broken):,} broken")
        print("".join(f"  {sample}\n" for sample in broken), end="")
        if ignored := describe_ignored(images):
            print(f"  {ignored}")
        if rows:
            print("".join(f"  {line}\n" for line in summarise(images, np.array(rows).reshape(-1, 9))), end="")
    names = [classes_of(images) for images in splits.values()]
    if len(names) == 2 and names[0] != names[1]:
        print(f"classes differ: {describe_difference(*names)}")
    return num_broken


def add_source(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a data set."""
    parser.add_argument("root", help="directory that holds the splits, as data.root of a run")
    parser.add_argument("--dataset", choices=KINDS, default="folder", help="kind of the data set (folder)")
    parser.add_argument("--splits", nargs="+", default=["train", "val"], help="splits (train val)", metavar="NAME")
    of_levels = "grey levels of black and white in images of more than 8 bits, as data.levels of a run"
    parser.add_argument("--levels", nargs=2, type=float, help=of_levels, metavar=("BLACK", "WHITE"))
    parser.add_argument("--cache-dir", help="folder for the shards of a URL, as data.cache_dir of a run")
    parser.add_argument(
        "--workers", type=Count(0, PROCESSES.high), default=os.cpu_count(), help="processes that read (one per core)"
    )


def open_splits(args: argparse.Namespace) -> dict[str, Images]:
    """Opens the splits that the arguments name.

    Raises:
        OptionError: a split is missing or holds no image.
    """
    options = {"dataset": args.dataset, "root": args.root, "levels": args.levels and tuple(args.levels)}
    options["cache_dir"] = args.cache_dir
    if args.levels and args.levels[0] == args.levels[1]:
        raise OptionError("--levels", f" {args.levels}: black and white are the same level; give two")
    return {name: open_split(Data(**options, train_split=name), "train_split", "--splits") for name in args.splits}


def read_all(images: Images, workers: int, title: str) -> Generator[tuple[Any, int] | BrokenImage, None, None]:
    """Yields every sample of `images` in order, read by `workers` processes, and shows a progress bar."""
    loader = RestartingLoader(images, batch_size=16, num_workers=workers, collate_fn=list)
    with tqdm(total=len(images), desc=title, unit=" images", dynamic_ncols=True) as bar:
        for samples in loader:
            yield from samples
            bar.update(len(samples))


def discard(image: Any) -> None:
    """Transform of images that only need to be decoded."""


def measure(image: Image.Image) -> tuple[int, ...]:
    """Returns width and height of an RGB image, the sum of levels of each channel, and the sum of their squares."""
    counts, levels = np.array(image.histogram()).reshape(3, 256), np.arange(256)
    return *image.size, *(counts @ levels).tolist(), *(counts @ levels**2).tolist()


def summarise(images: Images, rows: np.ndarray) -> list[str]:
    """Describes the intact images of a split in lines: images per class, sizes, `data.mean` and `data.std`.

    Args:
        rows: (number, 9): the values of `measure` and the class index of each image.
    """
    width, height, *sums, labels = rows.T
    counts = np.bincount(labels, minlength=len(names := classes_of(images)))
    fewest, most = (one_line(names[find(counts)], 100) for find in (np.argmin, np.argmax))
    mean, square = np.sum(sums, axis=1).reshape(2, 3) / (width @ height) / [[255], [255**2]]
    std = np.sqrt(np.maximum(square - mean**2, 0))
    channels = 1 if len({*mean}) == len({*std}) == 1 else 3
    shown = ["[" + ", ".join(f"{value:.4f}" for value in values[:channels]) + "]" for values in (mean, std)]
    return [
        f"images of a class: {_spread(counts)}; fewest in {fewest!r}, most in {most!r}",
        f"width {_spread(width)}; height {_spread(height)} pixels",
        f"data.mean={shown[0]} data.std={shown[1]}  # of all their pixels",
    ]


def _spread(values: np.ndarray) -> str:
    return f"{values.min():,} to {values.max():,}, median {np.median(values):,g}"


if __name__ == "__main__":
    main()
