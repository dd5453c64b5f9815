"""A prepared data set: decoded images in one file, so that training does not decode JPEG every epoch.

`SPLIT.pixels` holds the images one after another, each a binary PPM file (8-bit RGB). The index `SPLIT.npz` holds the
offset, class, checksum, fingerprint and original name of each image, and the short side to which they were made
smaller. A broken image has no bytes, but keeps its position and its class.
"""

import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from engine.data.images import BrokenImage
from engine.data.layout import SplitReader
from engine.runtime.files import write_atomically
from engine.runtime.reading import open_regular
from engine.runtime.text import describe_error

INDEX = ".npz"

MOST_BYTES = 2**29
"""Largest size of an image, bytes; an image that may be decoded has half of it at most."""

KINDS = {
    "begins": "i",
    "labels": "i",
    "checksums": "u",
    "fingerprints": "i",
    "names": "S",
    "classes": "S",
    "short_side": "i",
}
"""Array of the index -> kind of its NumPy dtype."""


class CacheReader(SplitReader):
    """Reads one split that `write_cache` has written; the index `path`, beside the pixels, need not be trusted.

    Raises:
        OSError: the index or the pixels are missing or damaged, or do not belong together.
    """

    def __init__(self, path: str):
        super().__init__()
        self.pixels = pixels_of(Path(path))
        try:
            index = _read_index(path)
        except Exception as error:  # reading a damaged archive may raise anything
            raise OSError(0, f"damaged index, {describe_error(error)}; prepare the cache anew") from error
        self.begins, self.labels, self.checksums, self.originals, self.names, classes, short_side = (
            index[name] for name in KINDS
        )
        self.short_side = int(short_side[0])
        if not self.pixels.is_file() or self.pixels.stat().st_size != self.begins[-1]:
            raise OSError(0, f"{self.pixels.name} is missing or has not the {self.begins[-1]} bytes of the index")
        self.class_to_idx = {os.fsdecode(name): label for label, name in enumerate(classes)}

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        begin, end = map(int, self.begins[index : index + 2])
        if begin == end:
            raise BrokenImage("was broken when the cache was made")
        # The file is not mapped into memory, where a disk error would kill the process.
        with open_regular(self.pixels) as file:
            content = os.pread(file.fileno(), end - begin, begin)
        if zlib.crc32(content) != self.checksums[index]:
            raise BrokenImage(f"damaged in {self.pixels.name}: the checksum differs; prepare the cache anew")
        return io.BytesIO(content), int(self.labels[index])

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return os.fsdecode(self.names[index])

    def fingerprints(self) -> np.ndarray:
        """Fingerprints of the original images, (number,) int64; the checksum of an image that was changed."""
        return self.originals


def _read_index(path: str) -> dict[str, np.ndarray]:
    """Reads the arrays of the index `path`, which need not be trusted, and checks that they belong together."""
    with open_regular(path) as file, np.load(file) as arrays:
        if any(member.compress_type for member in arrays.zip.infolist()):
            raise ValueError("its arrays are compressed, and may be of any size")
        index = {name: arrays[name] for name in KINDS}
    number, num_classes = len(index["labels"]), len(index["classes"])
    lengths = {"begins": number + 1, "classes": num_classes, "short_side": 1}
    for name, kind in KINDS.items():
        array = index[name]
        if array.shape != (lengths.get(name, number),) or array.dtype.kind != kind:
            raise ValueError(f"{name}: {array.dtype} of shape {array.shape}, for {number:,} images")
    begins, labels = (index[name].astype(np.int64) for name in ("begins", "labels"))
    sizes = np.diff(begins)
    if not number or begins[0] or begins.min() < 0 or sizes.min() < 0 or sizes.max() > MOST_BYTES:
        raise ValueError(f"begins: no offsets in order of at least one image of at most {MOST_BYTES:,} bytes")
    if len({*index["classes"].tolist()}) < num_classes:
        raise ValueError("classes: names that are equal")
    if outside := labels[(labels < 0) | (labels >= num_classes)].tolist():
        raise ValueError(f"labels: {outside[0]} is none of {num_classes:,} classes")
    return index | {"begins": begins, "labels": labels}


def pixels_of(path: Path) -> Path:
    """Returns the path of the file of pixels that belongs to the index `path`."""
    return path.with_suffix(".pixels")


def encode(image: Image.Image, short_side: int | None) -> tuple[bytes, bool]:
    """Encodes an RGB image as a PPM file, and returns whether it was made smaller.

    A short side above `short_side` pixels is reduced to it, bicubic as in validation by default; None keeps the size.
    """
    is_reduced = short_side is not None and min(image.size) > short_side
    if is_reduced:
        image = resize(image, short_side, InterpolationMode.BICUBIC)
    return b"P6 %d %d 255\n" % image.size + image.tobytes(), is_reduced


def write_cache(
    path: Path, contents: Iterable[tuple[bytes, bool]], source: SplitReader, short_side: int | None
) -> tuple[int, int]:
    """Writes new files, the pixels and then the index `path`; returns their bytes, and the number of images without.

    Args:
        contents: what `encode` returns of every image of `source` in order; no bytes of a broken one.
        short_side: that `encode` was given.
    Raises:
        OSError: no space, no permission, or the pixels are there. What was written is then removed.
    """
    begins, checksums, fingerprints = [0], [], source.fingerprints().tolist()
    classes = source.class_to_idx
    with pixels_of(path).open("xb") as file:
        try:
            for number, (content, is_changed) in enumerate(contents):
                file.write(content)
                begins.append(begins[-1] + len(content))
                checksums.append(zlib.crc32(content))
                if is_changed:
                    fingerprints[number] = checksums[-1]
            file.flush()
            os.fsync(file.fileno())
            index = io.BytesIO()
            np.savez(
                index,
                begins=np.array(begins, np.int64),
                labels=np.asarray(source.labels, np.int32),
                checksums=np.array(checksums, np.uint32),
                fingerprints=np.array(fingerprints, np.int64),
                names=np.array([os.fsencode(name) for name in source.filenames()]),
                classes=np.array([os.fsencode(name) for name in sorted(classes, key=classes.__getitem__)]),
                short_side=np.array([short_side or 0], np.int64),
            )
            write_atomically(path, index.getvalue())
        except BaseException:
            if not path.exists():  # writing the index can fail after its rename
                pixels_of(path).unlink()
            raise
    return begins[-1], int((np.diff(begins) == 0).sum())
