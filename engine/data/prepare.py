"""Decodes a data set once, into files from which a core reads more images per second (`data.dataset=cache`).

    python -m engine.data.prepare /data/imagenet /data/prepared                   # short side 256
    python -m engine.data.prepare /data/imagenet /data/prepared --short-side 0    # full size: the same training
    python -m engine.data.prepare /data/imagenet /data/shards --format mds --original    # files as they are, to stream
    python -m engine.data.prepare /data/imagenet --index             # the listing of class folders
    python -m engine.data.prepare /data/wds --dataset wds --index    # where the samples of WebDataset shards lie

Images become 8-bit RGB with a short side of 256 pixels, the size to which validation at 224 pixels resizes them before
its centre crop. Validation stays bit-identical where it resizes to just this size: `model.img_size` is square and,
divided by `data.crop_pct` and rounded down, the short side (224 / 0.875 = 256), `data.interpolation` is bicubic, and
`data.crop_mode` is center; coloured images in a model of grey images are an exception. Elsewhere validation resizes
twice. Training crops are taken from the smaller images; at full size training stays bit-identical too. ImageNet takes
about 0.35 TB, at full size 0.75 TB. At the end every image is read back and checked.

Shards (`--format mds`, see `engine.data.mds`) may be put into a store. They have the same images, or with `--original`
the bytes of the files as they are.
"""

import argparse
import os
import shutil
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from attention.options import OptionError
from engine.config.schema import Data
from engine.data import folders, webdataset
from engine.data.cache import INDEX, CacheReader, encode, pixels_of, write_cache
from engine.data.images import BrokenImage, DataError
from engine.data.layout import SplitReader
from engine.data.mds import MdsReader, write_mds
from engine.data.splits import Images, describe_ignored, find_split
from engine.data.subset import SubsetReader
from engine.data.verify import Measure, add_source, discard, open_splits, print_copies, read_all, read_split
from engine.runtime.arguments import ArgumentParser, Count
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.signals import end_at_interrupt
from engine.runtime.text import one_line


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Decode a data set once, for faster loading.")
    add_source(parser)
    parser.add_argument("output", type=Path, nargs="?", help="directory of the prepared data set")
    parser.add_argument(
        "--short-side", type=Count(0, 2**16), default=256, help="short side of the images, pixels; 0: unchanged (256)"
    )
    parser.add_argument(
        "--format", choices=("cache", "mds"), default="cache", help="data.dataset of the output (cache)"
    )
    parser.add_argument("--original", action="store_true", help="mds: the bytes of the files as they are")
    parser.add_argument("--shard-mb", type=float, default=64.0, help="mds: size of a shard, MB (64)")
    index = "folder, wds: write an index beside each split, from which runs open it at once; decodes nothing, no output"
    parser.add_argument("--index", action="store_true", help=index)
    args = parser.parse_intermixed_args(arguments)  # options may stand between root and output
    if args.index == (args.output is not None) or (args.index and args.dataset not in ("folder", "wds")):
        parser.error("give an output directory, or --index without one for --dataset folder or wds")
    if args.original and args.format != "mds":
        parser.error("--original needs --format mds; a cache has decoded images")
    if not 0 < args.shard_mb <= 2000:
        parser.error(f"--shard-mb must be above 0 and at most 2000, got {args.shard_mb:g}")
    with refuse_bad_input():
        if args.index:
            return index_splits(args)
        digests = {}
        for name, images in open_splits(args).items():
            asked = 0 if args.original else args.short_side
            short_side = min((side for side in (asked, images.reader.short_side) if side), default=None)
            transform = partial(encode, short_side=short_side, is_mapped=images.levels is not None)
            encoded = Originals(images.reader) if args.original else replace(images, transform=transform)
            form = name, encoded, args.output, short_side, args.workers
            try:
                is_mds = args.format == "mds"
                digests[name] = prepare_shards(*form, int(args.shard_mb * 1e6)) if is_mds else prepare(*form)
            except OSError as error:
                raise UserError(f"{args.output}: {error.strerror or error}") from error
            if text := describe_ignored(images):
                print(f"{name}: {text}", file=sys.stderr, flush=True)
        print_copies(digests, sys.stderr)


def index_splits(args: argparse.Namespace) -> None:
    """Writes the index of every split of class folders or WebDataset shards.

    Raises:
        OptionError: a split is missing or cannot be read. UserError: the index cannot be written.
    """
    for name in args.splits:
        _, path = find_split(Data(dataset=args.dataset, root=args.root), name, "--splits")
        index = (webdataset if args.dataset == "wds" else folders).index_of(path)
        try:
            layout = webdataset.write_index(path, args.workers) if args.dataset == "wds" else folders.write_index(path)
        except OSError as error:
            raise UserError(f"{index}: {error.strerror or error}") from error
        except DataError:
            raise
        except Exception as error:  # of a damaged shard
            raise OptionError("--splits", f"{path!r}: {one_line(str(error))}") from error
        print(f"{index}: {len(layout.samples):,} images of {len(layout.class_to_idx):,} classes")


def prepare(name: str, encoded: Images, output: Path, short_side: int | None, workers: int) -> array:
    """Writes the split `name` of a prepared data set, reads it back and checks it.

    Args:
        encoded: images as `encode` returns them. short_side: theirs, see `SplitReader`; None: 0.
    Returns:
        The digest of every image as it was written, see `Checked`.
    Raises:
        UserError: the split exists already. OSError: no space, or no permission.
        BrokenImage: images that were read back differ from those written.
    """
    path = output / f"{name}{INDEX}"
    with _new_directory(output, name, [path, pixels_of(path)]) as directory:
        unchecked = directory / path.name
        with closing(read_all(encoded, workers, f"{name}: decoding")) as samples:
            num_empty = write_cache(unchecked, _contents(samples), encoded.reader, short_side)
        digests = check(reader := CacheReader(str(unchecked)), num_empty, workers, f"{name}: checking")
        pixels_of(unchecked).replace(pixels_of(path))
        try:
            unchecked.replace(path)
        except OSError:
            pixels_of(path).replace(pixels_of(unchecked))
            raise
    print(f"{name}: {len(encoded):,} images, {reader.begins[-1] / 1e9:.3f} GB, {num_empty:,} broken")
    return digests


@contextmanager
def _new_directory(output: Path, name: str, results: Sequence[Path]) -> Iterator[Path]:
    """Context of a new directory for the split `name` until it is checked; removed at the end.

    Raises:
        UserError: it is there, or one of the `results`. OSError: it cannot be made.
    """
    for path in results:
        if os.path.lexists(path):
            raise UserError(f"{path}: is there already; remove it to prepare it anew, or name other --splits")
    directory = output / f"{name}.unchecked"
    if os.path.lexists(directory):
        problem = "is there already: another preparation writes it, or was killed, or it is yours"
        raise UserError(f"{directory}: {problem}; remove it, or name another directory")
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Originals(Images):
    """The bytes of the files of a split, in the form of what `encode` returns, and class index."""

    def parse(self, file: BinaryIO) -> tuple[bytes, bool]:
        return file.read(), False


def prepare_shards(
    name: str, encoded: Images, output: Path, short_side: int | None, workers: int, shard_bytes: int
) -> array:
    """Writes the split `name` in shards of about `shard_bytes`, in random order; else as `prepare`."""
    path = output / name
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(0)).numpy()
    mixed = replace(encoded, reader=SubsetReader(encoded.reader, order))
    with _new_directory(output, name, [path]) as unchecked:
        with closing(read_all(mixed, workers, f"{name}: writing")) as samples:
            num_empty = write_mds(unchecked, _contents(samples), mixed.reader, shard_bytes, short_side or 0)
        digests = check(reader := MdsReader(str(unchecked)), num_empty, workers, f"{name}: checking", None)
        unchecked.replace(path)
    num_bytes = sum(shard.file.size for shard in reader.shards)
    shards = f"{len(reader.shards):,} shards, {num_bytes / 1e9:.3f} GB"
    print(f"{name}: {len(mixed):,} images, {shards}, {num_empty:,} not to be read")
    return digests


def check(reader: SplitReader, num_empty: int, workers: int, title: str, measure: Measure | None = discard) -> array:
    """Reads back every image of a prepared split, as `read_split` does; returns the digests.

    Raises:
        BrokenImage: more images cannot be read than the `num_empty` that were broken before.
    """
    broken, digests, _ = read_split(Images(reader), workers, title, measure)
    if len(broken) != num_empty:
        raise BrokenImage(f"{len(broken) - num_empty} images were not read back as they were written; nothing is kept")
    return digests


def _contents(samples: Iterable[tuple[tuple[bytes, bool], int] | BrokenImage]) -> Iterator[tuple[bytes, bool]]:
    """Yields what `encode` made of each of `samples`; no bytes of a broken one, which stderr names."""
    for sample in samples:
        if isinstance(sample, BrokenImage):
            tqdm.write(f"broken: {sample}", file=sys.stderr)
        yield (b"", False) if isinstance(sample, BrokenImage) else sample[0]


if __name__ == "__main__":
    main()
