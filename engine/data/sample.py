"""Writes a small, balanced sample of a split in IDX files: the first images of every class, as a split of its own.

The images keep their order, and the split keeps its name.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.config.schema import Data
from engine.data.idx import IdxReader, new_files, write_idx
from engine.data.splits import classes_of, open_split
from engine.runtime.arguments import ArgumentParser, Count
from engine.runtime.errors import UserError, refuse_bad_input


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Write a balanced sample of a split in IDX files.")
    parser.add_argument("root", help="directory that holds the split, as data.root of a run")
    parser.add_argument("output", type=Path, help="directory of the sample")
    parser.add_argument("--split", default="t10k", help="name of the split (t10k)")
    parser.add_argument("--per-class", type=Count(), default=200, help="number of images of each class (200)")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        sample(args.root, args.output, args.split, args.per_class)


def sample(root: str, output: Path, split: str, per_class: int) -> None:
    """Writes the first `per_class` images of every class of the split and their labels, gzipped, to `output`.

    Raises:
        OptionError: the split is missing or damaged.
        UserError: a class has fewer images, or the sample exists already or cannot be written.
    """
    images = open_split(Data(dataset="idx", root=root, val_split=split), "val_split", "--split")
    reader, names = images.reader, classes_of(images)
    assert isinstance(reader, IdxReader)
    chosen = [np.flatnonzero(reader.labels == label)[:per_class] for label in range(len(names))]
    for name, found in zip(names, chosen, strict=True):
        if len(found) < per_class:
            raise UserError(f"{root}: class {name} of {split} has {len(found)} images; --per-class is {per_class}")
    ((image_file, label_file),) = new_files(output, [split])
    order = np.sort(np.concatenate(chosen))
    write_idx(image_file, reader.images[order])
    write_idx(label_file, np.array(names, np.uint8)[reader.labels[order]])
    print(f"{output}: {len(order):,} images of {len(names)} classes")


if __name__ == "__main__":
    main()
