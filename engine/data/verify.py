"""Reads every image of a data set as training would, lists the broken ones, and counts copies in two splits.

Exit status: 0 if no image is broken, 1 if some are, 2 if the data set cannot be read at all.
"""

import argparse
import hashlib
import sys
from collections.abc import Generator, Mapping, Sequence
from itertools import combinations
from typing import Any, BinaryIO, cast

from engine.runtime.signals import begin, end_at_interrupt

if __name__ == "__main__":
    begin("engine.data.command_lines:parse_verify")

import numpy as np

from engine.config.schema import Data
from engine.data.command_lines import parse_verify
from engine.data.images import BrokenImage
from engine.data.layout import describe_files
from engine.data.splits import Images, classes_of, open_split
from engine.data.workers import WorkerLoader
from engine.runtime.errors import refuse_bad_input
from engine.runtime.terminal import progress
from engine.runtime.text import describe_difference


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_verify(arguments)
    with refuse_bad_input():
        sys.exit(read_splits(open_splits(args), args.workers) > 0)


def open_splits(args: argparse.Namespace) -> dict[str, Images]:
    """Opens the splits that the arguments name; an OptionError names one that is missing or holds no image."""
    return {
        name: open_split(Data(dataset=args.dataset, root=args.root, train_split=name), "train_split", "--splits")
        for name in args.splits
    }


def read_all(images: Images, workers: int, title: str) -> Generator[tuple[Any, int] | BrokenImage, None, None]:
    """Yields every sample of `images` in order, read by `workers` processes, and shows a progress bar."""
    loader = WorkerLoader(images, batch_size=16, num_workers=workers, collate_fn=list)
    with progress(title, len(images), "images") as bar:
        for samples in loader:
            yield from samples
            bar.update(len(samples))


class Checked(Images):
    """Images that are read to be checked: the digest of each file, the first 8 bytes of its SHA-256.

    Equal digests are copies.
    """

    def parse(self, file: BinaryIO) -> int:
        super().parse(file)
        file.seek(0)
        digest = hashlib.file_digest(cast(Any, file), "sha256").digest()
        return int.from_bytes(digest[:8], "little", signed=True)


def read_splits(splits: Mapping[str, Images], workers: int) -> int:
    """Reads every image of `splits` once; prints their numbers, the broken ones, files that are no images, and copies
    in two splits. Returns the number of broken images.
    """
    num_broken, digests = 0, dict[str, np.ndarray]()
    for name, images in splits.items():
        samples = [*read_all(Checked(images.reader, mode=images.mode), workers, name)]
        broken = [sample for sample in samples if isinstance(sample, BrokenImage)]
        digests[name] = np.array([sample[0] for sample in samples if not isinstance(sample, BrokenImage)], np.int64)
        num_broken += len(broken)
        print(f"{name}: {len(images):,} images of {len(classes_of(images)):,} classes, {len(broken):,} broken")
        print("".join(f"  {line}\n" for line in [*broken, describe_files(images.reader.ignored)] if str(line)), end="")
    names = [classes_of(images) for images in splits.values()]
    if len(names) == 2 and names[0] != names[1]:
        print(f"classes differ: {describe_difference(*names)}")
    for first, second in combinations(digests, 2):
        if count := np.isin(digests[second], digests[first]).sum():
            number = f"{count:,} of {len(digests[second]):,}"
            print(f"warning: {second}: {number} images are exact copies of images of {first}")
    return num_broken


if __name__ == "__main__":
    main()
