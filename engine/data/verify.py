"""Reads every image of a data set as training would, lists the broken ones, and counts copies in two splits.

`train.py --check` reads the splits of a run in the same way, and says whether broken images would stop it.

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
import torch
from PIL import Image
from tqdm import tqdm

from engine.config.schema import Data, Run
from engine.data.images import BrokenImage
from engine.data.loaders import create_loaders, images_of
from engine.data.sampler import EpochSampler
from engine.data.splits import Images, classes_of, describe_ignored, open_split
from engine.data.workers import WorkerLoader
from engine.runtime.arguments import PROCESSES, ArgumentParser, Count
from engine.runtime.distributed import World
from engine.runtime.errors import refuse_bad_input
from engine.runtime.signals import end_at_interrupt
from engine.runtime.text import describe_difference, one_line

KINDS = [kind for kind in get_args(Data.__annotations__["dataset"]) if kind not in ("digits", "copy")]
"""Kinds of data sets that consist of files of the user."""

Measure = Callable[[Image.Image], tuple[int, ...]]


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

    def describe(images: Images, rows: np.ndarray) -> list[str]:
        return [*filter(None, [describe_ignored(images)]), *(summarise(images, rows) if rows.size else [])]

    broken = read_splits(splits, args.workers, measure if args.statistics else discard, describe)
    return sum(map(len, broken.values()))


def check_images(run: Run) -> bool:
    """Reads both splits of `run`, prints broken images and copies; returns whether the run could read what it needs.

    The order of every epoch is known, and so is the number of broken images that it would leave out.

    Raises:
        OptionError: data that cannot be used, see `create_loaders`.
    """
    world, model = World(torch.device("cpu")), run.model
    train, val, _ = create_loaders(run, world, img_size=model["img_size"], num_classes=model["num_classes"])
    broken = read_splits({"train": images_of(train), "val": images_of(val)}, run.data.workers)
    problems = []
    counts = count_skipped(cast(EpochSampler, train.sampler), [*broken["train"]], run.schedule.epochs)
    if stops := [epoch for epoch, count in enumerate(counts, start=1) if count > run.data.max_broken]:
        found = f"{counts[stops[0] - 1]:,} broken training images, more than data.max_broken = {run.data.max_broken}"
        problems.append(f"epoch {stops[0]} would stop the run: {found}; repair or remove them, or raise it")
    if broken["val"] and run.data.broken_val == "refuse":
        remedy = "repair or remove them, or leave them out by data.broken_val=skip"
        problems.append(f"the first evaluation would end the run: {len(broken['val']):,} broken images; {remedy}")
    print("\n".join(problems or [f"no image stops this run; an epoch leaves out {max(counts):,} at most"]))
    return not problems


def count_skipped(sampler: EpochSampler, broken: list[int], epochs: int) -> list[int]:
    """Returns the number of images that every epoch of a run would leave out, of those with the indices `broken`.

    A broken image counts as often as it occurs: more than once with repeated augmentation or balanced sampling, and not
    at all where it is among the images that fill no batch.
    """
    if not broken:
        return [0] * epochs
    is_broken, counts = torch.zeros(sampler.num_images, dtype=torch.bool), []
    is_broken[broken] = True
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        counts.append(int(is_broken[sampler.order(range(sampler.stop))].sum()))
    return counts


def add_source(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a data set."""
    parser.add_argument("root", help="directory that holds the splits, as data.root of a run")
    parser.add_argument("--dataset", choices=KINDS, default="folder", help="kind of the data set (folder)")
    parser.add_argument("--splits", nargs="+", default=["train", "val"], help="splits (train val)", metavar="NAME")
    parser.add_argument(
        "--workers", type=Count(0, PROCESSES.high), default=os.cpu_count(), help="processes that read (one per core)"
    )


def open_splits(args: argparse.Namespace) -> dict[str, Images]:
    """Opens the splits that the arguments name.

    Raises:
        OptionError: a split is missing or holds no image.
    """
    return {
        name: open_split(Data(dataset=args.dataset, root=args.root, train_split=name), "train_split", "--splits")
        for name in args.splits
    }


def read_all(images: Images, workers: int, title: str) -> Generator[tuple[Any, int] | BrokenImage, None, None]:
    """Yields every sample of `images` in order, read by `workers` processes, and shows a progress bar."""
    loader = WorkerLoader(images, batch_size=16, num_workers=workers, collate_fn=list)
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
    """Images that are read to be checked: the digest of each file, and what `measure` makes of its image.

    Equal digests, the first 8 bytes of the SHA-256, are copies.
    """

    measure: Measure = discard

    def parse(self, file: BinaryIO) -> tuple[int, ...]:
        measured = self.measure(super().parse(file))
        file.seek(0)
        digest = hashlib.file_digest(cast(Any, file), "sha256").digest()
        return int.from_bytes(digest[:8], "little", signed=True), *measured


def read_splits(
    splits: Mapping[str, Images],
    workers: int,
    measure: Measure = discard,
    describe: Callable[[Images, np.ndarray], list[str]] = lambda images, rows: [],
) -> dict[str, dict[int, BrokenImage]]:
    """Reads every image of `splits` once; prints their numbers, the broken ones and copies in two splits.

    Args:
        describe: function of a split, and of what was measured of each intact image, with its class index, (number,
            columns), that returns further lines.
    Returns:
        Split -> index -> broken image.
    """
    broken: dict[str, dict[int, BrokenImage]] = {}
    digests: dict[str, array] = {}
    for name, images in splits.items():
        broken[name], digests[name], rows = {}, array("q"), array("q")
        checked = Checked(images.reader, mode=images.mode, measure=measure)
        for index, sample in enumerate(read_all(checked, workers, name)):
            if isinstance(sample, BrokenImage):
                broken[name][index] = sample
                continue
            (digest, *measured), label = sample
            digests[name].append(digest)
            rows.extend([*measured, label] if measured else [])
        print(f"{name}: {len(images):,} images of {len(classes_of(images)):,} classes, {len(broken[name]):,} broken")
        further = describe(images, np.array(rows).reshape(max(1, len(digests[name])), -1))
        print("".join(f"  {line}\n" for line in [*broken[name].values(), *further]), end="")
    names = [classes_of(images) for images in splits.values()]
    if len(names) == 2 and names[0] != names[1]:
        print(f"classes differ: {describe_difference(*names)}")
    for first, second in combinations(digests, 2):
        if count := np.isin(np.array(digests[second]), np.array(digests[first])).sum():
            number = f"{count:,} of {len(digests[second]):,}"
            print(f"warning: {second}: {number} images are exact copies of images of {first}")
    return broken


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
