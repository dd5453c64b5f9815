"""Readers of data sets in the formats of other libraries: Hugging Face datasets, torchvision's.

Both allow random access: order, exact resuming and the rules for broken images are the same as for class folders.
"""

import importlib.util
import io
import zlib
from typing import BinaryIO

import numpy as np
from timm.data.dataset_factory import create_dataset
from timm.data.readers.reader_factory import create_reader

from engine.data.arrays import ArrayReader
from engine.data.folders import measure_files
from engine.data.images import BrokenImage
from engine.data.layout import LayoutError, SplitReader
from engine.runtime.reading import open_regular
from engine.runtime.text import one_line

TORCH = "torch/"
"""Prefix of the names of torchvision's data sets, as in timm."""

HASHED_BYTES = 2**30
"""Largest size of a Hugging Face data set whose images are hashed to identify it, bytes."""


class HfdsReader(SplitReader):
    """Reads the columns `image` and `label` of a split of a Hugging Face data set, by timm's reader.

    Args:
        root: folder of the data set (such as one of parquet files), or its name on the hub. split: its name there.
    Raises:
        LayoutError: the library is missing or cannot read the data set, the split or a column does not exist, or an
            image has no label.
    """

    def __init__(self, root: str, split: str):
        super().__init__()
        if importlib.util.find_spec("datasets") is None:
            raise LayoutError("data.dataset=hfds needs the package datasets; `pip install 'datasets>=5.2'`")
        try:
            self.rows = create_reader(f"hfds/{root}", split=split)
        except Exception as error:  # the library may raise anything: for the hub, the network, a file
            reason = one_line(" ".join(str(error).split()))
            raise LayoutError(f"the package datasets cannot read it: {reason}") from error
        columns = self.rows.dataset.data  # timm adds an empty column where there is none
        found = [name for name in columns.column_names if columns.column(name).null_count < len(columns)]
        for key in (self.rows.image_key, self.rows.label_key):
            if key not in found:
                raise LayoutError(
                    f"the column {key!r} is missing or empty; rename one to that; found: {one_line(', '.join(found))}"
                )
        labels = self.rows.dataset[self.rows.label_key][:]
        kinds = {type(label).__name__ for label in labels if label is not None}
        if kinds - {"int"} and kinds - {"str"}:
            raise LayoutError(f"labels are numbers of classes, or names; the column holds {', '.join(sorted(kinds))}")
        self.class_to_idx = self.rows.class_to_idx
        if not self.class_to_idx:
            indices = {label: index for index, label in enumerate(sorted({*labels} - {None}))}
            self.class_to_idx = {str(label): index for label, index in indices.items()}
            labels = [*map(indices.get, labels)]
        known = range(len(self.class_to_idx))  # test splits have labels of -1, or null
        if outside := [row for row, label in enumerate(labels) if label not in known]:
            raise LayoutError(f"{len(outside):,} images have no label, such as row {outside[0]}; name another split")
        self.labels = np.array(labels)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        image = self.rows.dataset[index][self.rows.image_key] or {}
        if image.get("bytes"):
            return io.BytesIO(image["bytes"]), int(self.labels[index])
        if image.get("path"):
            return open_regular(image["path"]), int(self.labels[index])
        raise BrokenImage("the row has no image")

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f"{self.labels[index]}/{index}"  # the name of the file would need the image to be read

    def fingerprints(self) -> np.ndarray:
        """CRC-32 of every image, (number,) int64, or its size in bytes: of a file, and in more than `HASHED_BYTES`."""
        column = self.rows.dataset.data.column(self.rows.image_key)
        measure = zlib.crc32 if column.nbytes <= HASHED_BYTES else len
        parts = []
        for chunk in column.chunks:
            contents = [content.as_buffer() for content in chunk.field("bytes")]
            sizes = measure_files(path or "" for path in chunk.field("path").to_pylist())
            values = (size if x is None else measure(x) for x, size in zip(contents, sizes, strict=True))
            parts.append(np.fromiter(values, np.int64))
        return np.concatenate(parts)


class TorchReader(ArrayReader):
    """Reads a data set of torchvision from the folder `root` to which torchvision has downloaded it.

    Args:
        name: name of the data set in timm, such as torch/cifar10. split: train, or val for the test images.
    Raises:
        LayoutError: the data set is missing or damaged, or the split is neither train nor val.
    """

    def __init__(self, name: str, root: str, *, split: str):
        if split not in ("train", "val"):
            raise LayoutError(f"{split!r} is no split of torchvision's; known: train, val (its test images)")
        try:
            dataset = create_dataset(name, root, split)
            images, labels = np.asarray(dataset.data), np.asarray(dataset.targets)
            if len(images) != len(labels):
                raise ValueError(f"{len(images)} images, {len(labels)} labels")
        except Exception as error:  # torchvision may raise anything for a damaged file
            raise LayoutError("not found, or damaged; torchvision.datasets puts it there with download=True") from error
        super().__init__(images, labels, dataset.classes)
