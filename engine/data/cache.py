"""Reads and writes a prepared data set: decoded images in one file, so that training does not decode JPEG every epoch.

`SPLIT.pixels` holds the images one after another, each a binary PPM file (8-bit RGB). The index `SPLIT.npz` holds the
offset, class, checksum and original file name of each image. A broken image has no bytes but keeps its position, so
that readers can treat it as in the original data set.
"""

import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from timm.data.readers.reader import Reader
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from engine.data.images import BrokenImage

INDEX = ".npz"


class CacheReader(Reader):
    """timm reader of one split that `write_cache` has written.

    Args:
        path: the index; the file of pixels lies beside it.
    Raises:
        OSError: the index or the pixels are missing or damaged, or do not belong together.
    """

    ignored = ()

    def __init__(self, path: str):
        super().__init__()
        self.pixels = pixels_of(Path(path))
        try:
            with open(path, "rb") as file, np.load(file) as index:
                self.begins, self.labels, self.checksums, self.names, classes = (
                    index[name] for name in ("begins", "labels", "checksums", "names", "classes")
                )
        except Exception as error:  # reading a damaged archive may raise anything
            raise OSError(0, f"damaged index, {type(error).__name__}: {error}") from error
        if not self.pixels.is_file() or self.pixels.stat().st_size != self.begins[-1]:
            raise OSError(0, f"{self.pixels.name} is missing or has not the {self.begins[-1]} bytes of the index")
        self.class_to_idx = {os.fsdecode(name): label for label, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        begin, end = map(int, self.begins[index : index + 2])
        if begin == end:
            raise BrokenImage("was broken when the cache was made")
        # The file is not mapped into memory, where a disk error would kill the process.
        with open(self.pixels, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), end - begin, begin)
        if zlib.crc32(content) != self.checksums[index]:
            raise BrokenImage(f"damaged in {self.pixels.name}: the checksum differs; prepare the cache anew")
        return io.BytesIO(content), int(self.labels[index])

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return os.fsdecode(self.names[index])


def pixels_of(path: Path) -> Path:
    """Returns the path of the file of pixels that belongs to the index `path`."""
    return path.with_suffix(".pixels")


def encode(image: Image.Image, short_side: int | None) -> bytes:
    """Encodes an RGB image as a PPM file. A short side above `short_side` pixels is reduced to it, bicubic as in
    validation; None keeps the size.
    """
    if short_side is not None and min(image.size) > short_side:
        image = resize(image, short_side, InterpolationMode.BICUBIC)
    return b"P6 %d %d 255\n" % image.size + image.tobytes()


def write_cache(
    path: Path, samples: Iterable[tuple[bytes, int] | BrokenImage], names: Iterable[str], classes: Iterable[str]
) -> None:
    """Writes the index `path` and the pixels beside it, and flushes them to disk.

    Args:
        samples: PPM file and class index of every image, or `BrokenImage`, in order. names: file names of the images.
        classes: class names in the order of their indices.
    Raises:
        OSError: no space, or no permission.
    """
    begins, labels, checksums = [0], [], []
    with pixels_of(path).open("wb") as file:
        for sample in samples:
            content, label = (b"", -1) if isinstance(sample, BrokenImage) else sample
            file.write(content)
            begins.append(begins[-1] + len(content))
            labels.append(label)
            checksums.append(zlib.crc32(content))
        _flush(file)
    with path.open("wb") as file:
        np.savez(
            file,
            begins=np.array(begins, np.int64),
            labels=np.array(labels, np.int32),
            checksums=np.array(checksums, np.uint32),
            names=np.array([os.fsencode(name) for name in names]),
            classes=np.array([os.fsencode(name) for name in classes]),
        )
        _flush(file)


def _flush(file: io.BufferedWriter) -> None:
    """Flushes `file` to disk and, where the system can, drops it from the page cache, so that checks read the disk."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
