"""Measures what one core feeds to training: images per second from JPEG files and from what `engine.prepare` makes.

    python -m engine.loading                    # JPEG files of 500 x 375 pixels, made on the spot
    python -m engine.loading /data/imagenet     # the first images of a data set's training split

Every source gives the same images, cut and augmented as in the recipe (DeiT's policy at 224 pixels) from the same seeds
and stacked to batches of uint8. Sources take turns within a round, forwards and then backwards, so that
whatever else the machine does falls on all of them; ratios are taken within a round, and their median is what counts.
Time is that of the processor in this process alone; waiting for a disk is not in it.
"""

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from timm.data.loader import fast_collate
from tqdm import tqdm

from engine.config import refuse_bad_input
from engine.data import ImageLoader, Images, create_transform, open_split
from engine.distributed import seed_everything
from engine.prepare import prepare
from engine.schema import Data, Run

IMG_SIZE, BATCH_SIZE = 224, 32
TOO_NOISY = 0.1
"""Spread of a ratio (half the interquartile range over the median) from which on a measurement is called noisy."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Images per second and core.", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", help="holds class folders in `train` (JPEG made on the spot)")
    parser.add_argument("--images", type=int, default=128, help="images of a turn (128)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of every source (9)")
    args = parser.parse_args(arguments)
    if min(args.images, args.rounds) < 1:
        parser.error("--images and --rounds must be at least 1")
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, refuse_bad_input():
        root = Path(args.root) if args.root else write_jpegs(Path(folder) / "made", args.images)
        sources = open_sources(root, Path(folder), args.images)
        print(table(measure(sources, min(args.images, len(sources["JPEG"])), args.rounds)))


def write_jpegs(root: Path, count: int) -> Path:
    """Makes `count` JPEG files (500 x 375 pixels, quality 95, about 125 kB) of one class below `root`."""
    folder = root / "train" / "class"
    folder.mkdir(parents=True)
    for i in range(count):
        rng = np.random.default_rng(i)
        image = np.full((375, 500, 3), 128.0)
        for rows, deviation in ((4, 60), (16, 40), (64, 25), (375, 12)):  # coarse shapes to noise, as in a photograph
            coarse = rng.normal(0, deviation, (3, rows, rows * 4 // 3)).astype(np.float32)
            for channel in range(3):
                image[..., channel] += np.asarray(
                    Image.fromarray(coarse[channel]).resize((500, 375), Image.Resampling.BICUBIC)
                )
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.jpg", quality=95)
    return root


def open_sources(root: Path, folder: Path, count: int) -> dict[str, Images]:
    """The same images by every way to read them; the first is the plain one. `folder`: where to prepare them."""
    run = Run(model={}, attention="softmax")

    def training_split(dataset: str, path: Path) -> Images:
        return open_split(Data(dataset=dataset, root=str(path)), "train_split")

    plain = training_split("folder", root)
    plain.reader.samples = plain.reader.samples[:count]
    sources = {"JPEG": plain}
    for name, short_side in (("prepared, full size", None), ("prepared, short side 256", 256)):
        prepare("train", Images(plain.reader), folder / name, short_side, workers=0)
        sources[name] = training_split("cache", folder / name)
    for images in sources.values():
        images.transform = create_transform(run, IMG_SIZE, is_training=True, as_bytes=True)
    return sources


def measure(sources: Mapping[str, Images], count: int, rounds: int) -> dict[str, list[float]]:
    """Processor seconds an image takes from each of `sources`, by round."""
    seconds = {name: [] for name in sources}
    for turn in tqdm(range(-1, rounds), desc="rounds", leave=False, dynamic_ncols=True):  # one to warm up
        for name in list(sources)[:: 1 if turn % 2 else -1]:
            seed_everything(turn + 1)
            loader = ImageLoader(
                sources[name], BATCH_SIZE, stack=fast_collate, limit=math.inf, remedy="", sampler=range(count)
            )
            began = time.process_time()
            for _ in loader:
                pass
            if turn >= 0:
                seconds[name].append((time.process_time() - began) / count)
    return seconds


def table(seconds: Mapping[str, Sequence[float]]) -> str:
    """Medians by source, and ratios to the first one's speed with their spread."""
    plain = next(iter(seconds.values()))
    lines = [f"{'source':<26}{'images/s per core':>18}{'ms':>8}{'ratio':>8}{'spread':>9}"]
    for name, taken in seconds.items():
        ratios = [before / now for before, now in zip(plain, taken, strict=True)]
        ratio, spread = statistics.median(ratios), half_range(ratios)
        median = statistics.median(taken)
        noisy = "  too noisy, repeat" if spread > TOO_NOISY * ratio else ""
        lines.append(f"{name:<26}{1 / median:>18.0f}{1000 * median:>8.2f}{ratio:>8.2f}{f'+-{spread:.2f}':>9}{noisy}")
    return "\n".join(lines)


def half_range(values: Sequence[float]) -> float:
    """Half the interquartile range."""
    if len(values) < 2:
        return math.inf
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


if __name__ == "__main__":
    main()
