"""WebDataset shards: tar files of samples NAME.jpg (or another image) and NAME.cls, read by position."""

import io
import os
import posixpath
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.data.layout import Layout, LayoutError, LayoutReader, Samples, is_hidden, is_image, sort_naturally
from engine.runtime.reading import open_regular

LABEL_BYTES = 18
"""Largest size of a label in a shard, bytes."""


class WdsReader(LayoutReader):
    """Reads the shards that match the path `pattern`, in natural order. They are not streamed.

    The names of the images are "SHARD/SAMPLE.jpg". The names of the classes are the labels that occur.

    Raises:
        LayoutError: a sample has two images, the same member twice, or a label that is no number; or there is no image.
        TarError: a shard cannot be read.
    """

    def __init__(self, pattern: str):
        self.paths = sort_naturally(map(str, Path(pattern).parent.glob(Path(pattern).name)))
        names, labels, places, ignored = list[str](), list[int](), list[tuple[int, int, int]](), list[str]()
        for number, shard in enumerate(self.paths):
            stem = Path(shard).stem
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
                begin, size = members["cls"]
                text = _read_member(shard, begin, min(size, LABEL_BYTES)).read()
                if size > LABEL_BYTES or not text.strip().isdigit():
                    raise LayoutError(f"sample {key!r} of {stem!r}: its .cls holds {text!r}, no number of a class")
                labels.append(int(text))
                names.append(f"{stem}/{key}.{images[0]}")
                places.append((number, *members[images[0]]))
        if not names:
            raise LayoutError("no images in the shards")
        values, classes = np.unique(np.array(labels, np.int64), return_inverse=True)
        samples = Samples((label, [name]) for label, name in zip(classes.tolist(), names, strict=True))
        super().__init__(Layout(samples, {str(value): label for label, value in enumerate(values)}, ignored))
        self.places = np.array(places, np.int64)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        shard, begin, size = self.places[index].tolist()
        return _read_member(self.paths[shard], begin, size), int(self.labels[index])

    def fingerprints(self) -> np.ndarray:
        return self.places[:, -1]


def _read_member(path: str, begin: int, size: int) -> BinaryIO:
    """Reads `size` bytes of the file `path` from byte `begin` on, or fewer if the file ends before."""
    with open_regular(path) as file:  # not kept open: workers would share its position
        return io.BytesIO(os.pread(file.fileno(), size, begin))


def _find_members(tar: tarfile.TarFile) -> Iterator[tuple[str, int, int]]:
    """Yields name, first byte and size of the files in `tar`."""
    for member in tar:
        name = posixpath.normpath(member.name.lstrip("/"))
        if member.isreg() and not member.issparse():
            yield name, member.offset_data, member.size
        elif is_image(name) and not member.isdir() and not is_hidden(name):
            raise LayoutError(f"{name!r} is stored as a link, or sparse; make the file with `tar --dereference`")
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # where tarfile stops without a word
        raise tarfile.ReadError(f"damaged, or cut off, at byte {tar.offset:,}")


def _find_samples(shard: str) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Yields the samples of the tar file `shard`: the name of each, and its members as ending -> (first byte, size)."""
    samples: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
    try:
        with open_regular(shard) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for name, begin, size in _find_members(tar):
                folder, member = posixpath.split(name)
                stem, _, ending = member.partition(".")
                members = samples[posixpath.join(folder, stem)]
                if ending.lower() in members:
                    raise LayoutError(f"{Path(shard).name!r} holds {name!r} twice; names of samples must differ")
                members[ending.lower()] = begin, size
    except (tarfile.TarError, OSError) as error:
        raise tarfile.ReadError(f"{Path(shard).name}: {getattr(error, 'strerror', error)}") from error
    yield from samples.items()
