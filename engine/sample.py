"""Writes the first images of every class of a split in IDX files as a split of its own: a small, balanced sample.

    python -m engine.sample /usr/share/datasets/fashion-mnist reference --split t10k --per-class 200

The images keep their order, the split its name.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from engine.config import refuse_bad_input
from engine.data import classes_of, open_split
from engine.errors import UserError
from engine.files import make_output
from engine.idx import IMAGES, LABELS, IdxReader, write_idx
from engine.schema import Data


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a balanced sample of a split in IDX files.")
    parser.add_argument("root", help="directory that holds the split, data.root of a run")
    parser.add_argument("output", type=Path, help="directory of the sample")
    parser.add_argument("--split", default="t10k", help="its name (t10k)")
    parser.add_argument("--per-class", type=int, default=200, help="images of each class (200)")
    args = parser.parse_args(arguments)
    if args.per_class < 1:
        parser.error(f"--per-class must be 1 or more, got {args.per_class}")
    with refuse_bad_input():
        sample(args.root, args.output, args.split, args.per_class)


def sample(root: str, output: Path, split: str, per_class: int) -> None:
    """Writes the first `per_class` images of every class of the split and their labels, gzipped, below `output`.

    Raises:
        OptionError: a split that is missing or damaged.
        UserError: a class has fewer images, or the sample is there already or cannot be written.
    """
    files = [output / f"{split}{ending}.gz" for ending in (IMAGES, LABELS)]
    for path in files:
        if path.exists():
            raise UserError(f"{path}: is there already; remove it, or name another directory")
    images = open_split(Data(dataset="idx", root=root, val_split=split), "val_split")
    reader, names = cast(IdxReader, images.reader), classes_of(images)
    chosen = [np.flatnonzero(reader.labels == label)[:per_class] for label in range(len(names))]
    for name, found in zip(names, chosen, strict=True):
        if len(found) < per_class:
            raise UserError(f"{root}: class {name} of {split} has {len(found)} images; --per-class is {per_class}")
    make_output(output, [path.name for path in files], "output")
    order = np.sort(np.concatenate(chosen))
    for path, values in zip(
        files, (reader.images[order], np.array(names, np.uint8)[reader.labels[order]]), strict=True
    ):
        write_idx(path, values)
    print(f"{output}: {len(order):,} images of {len(names)} classes")


if __name__ == "__main__":
    main()
