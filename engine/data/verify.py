"""Reads every image of a data set as training would, lists the broken ones, and counts copies in two splits.

    python -m engine.data.verify /data/imagenet
    python -m engine.data.verify /data/imagenet --statistics    # also images per class, sizes, data.mean and data.std
    python -m engine.data.verify /data/prepared --dataset cache

Exit status: 0 if no image is broken, 1 if some are, 2 if the data set cannot be read at all.
"""

import argparse
import hashlib
import os
import sys
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, BinaryIO, cast, get_args

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
    splits = open_splits(args)
    num_broken, digests = 0, {name: array("q") for name in splits}
    for name, images in splits.items():
        broken, rows = [], array("q")
        for sample in read_all(checked(images, measure if args.statistics else discard), args.workers, name):
            if isinstance(sample, BrokenImage):
                broken.append(sample)
            else:
                (digest, *measured), label = sample
                digests[name].append(digest)
                rows.extend([*measured, label] if args.statistics else [])
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
    print("".join(f"{line}\n" for line in list_copies(digests)), end="")
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


def discard(image: Image.Image) -> tuple[int, ...]:
    """Returns nothing of an image that only needs to be decoded."""
    return ()


def measure(image: Image.Image) -> tuple[int, ...]:
    """Returns width and height of an RGB image, the sum of levels of each channel, and the sum of their squares."""
    counts, levels = np.array(image.histogram()).reshape(3, 256), np.arange(256)
    return *image.size, *(counts @ levels).tolist(), *(counts @ levels**2).tolist()


@dataclass(eq=False)
class Checked(Images):
    """Images that are read to be checked: each is the `digest` of its file, and what `measure` makes of it."""

    measure: Callable[[Image.Image], tuple[int, ...]] = discard

    def parse(self, file: BinaryIO) -> tuple[int, ...]:
        image = super().parse(file)
        file.seek(0)
        return digest(file), *self.measure(image)


def checked(images: Images, measure: Callable[[Image.Image], tuple[int, ...]] = discard) -> Checked:
    """Returns the images of a split as `Checked`."""
    return Checked(images.reader, mode=images.mode, levels=images.levels, measure=measure)


def read_checked(images: Images, workers: int, title: str) -> tuple[dict[int, BrokenImage], array]:
    """Reads every image of a split; returns the broken ones by index, and the digests of the files of the others."""
    broken, digests = {}, array("q")
    for index, sample in enumerate(read_all(checked(images), workers, title)):
        if isinstance(sample, BrokenImage):
            broken[index] = sample
        else:
            digests.append(sample[0][0])
    return broken, digests


def digest(file: BinaryIO) -> int:
    """Returns the first 8 bytes of the SHA-256 of an open file, as a number: equal ones are copies."""
    return int.from_bytes(hashlib.file_digest(cast(Any, file), "sha256").digest()[:8], "little", signed=True)


def list_copies(digests: Mapping[str, Sequence[int]]) -> list[str]:
    """Returns a line for each two splits with exact copies of images: name -> digests of its images."""
    lines = []
    for first, second in combinations(digests, 2):
        if count := np.isin(np.array(digests[second]), np.array(digests[first])).sum():
            number = f"{count:,} of {len(digests[second]):,}"
            lines.append(f"warning: {second}: {number} images are exact copies of images of {first}")
    return lines


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
