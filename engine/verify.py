"""Reads every image of a data set as training would, and lists the broken ones.

    python -m engine.verify /data/imagenet
    python -m engine.verify /data/prepared --dataset cache

Exit status: 0 no image is broken, 1 some are, 2 the data set cannot be read at all.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from engine.config import refuse_bad_input
from engine.data import READERS, Images, classes_of, describe_ignored, difference, open_split
from engine.images import BrokenImage
from engine.schema import Data
from engine.signals import end_at_interrupt
from engine.workers import RestartingLoader


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="List the broken images of a data set.")
    add_source(parser)
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        splits = open_splits(args)
    num_broken = 0
    for name, images in splits.items():
        images.transform = discard
        broken = [sample for sample in read_all(images, args.workers, name) if isinstance(sample, BrokenImage)]
        num_broken += len(broken)
        print(f"{name}: {len(images):,} images of {len(classes_of(images)):,} classes, {len(broken):,} broken")
        print("".join(f"  {sample}\n" for sample in broken), end="")
        if ignored := describe_ignored(images):
            print(f"  {ignored}")
    names = [classes_of(images) for images in splits.values()]
    if len(names) == 2 and names[0] != names[1]:
        print(f"classes differ: {difference(*names)}")
    sys.exit(num_broken > 0)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a data set."""
    parser.add_argument("root", help="directory that holds the splits, data.root of a run")
    parser.add_argument("--dataset", choices=tuple(READERS), default="folder", help="its kind (folder)")
    parser.add_argument("--splits", nargs="+", default=["train", "val"], help="(train val)", metavar="NAME")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that read (one per core)")


def open_splits(args: argparse.Namespace) -> dict[str, Images]:
    """The splits that the arguments name.

    Raises:
        OptionError: a split that is missing or holds no image.
    """
    return {
        name: open_split(Data(dataset=args.dataset, root=args.root, train_split=name), "train_split")
        for name in args.splits
    }


def read_all(images: Images, workers: int, title: str) -> Iterator[tuple[Any, int] | BrokenImage]:
    """Every sample of `images` in order, read by `workers` processes, behind a progress bar."""
    loader = RestartingLoader(images, batch_size=16, num_workers=workers, collate_fn=list)
    with tqdm(total=len(images), desc=title, unit=" images", dynamic_ncols=True) as bar:
        for samples in loader:
            yield from samples
            bar.update(len(samples))


def discard(image: Any) -> None:
    """A transform for images that need only be decoded."""


if __name__ == "__main__":
    main()
