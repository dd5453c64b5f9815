"""Readers of images in memory, and the embedded digits."""

import io
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.data.layout import SplitReader


class ArrayReader(SplitReader):
    """Reads images in memory, each as a PGM file, or PPM.

    Args:
        images: bytes (number, height, width), grey, or (number, height, width, 3), RGB. labels: class indices.
        classes: names, in the order of their indices. white: the largest level.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: Iterable[str], white: int = 255):
        super().__init__()
        self.images, self.labels = images, labels
        self.class_to_idx = {name: index for index, name in enumerate(classes)}
        self.header = b"P%d %d %d %d\n" % (images.ndim + 2, images.shape[2], images.shape[1], white)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return io.BytesIO(self.header + self.images[index].tobytes()), int(self.labels[index])

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f"{self.labels[index]}/{index}.pgm"

    def fingerprints(self) -> np.ndarray:
        """CRC-32 of every image, with its header; (number,) int64."""
        begin = zlib.crc32(self.header)
        return np.array([zlib.crc32(image.tobytes(), begin) for image in self.images], np.int64)


DIGITS = Path(__file__).with_name("digits.npz")


class DigitsReader(ArrayReader):
    """Reads one split of the embedded digits."""

    def __init__(self, split: str):
        with np.load(DIGITS) as arrays:
            super().__init__(arrays[f"{split}_images"], arrays[f"{split}_labels"], map(str, range(10)), white=16)
