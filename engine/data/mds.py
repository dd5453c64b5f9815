"""Mosaic Data Shards (MDS), the format of mosaicml-streaming: read from a folder, or from a store behind a URL.

A split is a folder of shards and `index.json`, which has the size and the SHA-256 of every shard. Each sample has an
`image` (the bytes of a file) and a `label` (the number of its class). Beside the shards, and named in the index,
`images.safetensors` has what must be known of all images before one is opened: names, classes and checksums.

The images lie in random order, so that a few shards have images of all classes.
"""

import hashlib
import io
import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from engine.config.schema import Data
from engine.data.images import MAX_BYTES, BrokenImage
from engine.data.layout import Layout, LayoutError, LayoutReader, Samples, SplitReader
from engine.data.shard_cache import Cache
from engine.data.store import File, Store, is_url
from engine.data.table import map_table, write_table
from engine.runtime.errors import UserError
from engine.runtime.ownership import MARKER
from engine.runtime.reading import MAX_TEXT, open_regular, parsing, read_bounded
from engine.runtime.text import one_line

INDEX, TABLE = "index.json", "images.safetensors"

MOST_BYTES = 2**32
"""Largest size of a shard, whose format counts bytes in 32 bits, and of any file of a store, which is read whole."""

ENCODINGS = ("bytes", "jpeg", "png")
"""Encodings of the column `image` that are read. Other columns are passed over, and never decoded."""

STORE_SHARE = 0.8
"""Share of `data.timeout_minutes` after which a worker gives up a file, before its rank gives up the worker."""


OF_FOLDERS = Data()
"""Options where there is no store."""


@dataclass(frozen=True)
class Shard:
    """A shard: its file, its number of samples, and the sizes of its columns in bytes, None where sizes differ."""

    file: File
    samples: int
    columns: dict[str, int | None]


class MdsReader(LayoutReader):
    """Reads the split that is the folder or the URL `path`; `data` has the options of a store.

    Raises:
        LayoutError: the index, or what it names, is not usable. DataError, UserError: the store does not send it.
        OSError: a file cannot be read.
    """

    blocks: np.ndarray

    def __init__(self, path: str, data: Data = OF_FOLDERS):
        self.folder, self.cache = Path(path), None
        if is_url(path):
            store = Store(path, STORE_SHARE * 60 * data.timeout_minutes)
            content, index = store.read(INDEX, MAX_TEXT, lambda content: (content, parse_index(content)), opening=True)
        else:
            content = read_bounded(self.folder / INDEX, MAX_TEXT)
            index = parse_index(content)
        self.shards, table, self.short_side = index
        self.digest = hashlib.sha256(content).hexdigest()
        if is_url(path):
            self.cache = _open_cache(data, store, self.digest, [shard.file for shard in self.shards], table)
            place = self.cache.keep(table)
        elif not table.is_at(place := self.folder / table.name):
            raise LayoutError(f"{table.name} is missing or damaged: not the file that {INDEX} describes; make it anew")
        samples, classes, arrays, _ = map_table(place, checksums="U32", fingerprints="I64")
        self.blocks = np.cumsum([0, *(shard.samples for shard in self.shards)])
        if len(samples) != self.blocks[-1]:
            raise LayoutError(f"{INDEX} has {self.blocks[-1]:,} images, but {TABLE} {len(samples):,}; make them anew")
        self.checksums, self.originals = arrays["checksums"], arrays["fingerprints"]
        super().__init__(Layout(samples, classes, []))

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        number = int(np.searchsorted(self.blocks, index, "right")) - 1
        shard = self.shards[number]
        content = self._read(shard, index - int(self.blocks[number]))
        if zlib.crc32(content) != self.checksums[index] and self.cache:  # damaged on this disk, since it came
            self.cache.drop(shard.file)
            content = self._read(shard, index - int(self.blocks[number]))
        if zlib.crc32(content) != self.checksums[index]:
            raise BrokenImage(f"damaged in {shard.file.name}: the checksum differs")
        if not content:
            raise BrokenImage("was broken when the shards were made")
        return io.BytesIO(content), int(self.labels[index])

    def _read(self, shard: Shard, place: int) -> bytes:
        with self.cache.open(shard.file) if self.cache else open_regular(self.folder / shard.file.name) as file:
            file.seek(4 + 4 * place)
            begin, end = struct.unpack("<2I", file.read(8).ljust(8, b"\0"))
            if not begin <= end <= min(shard.file.size, begin + MAX_BYTES):
                return b""
            file.seek(begin)
            return cut_image(file.read(end - begin), shard.columns)

    def fingerprints(self) -> np.ndarray:
        """Fingerprints of the original images, (number,) int64; the checksum of an image that was changed."""
        return self.originals


def is_split(path: Path) -> bool:
    """Returns whether the folder `path` is a split of shards."""
    return (path / INDEX).is_file()


def _open_cache(data: Data, store: Store, digest: str, shards: Sequence[File], table: File) -> Cache:
    if data.cache_dir is None:
        raise LayoutError(
            "a URL needs data.cache_dir: a folder on a disk of this node, for the shards that are fetched"
        )
    sizes = [shard.size for shard in shards]
    limit, needed = int(data.cache_gb * 1e9), min(sum(sizes), 2 * data.shuffle_shards * max(sizes))
    if limit < needed:
        problem = f"two blocks of data.shuffle_shards = {data.shuffle_shards} shards take up to {needed / 1e9:.3g} GB"
        raise LayoutError(f"data.cache_gb = {data.cache_gb:g}, but {problem}; raise it, or lower data.shuffle_shards")
    if table.size > MOST_BYTES:
        raise LayoutError(
            f"{table.name} of {table.size:,} bytes; from a URL at most {MOST_BYTES:,}; copy the shards here"
        )
    try:
        return Cache(Path(data.cache_dir), digest[:32], store, limit, [shard.name for shard in shards], table.name)
    except UserError as error:
        raise LayoutError(f"data.cache_dir = {data.cache_dir!r}: {error}") from None


def parse_index(content: bytes) -> tuple[list[Shard], File, int]:
    """Parses an index, which need not be trusted: shards, the file of names and classes, `SplitReader.short_side`.

    Raises:
        LayoutError: it is damaged, has columns that are not read, or names no file of names and classes.
    """
    with parsing(INDEX, "make it anew", LayoutError):
        if len(content) > MAX_TEXT:
            raise LayoutError(f"{INDEX} is larger than {MAX_TEXT:,} bytes; write larger shards (--shard-mb)")
        index = json.loads(content)
        if index["version"] != 2:
            raise ValueError(f"version {index['version']!r}")
        shards = [_parse_shard(shard) for shard in index["shards"]]
        if not shards:
            raise LayoutError("has no shard")
        if "images" not in index:
            raise LayoutError(f"{INDEX} names no file of labels; python -m engine.data.prepare writes shards with one")
        if "sha256" not in (table := _parse_file(index["images"], 2**40)).hashes:
            raise LayoutError(f"{INDEX} has no SHA-256 of {one_line(table.name, 100)!r}; make it anew")
        return shards, table, int(index.get("short_side", 0))


def _parse_shard(entry: dict[str, Any]) -> Shard:
    if entry["format"] != "mds" or entry["compression"]:
        shown = one_line(f"{entry['format']!r}, compression {entry['compression']!r}", 100)
        raise LayoutError(f"{INDEX}: shards of format {shown}; write 'mds' without compression")
    names, encodings, sizes = (entry[f"column_{kind}"] for kind in ("names", "encodings", "sizes"))
    if (found := dict(zip(names, encodings, strict=True)).get("image", "missing")) not in ENCODINGS:
        shown = one_line(str(found), 100)
        raise LayoutError(f"{INDEX}: the column 'image' is {shown}; write it as one of {', '.join(ENCODINGS)}")
    if any(size is not None and not 0 < size < MAX_BYTES for size in sizes) or not 0 < entry["samples"] < 2**30:
        raise ValueError("sizes that no shard has")
    return Shard(_parse_file(entry["raw_data"]), int(entry["samples"]), dict(zip(names, sizes, strict=True)))


def _parse_file(entry: dict[str, Any], limit: int = MOST_BYTES) -> File:
    name, size, hashes = str(entry["basename"]), int(entry["bytes"]), entry["hashes"]
    is_name = name.isprintable() and PurePosixPath(name).name == name and not name.startswith(".") and len(name) <= 200
    if not is_name or name == MARKER or not 0 < size < limit:
        raise ValueError(f"a file {one_line(name, 100)!r} of {size:,} bytes")
    return File(name, size, {str(kind): str(digest) for kind, digest in hashes.items()})


def cut_image(sample: bytes, columns: dict[str, int | None]) -> bytes:
    """Returns the image of an encoded sample, or no bytes if the sample is damaged."""
    varying = [name for name, size in columns.items() if size is None]
    if len(sample) < 4 * len(varying):
        return b""
    sizes = dict(zip(varying, struct.unpack_from(f"<{len(varying)}I", sample), strict=True))
    begin = 4 * len(varying)
    for name, size in columns.items():
        end = begin + (sizes[name] if size is None else size)
        if name == "image":
            return sample[begin:end]
        begin = end
    return b""


def write_mds(
    folder: Path, contents: Iterable[tuple[bytes, bool]], source: SplitReader, shard_bytes: int, short_side: int
) -> int:
    """Writes a split: shards of about `shard_bytes`, the file of names and classes, and, last, the index.

    Args:
        contents: what `encode` returns of every image of `source` in order; no bytes of a broken one.
        short_side: see `SplitReader`.
    Returns:
        Number of images without bytes.
    Raises:
        OSError: no space, or no permission.
    """
    shards: list[dict[str, Any]] = []
    checksums, fingerprints, num_empty = [], np.array(source.fingerprints(), np.int64), 0
    waiting: list[bytes] = []
    waiting_bytes = 0
    for number, (content, is_changed) in enumerate(contents):
        checksums.append(zlib.crc32(content))
        num_empty += not content
        if is_changed:
            fingerprints[number] = checksums[-1]
        waiting.append(struct.pack("<I", len(content)) + content + struct.pack("<q", int(source.labels[number])))
        waiting_bytes += len(waiting[-1])
        if waiting_bytes >= shard_bytes:
            shards.append(_write_shard(folder, len(shards), waiting))
            waiting, waiting_bytes = [], 0
    if waiting:
        shards.append(_write_shard(folder, len(shards), waiting))
    labels = np.asarray(source.labels)
    samples = Samples((int(label), [name]) for label, name in zip(labels, source.filenames(), strict=True))
    crcs = np.array(checksums, np.uint32)
    write_table(folder / TABLE, samples, source.class_to_idx, {}, checksums=crcs, fingerprints=fingerprints)
    table = _describe(folder / TABLE, (folder / TABLE).read_bytes())
    index = {"version": 2, "shards": shards, "images": table, "short_side": short_side}
    (folder / INDEX).write_text(json.dumps(index, sort_keys=True))
    return num_empty


def _write_shard(folder: Path, number: int, samples: list[bytes]) -> dict[str, Any]:
    """Writes a shard, and returns its entry in the index."""
    facts = {
        "column_encodings": ["bytes", "int"],
        "column_names": ["image", "label"],
        "column_sizes": [None, 8],
        "compression": None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": None,
        "version": 2,
    }
    head = json.dumps(facts, sort_keys=True).encode()
    begin = 4 + 4 * (len(samples) + 1) + len(head)
    ends = np.cumsum([begin, *map(len, samples)])
    content = struct.pack("<I", len(samples)) + ends.astype("<u4").tobytes() + head + b"".join(samples)
    path = folder / f"shard.{number:05d}.mds"
    path.write_bytes(content)
    return facts | {"samples": len(samples), "raw_data": _describe(path, content), "zip_data": None}


def _describe(path: Path, content: bytes) -> dict[str, Any]:
    return {"basename": path.name, "bytes": len(content), "hashes": {"sha256": hashlib.sha256(content).hexdigest()}}
