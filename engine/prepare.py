"""Decodes a data set once, into files that train more images per second and core (`data.dataset=cache`).

    python -m engine.prepare /data/imagenet /data/prepared                   # short side 256
    python -m engine.prepare /data/imagenet /data/prepared --short-side 0    # as large as they are: the same training
    python -m engine.prepare --make pathfinder runs/data/pathfinder          # draws one instead: engine/pathfinder.py

Images become 8-bit RGB of 256 pixels at their short side, as validation at 224 pixels makes them before its crop, so
that its input stays bit-identical, but for colours in a model of grey images; training crops are taken from the smaller
image. At full size training stays bit-identical too. ImageNet takes about 0.35 TB, at full size 0.75 TB. Finally every
image is read back and checked.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from tqdm import tqdm

from engine import pathfinder
from engine.cache import INDEX, CacheReader, encode, pixels_of, write_cache
from engine.config import refuse_bad_input
from engine.data import Images, classes_of, report_ignored
from engine.errors import UserError
from engine.images import BrokenImage
from engine.signals import end_at_interrupt
from engine.verify import add_source, discard, open_splits, read_all

MAKERS = {"pathfinder": pathfinder.main}
"""Name of a data set that is drawn -> what draws it, by arguments of its own."""


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    make = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    make.add_argument("--make", choices=MAKERS, help="draw a data set instead: --make pathfinder --help")
    choice, others = make.parse_known_args(arguments)
    if choice.make:
        MAKERS[choice.make](others)
        return
    parser = argparse.ArgumentParser(
        description="Decode a data set once.", formatter_class=argparse.RawDescriptionHelpFormatter, parents=[make]
    )
    add_source(parser)
    parser.add_argument("output", type=Path, help="directory of the prepared data set")
    parser.add_argument("--short-side", type=int, default=256, help="pixels; 0 keeps the size (256)")
    args = parser.parse_args(arguments)
    if args.short_side < 0:
        parser.error(f"--short-side must be 0 or more, got {args.short_side}")
    with refuse_bad_input():
        for name, images in open_splits(args).items():
            try:
                prepare(name, images, args.output, args.short_side or None, args.workers)
            except OSError as error:
                raise UserError(f"{args.output}: {error.strerror or error}") from error
            report_ignored(name, images)


def prepare(name: str, images: Images, output: Path, short_side: int | None, workers: int) -> None:
    """Writes the split `name` of a prepared data set, reads it back and checks it.

    Raises:
        UserError: it exists already. OSError: no space, or no permission. BrokenImage: what was read back differs.
    """
    path = output / f"{name}{INDEX}"
    if path.exists():
        raise UserError(f"{path}: is there already; remove it to prepare it anew, or name other --splits")
    output.mkdir(parents=True, exist_ok=True)
    images.transform = partial(encode, short_side=short_side)
    unchecked = output / f"{name}.unchecked{INDEX}"
    try:
        with closing(read_all(images, workers, f"{name}: decoding")) as samples:
            write_cache(unchecked, _report_broken(samples), images.reader.filenames(), classes_of(images))
        num_empty, num_bytes = check(unchecked, workers, f"{name}: checking")
        for file in (pixels_of(path), path):
            unchecked.with_suffix(file.suffix).replace(file)
    finally:
        for file in (pixels_of(unchecked), unchecked):
            file.unlink(missing_ok=True)
    print(f"{name}: {len(images):,} images, {num_bytes / 1e9:.3f} GB, {num_empty:,} broken")


def check(path: Path, workers: int, title: str) -> tuple[int, int]:
    """Reads back everything in the index `path`; returns how many images are marked as broken, and the bytes of pixels.

    Raises:
        BrokenImage: further images cannot be read.
    """
    reader = CacheReader(str(path))
    written = Images(reader)
    written.transform = discard
    num_empty = int((reader.begins[1:] == reader.begins[:-1]).sum())
    num_broken = sum(isinstance(sample, BrokenImage) for sample in read_all(written, workers, title))
    if num_broken != num_empty:
        raise BrokenImage(f"{num_broken - num_empty} images were not read back as they were written; nothing is kept")
    return num_empty, int(reader.begins[-1])


def _report_broken(samples: Iterable[tuple[bytes, int] | BrokenImage]) -> Iterator[tuple[bytes, int] | BrokenImage]:
    """Passes `samples` on, and prints a line to stderr for each broken one."""
    for sample in samples:
        if isinstance(sample, BrokenImage):
            tqdm.write(f"broken: {sample}", file=sys.stderr)
        yield sample


if __name__ == "__main__":
    main()
