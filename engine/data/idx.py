"""IDX files, the format of MNIST and its successors (Fashion-MNIST, KMNIST, EMNIST), gzipped or not.

The split NAME is two files: NAME-images-idx3-ubyte holds grey images of one size, NAME-labels-idx1-ubyte their labels.
The names of the classes are the labels that occur.
"""

import gzip
import itertools
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from engine.data.arrays import ArrayReader
from engine.data.layout import LayoutError
from engine.runtime.errors import UserError
from engine.runtime.files import make_directory, write_file
from engine.runtime.reading import open_regular, parsing
from engine.runtime.terminal import progress

IMAGES, LABELS = "-images-idx3-ubyte", "-labels-idx1-ubyte"
"""Endings of the two files of a split, after its name."""

ENDINGS = (IMAGES, f"{IMAGES}.gz")
"""Possible endings of a file of images, after the name of its split."""

UBYTE = 0x800
"""Magic number of unsigned bytes, to which the number of dimensions is added."""

LIMIT = 2**30
"""Largest size of an unpacked file, bytes, as files are held in memory. The largest of EMNIST has half of it."""


class IdxReader(ArrayReader):
    """Reads the images in the file `path`, and their labels from the file beside it.

    Raises:
        LayoutError: as in `read_idx`, or the files do not belong together.
    """

    def __init__(self, path: str):
        images = read_idx(Path(path), num_dims=3)
        stem = path.removesuffix(".gz").removesuffix(IMAGES) + LABELS
        beside = next((file for file in (Path(stem), Path(f"{stem}.gz")) if file.is_file()), None)
        if beside is None:
            raise LayoutError(f"no {Path(stem).name!r} (or .gz) beside it")
        labels = read_idx(beside, num_dims=1)
        if len(images) != len(labels):
            raise LayoutError(f"{len(images):,} images, but {len(labels):,} labels in {beside.name!r}")
        values, labels = np.unique(labels, return_inverse=True)
        super().__init__(images, labels, map(str, values))


def read_idx(path: Path, num_dims: int) -> np.ndarray:
    """Reads the IDX file `path`, which need not be trusted, as a non-empty array of bytes of `num_dims` dimensions.

    Raises:
        LayoutError: the file is damaged, cut off, empty, larger than `LIMIT`, of another type, or cannot be read.
    """
    header = struct.Struct(f">{1 + num_dims}I")
    packed = path.suffix == ".gz"
    with (
        parsing(path.name, refuse=LayoutError),
        open_regular(path) as stored,
        gzip.open(stored) if packed else stored as file,
    ):
        begin = file.read(header.size)
        magic, *shape = header.unpack(begin.ljust(header.size, b"\0"))
        size = math.prod(shape)
        if magic != UBYTE + num_dims:
            raise LayoutError(f"{path.name!r} begins with {begin[:4].hex()}, not with {UBYTE + num_dims:08x}")
        if not 0 < size <= LIMIT:
            raise LayoutError(f"{path.name!r}: {size:,} bytes by its header; 1 to {LIMIT:,} can be read")
        content = file.read(size + 1)
    if len(content) != size:
        problem = "goes on after" if len(content) > size else f"ends after {len(content):,} of"
        raise LayoutError(f"{path.name!r} {problem} the {size:,} bytes of its header")
    return np.frombuffer(content, np.uint8).reshape(shape)


def new_files(directory: Path, splits: Iterable[str]) -> list[tuple[Path, Path]]:
    """Makes `directory`; returns the paths of images and labels of each of the `splits` to be written there.

    Raises:
        UserError: a file exists already, or cannot be written.
    """
    files = [(directory / f"{split}{IMAGES}.gz", directory / f"{split}{LABELS}.gz") for split in splits]
    for path in itertools.chain(*files):
        for each in (path, path.with_suffix("")):  # the latter would be read in its place
            if os.path.lexists(each):
                raise UserError(f"{each}: is there already; remove it, or name another directory")
    make_directory(directory, [path.name for path in itertools.chain(*files)], "output")
    return files


def write_idx(path: Path, values: np.ndarray) -> None:
    """Writes bytes as a gzipped IDX file; equal bytes give equal files.

    Raises:
        UserError: the file cannot be written; a file that exists is unchanged.
    """
    header = struct.pack(f">{1 + values.ndim}I", UBYTE + values.ndim, *values.shape)
    write_file(path, gzip.compress(header + values.astype(np.uint8).tobytes(), mtime=0))


def write_splits(directory: Path, counts: Sequence[int], draw: Callable[[int, int], tuple[np.ndarray, int]]) -> None:
    """Writes the splits train and t10k, of so many images, to new files in `directory`.

    Args:
        draw: number of a split, and of an image -> its bytes, and its label.
    Raises:
        UserError: a split exists already or cannot be written; and those of `draw`.
    """
    splits = ("train", "t10k")
    for number, (split, files, count) in enumerate(zip(splits, new_files(directory, splits), counts, strict=True)):
        drawn = []
        with progress(split, count, "images") as bar:
            for i in range(count):
                drawn.append(draw(number, i))
                bar.update()
        for path, values in zip(files, zip(*drawn, strict=True), strict=True):
            write_idx(path, np.stack(values))
