"""Decodes a data set once, into files from which a core reads more images per second (`data.dataset=cache`).

Images become 8-bit RGB with a short side of 256 pixels, the size to which validation at 224 pixels resizes them before
its centre crop. Validation stays bit-identical where it resizes to just this size: `model.img_size` is square and,
divided by `data.crop_pct` and rounded down, the short side (224 / 0.875 = 256), `data.interpolation` is bicubic, and
`data.crop_mode` is center; coloured images in a model of grey images are an exception. Elsewhere validation resizes
twice. Training crops are taken from the smaller images; at full size training stays bit-identical too. ImageNet takes
about 0.35 TB, at full size 0.75 TB.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine.runtime.signals import begin, end_at_interrupt

if __name__ == "__main__":
    begin("engine.data.command_lines:parse_prepare")

from tqdm import tqdm

from engine.data.cache import INDEX, encode, pixels_of, write_cache
from engine.data.command_lines import parse_prepare
from engine.data.images import BrokenImage
from engine.data.layout import describe_files
from engine.data.splits import Images
from engine.data.verify import open_splits, read_all
from engine.runtime.errors import UserError, refuse_bad_input


@end_at_interrupt()
def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_prepare(arguments)
    with refuse_bad_input():
        for name in args.splits:
            path = args.output / f"{name}{INDEX}"
            for result in (path, pixels_of(path)):
                if os.path.lexists(result):
                    raise UserError(f"{result}: is there already; remove it to prepare it anew, or name other --splits")
        for name, images in open_splits(args).items():
            short_side = min((side for side in (args.short_side, images.reader.short_side) if side), default=None)
            try:
                prepare(name, images, args.output, short_side, args.workers)
            except OSError as error:
                raise UserError(f"{error.filename or args.output}: {error.strerror or error}") from error
            if text := describe_files(images.reader.ignored):
                print(f"{name}: {text}", file=sys.stderr, flush=True)


def prepare(name: str, images: Images, output: Path, short_side: int | None, workers: int) -> None:
    """Writes the split `name` of a prepared data set; its index, without which the pixels are nothing, comes last.

    Args:
        short_side: that of larger images after it; None: unchanged.
    Raises:
        OSError: no space, or no permission.
    """
    path = output / f"{name}{INDEX}"
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = replace(images, transform=partial(encode, short_side=short_side))
    with closing(read_all(encoded, workers, f"{name}: decoding")) as samples:
        num_bytes, num_empty = write_cache(path, _contents(samples), images.reader, short_side)
    print(f"{name}: {len(images):,} images, {num_bytes / 1e9:.3f} GB, {num_empty:,} broken")


def _contents(samples: Iterable[tuple[tuple[bytes, bool], int] | BrokenImage]) -> Iterator[tuple[bytes, bool]]:
    """Yields what `encode` made of each of `samples`; no bytes of a broken one, which stderr names."""
    for sample in samples:
        if isinstance(sample, BrokenImage):
            tqdm.write(f"broken: {sample}", file=sys.stderr)
        yield (b"", False) if isinstance(sample, BrokenImage) else sample[0]


if __name__ == "__main__":
    main()
