"""Images in IDX files, the format of MNIST and its successors (Fashion-MNIST, KMNIST, EMNIST), gzipped or not.

Two files make up the split NAME: NAME-images-idx3-ubyte holds grey images of one size, NAME-labels-idx1-ubyte their
labels. Classes are the labels that occur, named by their numbers: the files know no other names.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from engine.files import open_regular, write_file
from engine.readers import ArrayReader, LayoutError

IMAGES, LABELS = "-images-idx3-ubyte", "-labels-idx1-ubyte"
"""What follows the name of a split in those of its two files."""

ENDINGS = (IMAGES, f"{IMAGES}.gz")
"""How a file of images may end."""

UBYTE = 0x800
"""Magic number of unsigned bytes, but for its last byte, the number of dimensions."""

LIMIT = 2**30
"""Bytes of a file, unpacked: they are held in memory. The largest of EMNIST takes half of it."""


class IdxReader(ArrayReader):
    """Reads the images in the file `path`, and their labels in the file beside it.

    Raises:
        LayoutError: the files are damaged, cut off or larger than `LIMIT`, or do not belong together.
        OSError: one of them cannot be read.
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
    """The bytes in the IDX file `path`, an array of `num_dims` dimensions, none of which is 0. It need not be trusted.

    Raises:
        LayoutError: it is damaged, cut off, of another type or number of dimensions, empty, or larger than `LIMIT`.
        OSError: it cannot be read.
    """
    header = struct.Struct(f">{1 + num_dims}I")
    try:
        with open_regular(path) as packed, gzip.open(packed) if path.suffix == ".gz" else packed as file:
            begin = file.read(header.size)
            magic, *shape = header.unpack(begin.ljust(header.size, b"\0"))
            size = math.prod(shape)
            if magic != UBYTE + num_dims:
                raise LayoutError(f"{path.name!r} begins with {begin[:4].hex()}, not with {UBYTE + num_dims:08x}")
            if not 0 < size <= LIMIT:
                raise LayoutError(f"{path.name!r}: {size:,} bytes by its header; 1 to {LIMIT:,} can be read")
            content = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LayoutError(f"{path.name!r} is damaged or cut off: {error}") from None
    if len(content) != size:
        problem = "goes on after" if len(content) > size else f"ends after {len(content):,} of"
        raise LayoutError(f"{path.name!r} {problem} the {size:,} bytes of its header")
    return np.frombuffer(content, np.uint8).reshape(shape)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Writes bytes as a gzipped IDX file: the same bytes, the same file.

    Raises:
        UserError: it cannot be written; what is there is unchanged.
    """
    header = struct.pack(f">{1 + values.ndim}I", UBYTE + values.ndim, *values.shape)
    write_file(path, gzip.compress(header + values.astype(np.uint8).tobytes(), mtime=0))
