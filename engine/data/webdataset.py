"""WebDataset shards: tar files of samples NAME.jpg (or another image) and NAME.cls, read by position.

The places of the samples come from the headers of all shards, which are read at the start, or from an index of them
(`python -m engine.data.prepare ROOT --dataset wds --index`). Both give the same images in the same order.
"""

import json
import posixpath
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from engine.data.images import BrokenImage, DataError
from engine.data.layout import Layout, LayoutError, LayoutReader, Samples, is_hidden, is_image, sort_naturally
from engine.data.table import map_table, refuse_others, write_table
from engine.data.tar import find_members, read_member
from engine.runtime.reading import open_regular, parsing
from engine.runtime.text import one_line

LABEL_BYTES = 18
"""Largest size of a label in a shard, bytes."""

INDEX = ".index.safetensors"
"""Ending of an index, after the name of the split."""

REMEDY = "make it anew (python -m engine.data.prepare ROOT --dataset wds --index)"
"""Remedy of an index that is damaged or of other shards."""

TYPES = {"shards": "I32", "begins": "I64", "sizes": "I64", "label_begins": "I64", "label_sizes": "U8"}
"""Array of an index, with a value for each image -> its type: number of the shard; first byte and size of the image in
it, and of the label."""


class Places(NamedTuple):
    """Where the images of a split lie: a value for each image, see `TYPES`.

    The names of the layout are "SHARD/SAMPLE.jpg". The names of the classes are the labels that occur.
    """

    layout: Layout
    shards: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray
    label_begins: np.ndarray
    label_sizes: np.ndarray


class Listed(NamedTuple):
    """Samples of a shard: names of images, first byte and size of each and of its label, labels, and other files."""

    names: list[str]
    places: list[tuple[int, int, int, int]]
    labels: list[int]
    ignored: list[str]


class WdsReader(LayoutReader):
    """Reads the shards that match the path `pattern`, in natural order. They are not streamed.

    The label of an image is read again with it. One that has changed since the shards were listed raises `DataError`.

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
        self.names = sorted(self.class_to_idx, key=self.class_to_idx.__getitem__)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        shard, begin, size, *place = (int(values[index]) for values in self.places[1:])
        path, label = self.paths[shard], int(self.labels[index])
        with read_member(path, *place) as file:
            text = file.read().strip()
        if not text.isdigit():
            raise BrokenImage(f"its .cls holds {text!r}, no number of a class")
        if int(text) != int(self.names[label]):
            changed = f"the .cls of {self.filename(index)!r} is {int(text)}, and was {self.names[label]} when listed"
            remedy = "restore the shard; if it is right, remove the index, and begin a new run"
            raise DataError(f"{path}: {changed}; {remedy}")
        return read_member(path, begin, size), label

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
        places.append((*members[images[0]], *members["cls"]))
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
    begins, sizes, label_begins, label_sizes = np.concatenate([np.array(x, np.int64).reshape(-1, 4) for x in places]).T
    layout = Layout(samples, class_to_idx, [path for part in ignored for path in part])
    numbers = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    return Places(layout, numbers, begins, sizes, label_begins, label_sizes.astype(np.uint8))


def write_index(pattern: str, workers: int) -> Layout:
    """Writes the index of the shards that match `pattern`, by `workers` processes; returns their layout.

    Raises:
        LayoutError, TarError: as in `WdsReader`. OSError: no space, or no permission.
    """
    shards, path = find_shards(pattern), index_of(pattern)
    refuse_others(path)
    with ProcessPoolExecutor(max(1, workers), get_context("spawn")) as pool:  # starts processes when there is work
        listed = pool.map(list_shard, shards, chunksize=4) if workers > 1 else map(list_shard, shards)
        places = join(shards, tqdm(listed, path.name, len(shards), unit=" shards", dynamic_ncols=True, disable=None))
    arrays = {name: getattr(places, name) for name in TYPES}
    notes = {"shards": json.dumps(_describe(shards)), "ignored": json.dumps(places.layout.ignored)}
    write_table(path, places.layout.samples, places.layout.class_to_idx, notes, **arrays)
    return places.layout


def read_index(path: Path, shards: Sequence[str]) -> Places:
    """Maps an index, which need not be trusted, into memory; all processes of a node share it.

    Raises:
        LayoutError: it is damaged, or its shards have other names or sizes than `shards`. OSError: it cannot be read.
    """
    samples, class_to_idx, arrays, notes = map_table(path, **TYPES)
    numbers, *places = (arrays[name] for name in TYPES)
    with parsing(path.name, REMEDY, LayoutError):
        known, ignored, found = dict(json.loads(notes["shards"])), json.loads(notes["ignored"]), dict(_describe(shards))
        if not all(isinstance(name, str) for name in ignored):
            raise ValueError("files that have no names")
        if differing := [name for name in {**found, **known} if found.get(name) != known.get(name)]:
            problem = f"is not of the shards beside it, of which {one_line(str(differing[0]), 100)!r} differs"
            raise LayoutError(f"{path.name} {problem}; {REMEDY}")
        if numbers.min() < 0 or numbers.max() >= len(shards) or min(values.min() for values in places) < 0:
            raise ValueError("places outside of the shards")
        lengths = np.array([*found.values()])[numbers]
        if any((sizes > lengths - begins).any() for begins, sizes in (places[:2], places[2:])):  # a sum could overflow
            raise ValueError("images or labels that end after their shard")
        if places[3].max() > LABEL_BYTES:
            raise ValueError(f"labels of more than {LABEL_BYTES} bytes")
        if not all(name.isdecimal() and name.isascii() for name in class_to_idx):
            raise ValueError("classes that are no numbers")
    return Places(Layout(samples, class_to_idx, ignored), numbers, *places)


def _describe(shards: Sequence[str]) -> list[tuple[str, int]]:
    """Name and size in bytes of every shard."""
    return [(Path(shard).name, Path(shard).stat().st_size) for shard in shards]


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
