"""WebDataset shards: tar files of samples NAME.jpg (or another image) and NAME.cls, read by position.

The places of the samples come from the headers of all shards, which are read at the start, or from an index of them
(`python -m engine.data.prepare ROOT --dataset wds --index`). Both give the same images in the same order.
"""

import json
import os
import posixpath
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save
from tqdm import tqdm

from engine.data.layout import Layout, LayoutError, LayoutReader, Samples, is_hidden, is_image, sort_naturally
from engine.data.tar import find_members, read_member
from engine.runtime.files import write_atomically
from engine.runtime.reading import open_regular, parsing
from engine.runtime.text import one_line

LABEL_BYTES = 18
"""Largest size of a label in a shard, bytes."""

INDEX = ".index.safetensors"
"""Ending of an index, after the name of the split."""

REMEDY = "remove it, and make it anew (python -m engine.data.prepare ROOT --dataset wds --index)"
"""Remedy of an index that is damaged or of other shards."""

TYPES = {"names": np.uint8, "ends": np.int64, "labels": np.int32}
TYPES |= {"shards": np.int32, "begins": np.int64, "sizes": np.int64}
"""Array of an index -> its type: see `Samples` and `Places`."""


class Places(NamedTuple):
    """Where the images of a split lie, a value for each image: number of the shard, first byte and size in it.

    The names of the layout are "SHARD/SAMPLE.jpg". The names of the classes are the labels that occur.
    """

    layout: Layout
    shards: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray


class Listed(NamedTuple):
    """Samples of a shard: names of images, first byte and size of each, labels, and other files."""

    names: list[str]
    places: list[tuple[int, int]]
    labels: list[int]
    ignored: list[str]


class WdsReader(LayoutReader):
    """Reads the shards that match the path `pattern`, in natural order. They are not streamed.

    Raises:
        LayoutError: a sample has two images, the same member twice, or a label that is no number; or the index is
            damaged, or of other shards. TarError: a shard cannot be read.
    """

    def __init__(self, pattern: str):
        self.paths, index = find_shards(pattern), index_of(pattern)
        self.places = (
            read_index(index, self.paths) if index.is_file() else join(self.paths, map(list_shard, self.paths))
        )
        super().__init__(self.places.layout)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        shard, begin, size = (int(values[index]) for values in self.places[1:])
        return read_member(self.paths[shard], begin, size), int(self.labels[index])

    def fingerprints(self) -> np.ndarray:
        return self.places.sizes


def find_shards(pattern: str) -> list[str]:
    """Returns the paths that match `pattern`, in natural order."""
    return sort_naturally(map(str, Path(pattern).parent.glob(Path(pattern).name)))


def index_of(pattern: str) -> Path:
    """Returns the path of the index of the shards that match `pattern`, such as ROOT/train-*.tar."""
    path = Path(pattern)
    return path.with_name(path.name.removesuffix(".tar").removesuffix("-*") + INDEX)


def list_shard(shard: str) -> Listed:
    """Lists a tar file. LayoutError, TarError: as in `WdsReader`."""
    stem, (names, places, labels, ignored) = Path(shard).stem, (listed := Listed([], [], [], []))
    for key, members in _find_samples(shard):
        images = [ending for ending in members if is_image(path := f"{key}.{ending}") and not is_hidden(path)]
        if not images:
            ignored += [f"{stem}/{key}.{ending}" for ending in members]
            continue
        if len(images) > 1:
            raise LayoutError(f"sample {key!r} of {stem!r} has {len(images)} images: {', '.join(images)}")
        if "cls" not in members:
            problem = "has no .cls, the number of its class; labels elsewhere are not read"
            raise LayoutError(f"sample {key!r} of {stem!r} {problem}")
        labels.append(_read_label(shard, *members["cls"], f"sample {key!r} of {stem!r}"))
        names.append(f"{stem}/{key}.{images[0]}")
        places.append(members[images[0]])
    return listed


def join(shards: Sequence[str], lists: Iterable[Listed]) -> Places:
    """Joins what `list_shard` returns for each of `shards`, in order. LayoutError: there is no image."""
    names, places, labels, ignored = zip(*lists, strict=True) if shards else ((), (), (), ())
    counts = [*map(len, names)]
    if not sum(counts):
        raise LayoutError("no images in the shards")
    values, classes = np.unique(np.concatenate([np.array(part, np.int64) for part in labels]), return_inverse=True)
    flat = (name for part in names for name in part)
    samples = Samples((label, [name]) for label, name in zip(classes.tolist(), flat, strict=True))
    class_to_idx = {str(value): label for label, value in enumerate(values.tolist())}
    begins, sizes = np.concatenate([np.array(x, np.int64).reshape(-1, 2) for x in places]).T
    layout = Layout(samples, class_to_idx, [path for part in ignored for path in part])
    numbers = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    return Places(layout, numbers, begins, sizes)


def write_index(pattern: str, workers: int) -> Layout:
    """Writes the index of the shards that match `pattern`, by `workers` processes; returns their layout.

    Raises:
        LayoutError, TarError: as in `WdsReader`. OSError: no space, or no permission.
    """
    shards, path = find_shards(pattern), index_of(pattern)
    if os.path.lexists(path):
        raise LayoutError(f"{path.name} is there already; {REMEDY}")
    described = _describe(shards)
    with ProcessPoolExecutor(max(1, workers), get_context("spawn")) as pool:  # starts processes when there is work
        listed = pool.map(list_shard, shards, chunksize=4) if workers > 1 else map(list_shard, shards)
        places = join(shards, tqdm(listed, path.name, len(shards), unit=" shards", dynamic_ncols=True, disable=None))
    layout = places.layout
    samples = {"names": np.frombuffer(layout.samples.text, np.uint8), "ends": layout.samples.ends}
    values = samples | {"labels": layout.samples.labels, **{name: getattr(places, name) for name in [*TYPES][3:]}}
    arrays = {name: np.ascontiguousarray(values[name], kind) for name, kind in TYPES.items()}  # save ignores strides
    classes = sorted(layout.class_to_idx, key=layout.class_to_idx.__getitem__)
    notes = {"shards": described, "ignored": layout.ignored, "classes": classes}
    write_atomically(path, save(arrays, {name: json.dumps(value) for name, value in notes.items()}))
    return layout


def read_index(path: Path, shards: Sequence[str]) -> Places:
    """Reads an index, which need not be trusted.

    Raises:
        LayoutError: it is damaged, or its shards have other names, sizes or times than `shards`.
    """
    with parsing(path.name, REMEDY, LayoutError):
        with safe_open(path, "numpy") as file:
            notes = {name: json.loads(text) for name, text in file.metadata().items()}
            names, ends, labels, numbers, begins, sizes = arrays = [file.get_tensor(name) for name in TYPES]
        known, found = ({name: facts for name, *facts in each} for each in (notes["shards"], _describe(shards)))
        if differing := [name for name in {**found, **known} if found.get(name) != known.get(name)]:
            problem = f"is not of the shards beside it, of which {one_line(str(differing[0]), 100)!r} differs"
            raise LayoutError(f"{path.name} {problem}; {REMEDY}")
        kinds = [array.dtype for array in arrays]
        if kinds != [*TYPES.values()] or {array.shape for array in arrays[2:]} | {(len(ends) - 1,)} != {labels.shape}:
            raise ValueError("arrays of other types, or for other numbers of images")
        lengths = np.array([size for size, _ in found.values()])
        if numbers.min() < 0 or numbers.max() >= len(shards) or min(begins.min(), sizes.min()) < 0:
            raise ValueError("places outside of the shards")
        if (sizes > lengths[numbers] - begins).any():  # a sum could overflow
            raise ValueError("images that end after their shard")
        class_to_idx = {name: index for index, name in enumerate(notes["classes"])}
        if not all(isinstance(name, str) for name in [*class_to_idx, *notes["ignored"]]):
            raise ValueError("files or classes that have no names")
        if len(class_to_idx) != len(notes["classes"]) or labels.min() < 0 or labels.max() >= len(class_to_idx):
            raise ValueError("labels of no class, or classes that are equal")
    return Places(Layout(Samples.of(names, ends, labels), class_to_idx, notes["ignored"]), numbers, begins, sizes)


def _describe(shards: Sequence[str]) -> list[list[Any]]:
    """Name, size in bytes, and time (ns) of the last change of every shard."""
    stats = ((path.name, path.stat()) for path in map(Path, shards))
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _find_samples(shard: str) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Yields the samples of the tar file `shard`: the name of each, and its members as ending -> (first byte, size)."""
    samples: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    try:
        with open_regular(shard) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for name, begin, size in find_members(tar):
                folder, member = posixpath.split(name)
                stem, _, ending = member.partition(".")
                members = samples[posixpath.join(folder, stem)]
                if ending.lower() in members:
                    raise LayoutError(f"{Path(shard).name!r} holds {name!r} twice; names of samples must differ")
                members[ending.lower()] = begin, size
    except (tarfile.TarError, OSError) as error:
        raise tarfile.ReadError(f"{Path(shard).name}: {getattr(error, 'strerror', error)}") from error
    yield from samples.items()


def _read_label(shard: str, begin: int, size: int, sample: str) -> int:
    text = read_member(shard, begin, min(size, LABEL_BYTES)).read()
    if size > LABEL_BYTES or not text.strip().isdigit():
        raise LayoutError(f"{sample}: its .cls holds {text!r}, no number of a class")
    return int(text)
