"""A part of a split: images of every class (`data.subset`), images held out for validation (`data.val_fraction`,
`data.folds`), or the classes named by `data.classes`."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from attention.options import OptionError, nearest
from engine.config.schema import Data
from engine.data.layout import SplitReader
from engine.runtime.distributed import mix_seeds
from engine.runtime.reading import parsing, read_bounded
from engine.runtime.text import one_line, to_nfc

LIMIT = 2**24
"""Largest size of a file of class names, bytes."""

ALL_CLASSES = "data.classes=null takes the classes of the data"
"""Remedy of a file of class names that does not fit the data. Validation matches those by name, without the file."""


class SubsetReader(SplitReader):
    """Reads the images `indices` of `reader`; `num_available` is the number of images of the whole split.

    Args:
        labels, class_to_idx: class index of each of these images, and of each name; None: as in `reader`.
    """

    def __init__(
        self,
        reader: SplitReader,
        indices: Sequence[int] | np.ndarray,
        labels: np.ndarray | None = None,
        class_to_idx: Mapping[str, int] | None = None,
    ):
        super().__init__()
        self.reader, self.indices = reader, np.asarray(indices, np.int64)
        self.ignored, self.short_side = reader.ignored, reader.short_side
        self.num_available: int = reader.num_available if isinstance(reader, SubsetReader) else len(reader)
        self.labels = np.asarray(reader.labels)[self.indices] if labels is None else labels
        self.class_to_idx = reader.class_to_idx if class_to_idx is None else class_to_idx

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        file, _ = self.reader[int(self.indices[index])]
        return file, int(self.labels[index])

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.reader.filename(int(self.indices[index]))

    def filenames(self, basename: bool = False, absolute: bool = False) -> Iterator[str]:
        return map(self._filename, range(len(self)))

    def fingerprints(self) -> np.ndarray:
        return self.reader.fingerprints()[self.indices]


def choose_images(reader: SplitReader, subset: int | float, seed: int) -> SubsetReader:
    """Chooses `subset` images (int) of every class, or this fraction (float), rounded, but at least one; in order.

    For one seed a larger subset includes every smaller one. OptionError: a class has fewer images.
    """
    return SubsetReader(reader, np.sort(np.concatenate(_choose(reader, subset, seed, "data.subset", spared=0))))


def hold_out(reader: SplitReader, data: Data) -> tuple[SubsetReader, SubsetReader]:
    """Divides the images into those to train on and those held out, each in order.

    `data.val_fraction` holds out the images that `choose_images` would choose. `data.folds` deals the images of all
    classes, shuffled within each, to the folds in turn, and holds out those of `data.fold`: the numbers of images of
    two folds, of any class and of all, differ by one at most.

    Raises:
        OptionError: no image of a class would stay, or a fold would have none of it.
    """
    if data.folds is None:
        assert data.val_fraction is not None, "nothing is held out"
        held = np.concatenate(_choose(reader, data.val_fraction, data.subset_seed, "data.val_fraction", spared=1))
    else:
        classes = [*_shuffle_classes(reader, data.subset_seed)]
        for name, images in classes:
            if len(images) < data.folds:
                problem = f" = {data.folds}, but class {one_line(name, 100)!r} has {len(images)} images; lower it"
                raise OptionError("data.folds", problem)
        held = np.concatenate([images for _, images in classes])[data.fold :: data.folds]
    return SubsetReader(reader, np.setdiff1d(np.arange(len(reader)), held)), SubsetReader(reader, np.sort(held))


def _shuffle_classes(reader: SplitReader, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name of every class and the indices of its images, in an order that depends on `seed` alone."""
    labels = np.asarray(reader.labels)
    ends = np.bincount(labels, minlength=len(reader.class_to_idx)).cumsum()
    by_class = np.split(np.argsort(labels, kind="stable"), ends[:-1])
    for name, label in reader.class_to_idx.items():
        images, generator = by_class[label], torch.Generator().manual_seed(mix_seeds(seed, label))
        yield name, images[torch.randperm(len(images), generator=generator).numpy()]


def _choose(reader: SplitReader, number: int | float, seed: int, key: str, spared: int) -> list[np.ndarray]:
    """Returns the indices of `number` images of each class, see `choose_images`; leaves out `spared` images of each."""
    chosen = []
    for name, images in _shuffle_classes(reader, seed):
        count = number if isinstance(number, int) else max(1, round(number * len(images)))
        if count > len(images) - spared:
            stay = ", and some must stay" * (spared > 0)
            remedy = "lower it" if len(images) > spared + 1 or not spared else "add images, or leave the class out"
            problem = f" = {number}, but class {one_line(name, 100)!r} has {len(images)} images{stay}; {remedy}"
            raise OptionError(key, problem)
        chosen.append(images[:count])
    return chosen


def choose_classes(reader: SplitReader, path: str) -> SubsetReader:
    """Chooses the images of the classes that the file `path` names, one per line; the lines give the order of classes.

    If no line is a class of the data and the classes of the data are numbers, the lines name the classes 0, 1, ...

    Raises:
        OptionError: the file cannot be read, is empty, or names a class twice or one that the data lacks.
    """
    names, known = read_names(path), reader.class_to_idx
    if known.keys().isdisjoint(names) and all(name.isdecimal() and int(name) < len(names) for name in known):
        position = {label: int(name) for name, label in known.items()}
    elif unknown := [name for name in names if name not in known]:
        problem = f"{one_line(unknown[0], 100)!r} is no class of the data{one_line(nearest(unknown[0], known), 200)}"
        raise OptionError("data.classes", f" = {path!r}: line {names[unknown[0]]}: {problem}; {ALL_CLASSES}")
    else:
        position = {known[name]: index for index, name in enumerate(names)}
    labels = np.array([position.get(label, -1) for label in range(len(known))])[np.asarray(reader.labels)]
    chosen = np.flatnonzero(labels >= 0)
    return SubsetReader(reader, chosen, labels[chosen], {name: index for index, name in enumerate(names)})


def read_names(path: str) -> dict[str, int]:
    """Reads the names in the file `path`, one per line: name -> number of its line. Blank lines name nothing."""
    with parsing(f" = {path!r}", ALL_CLASSES, partial(OptionError, "data.classes")):
        text = read_bounded(Path(path), LIMIT).decode("utf-8-sig", "surrogateescape")  # as names of folders are
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if (name := to_nfc(line.strip())) and lines.setdefault(name, number) != number:
            shown = one_line(name, 100)
            raise OptionError("data.classes", f" = {path!r}: line {number} names {shown!r} again; leave one out")
    if not lines:
        raise OptionError("data.classes", f" = {path!r}: names no class; write one a line")
    return lines
