"""Images per second that one core feeds to training, from JPEG files and from data of `engine.data.prepare`.

    python -m bench.loading                     # JPEG files of 500 x 375 pixels, made on the spot
    python -m bench.loading /data/imagenet      # the first images of a data set's training split

Every source gives the same images, cropped and augmented as in the recipe (DeiT's policy at 224 pixels) with equal
seeds, and stacked to batches of uint8. Those of `augment.batched` are cropped and stacked, with the policy drawn; its
operations have a row of their own, for a run that trains on this CPU. Two rows show where the time goes. Sources take
turns as in `bench.timing`; the result is the median of ratios within a round. Time is the CPU time of this process,
without waiting for a disk.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from timm.data.loader import fast_collate
from torchvision.transforms import Compose
from tqdm import tqdm

from bench.results import NOISE, quartile_columns, quartiles_text
from bench.timing import Quartiles, Times, time_rounds
from engine.config.schema import Augment, Data, Run
from engine.data.augment import create_transform
from engine.data.batch_policy import DrawingTransform, Planned, stack_drawn
from engine.data.loaders import ImageLoader
from engine.data.prepare import prepare
from engine.data.splits import Images, open_split
from engine.data.subset import SubsetReader
from engine.reporting.tables import align
from engine.runtime.arguments import ArgumentParser, Count
from engine.runtime.distributed import seed_everything
from engine.runtime.errors import refuse_bad_input

IMG_SIZE, BATCH_SIZE = 224, 32
CPU = torch.device("cpu")
BATCHED = ", batched"
"""End of the name of a source with `augment.batched`."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Images per second and core.")
    parser.add_argument("root", nargs="?", help="holds class folders in `train` (JPEG made on the spot)")
    parser.add_argument("--images", type=Count(), default=128, help="images per turn (128)")
    parser.add_argument("--rounds", type=Count(2), default=9, help="turns of every source (9)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, refuse_bad_input():
        root = Path(args.root) if args.root else write_jpegs(Path(folder) / "made", args.images)
        sources = open_sources(root, Path(folder), args.images)
        count = min(args.images, len(sources["JPEG"]))
        policy = partial(run_policy, draw_policy(sources[f"JPEG{BATCHED}"], count))
        print(speed_table(time_sources(sources, count, args.rounds, {"policy in batches, here": policy}), count))


def write_jpegs(root: Path, count: int) -> Path:
    """Writes `count` JPEG files (500 x 375 pixels, quality 95, about 125 kB) of one class below `root`."""
    folder = root / "train" / "class"
    folder.mkdir(parents=True)
    for i in range(count):
        rng = np.random.default_rng(i)
        image = np.full((375, 500, 3), 128.0)
        for rows, std in ((4, 60), (16, 40), (64, 25), (375, 12)):  # coarse shapes to noise, as in a photograph
            coarse = rng.normal(0, std, (3, rows, rows * 4 // 3)).astype(np.float32)
            channels = [Image.fromarray(channel).resize((500, 375), Image.Resampling.BICUBIC) for channel in coarse]
            image += np.stack(channels, -1)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.jpg", quality=95)
    return root


def open_sources(root: Path, folder: Path, count: int) -> dict[str, Images]:
    """Opens the same images in every kind of storage, plain JPEG files first; prepares the others in `folder`.

    Those of the names with `BATCHED` follow, and parts of what is done to the JPEG files.
    """
    run = Run(model={"in_chans": 3}, attention="softmax")
    whole = create_transform(run, IMG_SIZE, is_training=True, as_bytes=True)
    batched = replace(run, augment=Augment(batched=True))

    def training_split(dataset: str, path: Path) -> Images:
        return open_split(Data(dataset=dataset, root=str(path)), "train_split")

    plain = training_split("folder", root)
    plain.reader = SubsetReader(plain.reader, range(len(plain))[:count])
    sources = {"JPEG": plain}
    for name, short_side in (("prepared, full size", None), ("prepared, short side 256", 256)):
        prepare("train", Images(plain.reader), folder / name, short_side, workers=0)
        sources[name] = training_split("cache", folder / name)
    for name, images in [*sources.items()]:
        images.transform = whole
        drawing = create_transform(batched, IMG_SIZE, is_training=True, as_bytes=True)
        sources[name + BATCHED] = replace(images, transform=drawing)
    sources["JPEG, decoded"] = replace(plain, transform=lambda image: torch.empty(3, 0, 0, dtype=torch.uint8))
    crop, *_, to_tensor = whole.transforms
    sources["JPEG, decoded and cropped"] = replace(plain, transform=Compose([crop, to_tensor]))
    return sources


def load(images: Images, count: int) -> list[torch.Tensor | Planned]:
    """Reads the batches of the first `count` images."""
    stack = stack_drawn if isinstance(images.transform, DrawingTransform) else fast_collate
    loader = ImageLoader(images, BATCH_SIZE, stack=stack, limit=math.inf, remedy="", sampler=range(count))
    return [batch for batch, _ in loader]


def draw_policy(images: Images, count: int) -> list[Planned]:
    """Reads the batches of the first `count` images, whose policy is yet to be done."""
    seed_everything(0)
    return [batch for batch in load(images, count) if isinstance(batch, Planned)]


def run_policy(batches: Sequence[Planned]) -> None:
    for batch in batches:
        batch._replace(images=batch.images.clone()).to(CPU)


def time_sources(
    sources: Mapping[str, Images], count: int, rounds: int, others: Mapping[str, Callable[[], object]] | None = None
) -> Times:
    """Measures the CPU time of every source for its first `count` images, with equal seeds in a round, and `others`."""

    def before(number: int) -> None:
        seed_everything(number)
        bar.update()

    calls = {name: partial(load, images, count) for name, images in sources.items()} | dict(others or {})
    with tqdm(total=len(calls) * (rounds + 2), desc="turns", leave=False, dynamic_ncols=True) as bar:
        return time_rounds(calls, rounds, CPU, 0, clock=time.process_time, before=before)


def speed_table(times: Times, count: int) -> str:
    """Formats images per second, milliseconds per image, and the ratio to the first source's speed.

    The gain of a source with `BATCHED` is its ratio to the speed of the same source without it.
    """
    plain, rows = next(iter(times.seconds)), []
    for name, seconds in times.seconds.items():
        row = quartile_columns("seconds", Quartiles.of(seconds), times)
        row |= quartile_columns("ratio", times.speedup(name, plain), times)
        speed, ms = f"{count / row['seconds']:.0f}", quartiles_text(row, "seconds", count / 1000, ".2f")
        gain = ""
        if name.endswith(BATCHED):
            row |= quartile_columns("gain", times.speedup(name, name.removesuffix(BATCHED)), times)
            gain = quartiles_text(row, "gain", 1, ".2f")
        rows.append((name, speed, ms, quartiles_text(row, "ratio", 1, ".2f"), gain))
    text = align([("source", "images/s per core", "ms", "ratio", "gain"), *rows])
    return f"{text}\n{NOISE}" if "~" in text else text


if __name__ == "__main__":
    main()
