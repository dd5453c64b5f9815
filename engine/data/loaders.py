"""Images -> batches: loaders of training and validation, and the broken images that they leave out."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from timm.data.loader import PrefetchLoader, fast_collate
from timm.data.random_erasing import RandomErasing
from timm.layers import to_2tuple
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler, default_collate
from tqdm import tqdm

from engine.config.schema import Run, num_channels, per_channel
from engine.data.augment import BatchAugment, Size, create_mixup, create_transform
from engine.data.images import BrokenImage
from engine.data.sampler import EpochSampler, SeededDataset
from engine.data.splits import Images, Splits, open_images, open_splits, report_split
from engine.data.workers import WorkerLoader, workers_of_rank
from engine.objectives import choose_objective
from engine.runtime.distributed import World, seed_everything
from engine.runtime.text import one_line

VERIFY = "`python -m engine.data.verify ROOT` lists the broken images of a data set"


class ImageLoader(WorkerLoader):
    """Batches of `Images` without broken ones: each of those makes its batch smaller by one.

    No other image replaces a broken one. The order and the number of batches do not change, so that ranks stay in step.

    Args:
        stack: samples -> batch. limit: broken images that a pass may leave out; if finite, never a whole batch.
        remedy: the end of the message of `BrokenImage`.
    Attributes:
        broken: those of the current pass, or of the last one, a line each: file and reason.
        positions: in evaluation, those of the images yielded so far, or in the last pass, in the order of the pass.
    Raises:
        BrokenImage: there are more than `limit`.
    """

    batch_size: int
    sampler: EpochSampler | SequentialSampler | range

    def __init__(self, images: Dataset, batch_size: int, *, stack: Callable, limit: float, remedy: str, **options: Any):
        super().__init__(images, batch_size, collate_fn=partial(_collate, stack=stack), **options)
        self.limit, self.remedy = limit, remedy
        self.broken: list[str] = []
        self.positions: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]  # torch names its own iterators
        known, self.broken, self.positions = set(self.broken), [], []
        for number, (batch, places, broken) in enumerate(super().__iter__()):
            self.broken += broken
            if len(self.broken) > self.limit or (not places and self.limit < math.inf):
                raise BrokenImage(f"{broken[-1]}; {self.remedy}")
            for line in broken:
                if line not in known:
                    tqdm.write(f"skipped: {one_line(line, 5000)}", file=sys.stderr)
            if not isinstance(self.sampler, EpochSampler):  # in training nobody asks, and a pass may be long
                self.positions += [number * self.batch_size + place for place in places]
            if places:
                yield batch


def _collate(samples: list[tuple | BrokenImage], stack: Callable) -> tuple[Any, list[int], list[str]]:
    """Returns the batch of the intact samples (None: there are none), their places, and a line for each broken one."""
    places = [place for place, sample in enumerate(samples) if not isinstance(sample, BrokenImage)]
    batch = stack([samples[place] for place in places]) if places else None
    return batch, places, [str(sample) for sample in samples if isinstance(sample, BrokenImage)]


class ErasingLoader(PrefetchLoader):
    """timm's prefetcher of training images, whose random erasing depends on a position, see `engine.data.sampler`.

    A batch is erased ahead, when the random state is that of another update.
    """

    def __init__(self, loader: ImageLoader, run: Run, **options: Any):
        super().__init__(loader, re_prob=run.augment.reprob, re_mode=run.augment.remode, **options)
        self.erase, self.seed = self.random_erasing, run.train.seed

    def __iter__(self) -> Iterator[Any]:
        sampler, world = self.sampler, self.sampler.world
        places = count(sampler.start + world.rank, self.loader.batch_size * world.size)  # of batches' first images

        def erase(images: Tensor) -> Tensor:
            seed_everything(self.seed, sampler.epoch, next(places), 1)  # 1: not the first image's seed
            return self.erase(images)

        if self.erase:
            self.random_erasing = cast(RandomErasing, erase)  # all that timm asks of it is to be called
        return super().__iter__()


Loader = ImageLoader | PrefetchLoader


def count_broken(loader: Loader, world: World) -> int:
    """Returns the number of broken images that all ranks have left out in this pass, or the last one."""
    return int(world.sum(torch.tensor(len(_image_loader(loader).broken), device=world.device)))


def indices_read(loader: Loader) -> list[int]:
    """Returns the indices of the images that the last evaluation by this rank's `loader` has yielded, in order."""
    order = list(loader.sampler)
    return [order[position] for position in _image_loader(loader).positions]


def check_broken(broken: int, limit: float) -> None:
    """Raises BrokenImage for more than `limit` broken images in an epoch, over all ranks."""
    if broken > limit:
        raise BrokenImage(f"{broken} images of this epoch are broken, more than data.max_broken = {limit}; {VERIFY}")


def _image_loader(loader: Loader) -> ImageLoader:
    return cast(ImageLoader, loader.loader) if isinstance(loader, PrefetchLoader) else loader


def images_of(loader: Loader) -> Images:
    """The images that `loader` reads, without the seeds of training."""
    dataset = _image_loader(loader).dataset
    return cast(Images, dataset.dataset if isinstance(dataset, SeededDataset) else dataset)


def create_loaders(
    run: Run, world: World, splits: Splits | None = None, *, img_size: Size, num_classes: int
) -> tuple[Loader, Loader, BatchAugment]:
    """Training loader, validation loader and batch-wise augmentation of a run.

    The loaders yield images (b, C, H, W) fp32 and class indices (b,) int64, or the objective's targets, on CUDA already
    on the device. Call ``train_loader.sampler.set_epoch(epoch)`` before each epoch. The training loader yields
    micro-batches, `grad_accum_steps` per optimiser step. Their images do not depend on the random state of this
    process; the batch-wise augmentation depends on it alone.

    Args:
        splits: those of `open_splits`, which opens them if there are none, and says what it refuses.
    """
    batch_size, rest = divmod(run.train.total_batch_size, world.size * run.train.grad_accum_steps)
    assert not rest, "a total batch that cannot be divided is refused"
    opened = splits or open_splits(run, num_classes)
    train = open_images(run, "train_split", img_size, _sends_bytes(run, world), opened[0])
    val = open_images(run, "val_split", img_size, _sends_bytes(run, world), opened[1])
    if world.is_primary:
        report_split(run.data, "train_split", train, img_size)
        val.reader.ignored = () if run.data.held_out_by else val.reader.ignored  # named once, with the training split
        report_split(run.data, "val_split", val, img_size)
    sampler = EpochSampler(len(train), run.train.total_batch_size, world, run.train.seed, run.augment.repeats)
    return (
        _create_loader(train, sampler, batch_size, run, world),
        _create_loader(val, range(world.rank, len(val), world.size), batch_size, run, world),
        create_mixup(run.augment, num_classes) or (lambda images, targets: (images, targets)),
    )


def create_val_loader(run: Run, world: World, *, img_size: Size, batch_size: int | None = None) -> Loader:
    """Validation loader alone; over all ranks every image comes once.

    Args:
        batch_size: images per rank; None: `choose_batch_size`.
    Raises:
        OptionError: missing or wrong folder, or an empty split.
    """
    val = open_images(run, "val_split", img_size, _sends_bytes(run, world))
    if world.is_primary:
        report_split(run.data, "val_split", val, img_size)
    share = range(world.rank, len(val), world.size)  # timm's OrderedDistributedSampler repeats images as padding
    return _create_loader(val, share, batch_size or choose_batch_size(img_size), run, world)


def choose_batch_size(img_size: Size) -> int:
    """Images per batch without gradients: 128, or fewer if they are larger than 256 x 256 pixels."""
    return max(1, min(128, 128 * 256**2 // math.prod(to_2tuple(img_size))))


def show_images(images: Images, run: Run) -> Images:
    """Returns `images` as the model of `run` sees them in validation, but as bytes (C, H, W), not normalised."""
    transform = create_transform(run, run.model["img_size"], is_training=False, as_bytes=True)
    return replace(images, transform=transform, create_target=None)


def _sends_bytes(run: Run, world: World) -> bool:
    """Returns whether images go to the device as bytes, to be normalised there; tokens do not."""
    return world.on_cuda and choose_objective(run).inputs == "images"


def _create_loader(dataset: Images, sampler: EpochSampler | range, batch_size: int, run: Run, world: World) -> Loader:
    """timm's `create_loader`, but with a sampler of our own, which it does not accept.

    On CUDA, timm's prefetcher copies images as uint8 while the device computes, and normalises and erases them there,
    but not tokens.
    """
    data, channels = run.data, num_channels(run)
    is_training = isinstance(sampler, EpochSampler)
    prefetch = _sends_bytes(run, world)
    if is_training:
        limit: float = data.max_broken
        remedy = f"too many broken images (data.max_broken = {limit} of an epoch, or a whole batch); {VERIFY}"
    else:
        limit = math.inf if data.broken_val == "skip" else 0
        remedy = f"refused in validation; {VERIFY}; data.broken_val=skip leaves them out"
    loader = ImageLoader(
        SeededDataset(dataset, run.train.seed) if is_training else dataset,
        batch_size,
        stack=fast_collate if prefetch else default_collate,
        limit=limit,
        remedy=remedy,
        sampler=sampler,
        num_workers=workers_of_rank(data.workers),
        pin_memory=world.on_cuda,
        patience=30 * run.train.timeout_minutes,  # before the other ranks give up
    )
    if not prefetch:
        return loader
    mean, std = per_channel(data.mean, channels), per_channel(data.std, channels)
    options: dict[str, Any] = {"mean": mean, "std": std, "channels": channels, "device": world.device}
    return ErasingLoader(loader, run, **options) if is_training else PrefetchLoader(loader, **options)
