"""The names, classes and checksums of the images of a split in one file, which all processes of a node map.

The file is in the format safetensors: its arrays can be mapped, and nothing in it is run.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from engine.data.layout import LayoutError, Samples
from engine.runtime.files import write_atomically
from engine.runtime.reading import open_regular, parsing

LIMIT = 2**27
"""Largest size of a header, bytes; it holds the names of the classes."""

TYPES = {"U8": np.uint8, "U32": np.uint32, "I32": np.int32, "I64": np.int64}
"""Type in the format -> type of NumPy, little-endian."""


def write_table(
    path: Path, samples: Samples, class_to_idx: Mapping[str, int], notes: Mapping[str, str], **arrays: np.ndarray
) -> None:
    """Writes names and labels of `samples`, the names of the classes, texts, and further arrays of any length.

    Raises:
        OSError: no space, or no permission; the file is then as it was before.
    """
    classes = sorted(class_to_idx, key=class_to_idx.__getitem__)
    tensors: dict[str, np.ndarray] = {
        "names": np.frombuffer(samples.text, np.uint8),
        "ends": np.asarray(samples.ends, np.int64),
        "labels": np.asarray(samples.labels, np.int32),
        **arrays,
    }
    contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}  # save ignores strides
    refuse_others(path)
    write_atomically(path, save(contiguous, {"classes": json.dumps(classes), **notes}))  # save_file would hide it


def refuse_others(path: Path) -> None:
    """Raises LayoutError if another file lies where a table is to be written."""
    try:
        if os.path.lexists(path):
            map_table(path)
    except (LayoutError, OSError):
        problem = "is there already, and is damaged or no file of this command"
        raise LayoutError(f"{path.name} {problem}; move it away, then run the command again") from None


def map_table(path: Path, **types: str) -> tuple[Samples, dict[str, int], dict[str, np.ndarray], dict[str, str]]:
    """Maps a file of `write_table`, which need not be trusted, into memory.

    Args:
        types: name of a further array, with one value for each image -> its type in the format.
    Returns:
        Names and labels, class name -> index, the further arrays, and the texts.
    Raises:
        LayoutError: the file is damaged, no such file, or cannot be read.
    """
    with parsing(path.name, "make it anew", LayoutError):
        arrays, metadata = _map_arrays(path)
        wanted = {"names": "U8", "ends": "I64", "labels": "I32", **types}
        found = {name: arrays[name][0] for name in wanted}
        if found != wanted:
            raise ValueError(f"arrays of types {found}")
        names, ends, labels = (arrays[name][1] for name in ("names", "ends", "labels"))
        number = len(labels)
        lengths = {name: len(arrays[name][1]) - (name == "ends") for name in ("ends", *types)}
        if not number or set(lengths.values()) != {number}:
            raise ValueError(f"{number:,} labels, but {lengths}")
        classes = json.loads(metadata["classes"])
        class_to_idx = {name: index for index, name in enumerate(classes)}
        if len(class_to_idx) != len(classes) or not all(isinstance(name, str) for name in classes):
            raise ValueError("classes that are equal, or no names")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise ValueError(f"labels from {labels.min()} to {labels.max()}, for {len(classes):,} classes")
    return Samples.of(names, ends, labels), class_to_idx, {name: arrays[name][1] for name in types}, metadata


def _map_arrays(path: Path) -> tuple[dict[str, tuple[str, np.ndarray]], dict[str, Any]]:
    """Returns type and mapped array of every name in a file of one-dimensional arrays, and its metadata."""
    with open_regular(path) as file:  # named once: another process may replace it
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(LIMIT, size - 8):
            raise ValueError("no header")
        header = json.loads(file.read(length))
        metadata, arrays = header.pop("__metadata__", {}), {}
        for name, entry in header.items():
            (number,), (begin, end), kind = entry["shape"], entry["data_offsets"], np.dtype(TYPES[entry["dtype"]])
            if not 0 <= begin <= end <= size - 8 - length or end - begin != number * kind.itemsize:
                raise ValueError(f"{name}: bytes {begin} to {end}")
            mapped = np.empty(0, kind)
            if number:  # an empty array cannot be mapped
                mapped = np.memmap(file, kind.newbyteorder("<"), "r", 8 + length + begin, (number,)).view(np.ndarray)
            arrays[name] = entry["dtype"], mapped
    return arrays, metadata
