"""WebDataset shards: tar files of samples NAME.jpg (or another image) and NAME.cls, read by position.

The places of the samples come from the headers of the shards, all of which are read at the start, or from an index of
them (`python -m engine.data.prepare ROOT --dataset wds --index`). Both give the same images in the same order.
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

from engine.data.layout import Layout, LayoutError, LayoutReader, Samples, is_image, sort_naturally
from engine.data.table import map_table, refuse_others, write_table
from engine.data.tar import find_members, read_member
from engine.runtime.reading import open_regular
from engine.runtime.text import describe_error, one_line

LABEL_BYTES = 18
"""Largest size of a label in a shard, bytes."""

INDEX = ".index.safetensors"
"""Ending of an index, after the name of the split."""

TYPES = {"shards": "I32", "begins": "I64", "sizes": "I64"}
"""Array of an index, with a value for each image -> its type: number of the shard, and first byte and size in it."""


class Places(NamedTuple):
    """Where the images of a split lie.

    Attributes:
        layout: names "SHARD/SAMPLE.jpg" in order, and the classes, whose names are the labels that occur.
        shards, begins, sizes: see `TYPES`.
    """

    layout: Layout
    shards: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray


class Listed(NamedTuple):
    """Samples of a shard: names of images, first byte and size of each, labels, and files of samples without image."""

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
    """Lists a tar file.

    Raises:
        LayoutError, TarError: as in `WdsReader`.
    """
    stem, (names, places, labels, ignored) = Path(shard).stem, (listed := Listed([], [], [], []))
    for key, members in _find_samples(shard):
        images = [ending for ending in members if is_image(f"{key}.{ending}")]
        if not images:
            ignored += [f"{stem}/{key}.{ending}" for ending in members]
            continue
        if len(images) > 1:
            raise LayoutError(f"sample {key!r} of {stem!r} has {len(images)} images: {', '.join(images)}")
        labels.append(_read_label(shard, members.get("cls"), f"sample {key!r} of {stem!r}"))
        names.append(f"{stem}/{key}.{images[0]}")
        places.append(members[images[0]])
    return listed


def join(shards: Sequence[str], lists: Iterable[Listed]) -> Places:
    """Joins what `list_shard` returns for every one of `shards`, in their order.

    Raises:
        LayoutError: there is no image.
    """
    names, places, labels, ignored = zip(*lists, strict=True) if shards else ((), (), (), ())
    counts = [*map(len, names)]
    if not sum(counts):
        raise LayoutError("no images in the shards")
    values, classes = np.unique(np.concatenate([np.array(part, np.int64) for part in labels]), return_inverse=True)
    flat = (name for part in names for name in part)
    samples = Samples((label, [name]) for label, name in zip(classes.tolist(), flat, strict=True))
    class_to_idx = {str(value): label for label, value in enumerate(values.tolist())}
    begins, sizes = np.concatenate([np.array(part, np.int64).reshape(-1, 2) for part in places]).T
    layout = Layout(samples, class_to_idx, [path for part in ignored for path in part])
    return Places(layout, np.repeat(np.arange(len(shards), dtype=np.int32), counts), begins, sizes)


def write_index(pattern: str, workers: int) -> Layout:
    """Writes the index of the shards that match `pattern`, beside them, by `workers` processes; returns their layout.

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
    numbers, begins, sizes = (arrays[name] for name in TYPES)
    try:
        known, ignored, found = dict(json.loads(notes["shards"])), json.loads(notes["ignored"]), dict(_describe(shards))
        if not all(isinstance(name, str) for name in ignored):
            raise ValueError("files that have no names")
    except (ValueError, KeyError, TypeError) as error:
        raise LayoutError(f"{path.name} is damaged ({describe_error(error)}); make it anew") from error
    if differing := [name for name in {**found, **known} if found.get(name) != known.get(name)]:
        problem = f"{path.name} is not of the shards beside it, of which {one_line(str(differing[0]), 100)!r} differs"
        raise LayoutError(f"{problem}; make it anew (python -m engine.data.prepare ROOT --dataset wds --index)")
    if numbers.min() < 0 or numbers.max() >= len(shards) or begins.min() < 0 or sizes.min() < 0:
        raise LayoutError(f"{path.name} is damaged (places outside of the shards); make it anew")
    if (sizes > np.array([*found.values()])[numbers] - begins).any():  # a sum could overflow
        raise LayoutError(f"{path.name} is damaged (images that end after their shard); make it anew")
    return Places(Layout(samples, class_to_idx, ignored), numbers, begins, sizes)


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


def _read_label(shard: str, place: tuple[int, int] | None, sample: str) -> int:
    if place is None:
        raise LayoutError(f"{sample} has no .cls, the number of its class; labels elsewhere are not read")
    begin, size = place
    text = read_member(shard, begin, min(size, LABEL_BYTES)).read()
    if size > LABEL_BYTES or not text.strip().isdigit():
        raise LayoutError(f"{sample}: its .cls holds {text!r}, no number of a class")
    return int(text)
