"""Images -> batches: files of many formats, or the embedded digits, on one path of timm's readers and transforms.

The embedded digits (`digits.npz`) are the 1,797 images of scikit-learn's `load_digits`, 8x8 grey levels 0..16: the test
set of "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning Repository (1998),
doi:10.24432/C50P49, CC BY 4.0. The file was made once, from images and labels as uint8, by scikit-learn 1.9's
`train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)` (1,437 images to train, 360 to
validate) and `numpy.savez_compressed`; nothing else was changed.
"""

import hashlib
import math
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image
from timm.data.loader import PrefetchLoader, fast_collate
from timm.data.random_erasing import RandomErasing
from timm.layers import to_2tuple
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler, default_collate
from tqdm import tqdm

from attention.options import OptionError
from engine.augment import BatchAugment, create_batch_augment, create_transform, num_channels, per_channel
from engine.cache import INDEX, CacheReader
from engine.distributed import World, seed_everything
from engine.errors import one_line
from engine.formats import TORCH, HfdsReader, TorchReader, WdsReader
from engine.idx import ENDINGS, IdxReader
from engine.images import BrokenImage, decode
from engine.masks import MaskGenerator, create_masks
from engine.readers import ArrayReader, FolderReader, LayoutError, SplitReader, TarReader, suffix_of
from engine.sampler import EpochSampler, SeededDataset
from engine.schema import Data, Run
from engine.subset import SubsetReader, choose_classes, choose_images
from engine.workers import RestartingLoader, WorkersLost

ERASING = 1
"""Tells the random numbers of erasing a batch from those of the image at its place."""

DIGITS = Path(__file__).with_name("digits.npz")

VERIFY = "`python -m engine.verify ROOT` lists the broken images of a data set"


class DigitsReader(ArrayReader):
    """Reads one split of the embedded digits."""

    def __init__(self, split: str):
        with np.load(DIGITS) as arrays:
            super().__init__(arrays[f"{split}_images"], arrays[f"{split}_labels"], map(str, range(10)), white=16)


class CopyReader(ArrayReader):
    """Draws the sequences of `engine.copy_task`, each an image of one row, (1, length); a label is the first of w.

    Sequence i of a split is always the same.
    """

    def __init__(self, split: Literal["train", "val"], number: int, length: int, vocab_size: int):
        rng = np.random.default_rng(("train", "val").index(split))
        w = np.zeros((number, 1, length // 2), np.uint8)
        w[..., 1:] = rng.integers(1, vocab_size, (number, 1, length // 2 - 1))
        super().__init__(np.tile(w, 2), w[:, 0, 1].astype(int), map(str, range(vocab_size)))


READERS: dict[str, tuple[Callable[[str], SplitReader], Sequence[str]]] = {
    "folder": (FolderReader, ("",)),
    "tar": (TarReader, (".tar",)),
    "cache": (CacheReader, (INDEX,)),
    "idx": (IdxReader, ENDINGS),
    "wds": (WdsReader, ("-*.tar", ".tar")),
}
"""data.dataset -> reader of a split, and what may follow the split's name in that of its file ("": it is a folder)."""

IS_THERE = {"folder": Path.is_dir, "wds": lambda path: any(path.parent.glob(path.name))}
"""data.dataset -> whether a split is there, for those whose splits are no single files."""


class Images(Dataset):
    """The images of a split: transformed image and class index, or the `BrokenImage` that says why there is none.

    Attributes:
        transform: of a PIL image; None: none. mode: "RGB", or "L" for grey levels.
        masks: whose mask of an image takes the place of the class index; None: none.
    """

    def __init__(self, reader: SplitReader):
        self.reader = reader
        self.transform: Callable[[Image.Image], Any] | None = None
        self.mode: Literal["RGB", "L"] = "RGB"
        self.masks: MaskGenerator | None = None

    def __len__(self) -> int:
        return len(self.reader)

    def filename(self, index: int) -> str:
        return self.reader.filename(index)

    def __getitem__(self, index: int) -> tuple[Any, int | Tensor] | BrokenImage:
        try:
            file, label = self.reader[index]
            with file:
                image = decode(file, self.mode)
        except (BrokenImage, OSError, tarfile.TarError) as error:
            return BrokenImage(f"{self.filename(index)}: {error}")
        target = int(label) if self.masks is None else self.masks(index)
        return image if self.transform is None else self.transform(image), target


class ImageLoader(RestartingLoader):
    """Batches of `Images` without broken ones: each of those makes its batch smaller by one.

    No other image replaces a broken one, so that none counts twice. The order and the number of batches do not change:
    ranks stay in step, and a position in the order means the same with and without broken images.

    Args:
        stack: samples -> batch. limit: broken images that a pass may leave out; if finite, never a whole batch.
        remedy: the end of the message of `BrokenImage`.
    Attributes:
        broken: those of the current pass, or of the last one, a line each: file and reason.
        omitted: their positions in the order of the pass.
    Raises:
        BrokenImage: there are more than `limit`.
    """

    batch_size: int
    sampler: EpochSampler | SequentialSampler | range

    def __init__(
        self,
        images: Images | SeededDataset,
        batch_size: int,
        *,
        stack: Callable,
        limit: float,
        remedy: str,
        **options: Any,
    ):
        super().__init__(images, batch_size, collate_fn=partial(_collate, stack=stack), **options)
        self.limit, self.remedy = limit, remedy
        self.broken: list[str] = []
        self.omitted: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]  # torch names its own iterators
        known, self.broken, self.omitted = set(self.broken), [], []
        for number, (batch, positions, broken) in enumerate(super().__iter__()):
            self.broken += broken
            self.omitted += [number * self.batch_size + position for position in positions]
            if len(self.broken) > self.limit or (batch is None and self.limit < math.inf):
                raise BrokenImage(f"{broken[-1]}; {self.remedy}")
            for line in broken:
                if line not in known:
                    tqdm.write(f"skipped: {one_line(line, 5000)}", file=sys.stderr)
            if batch is not None:
                yield batch


def _collate(
    samples: list[tuple[Any, int | Tensor] | BrokenImage], stack: Callable
) -> tuple[Any, list[int], list[str]]:
    """The batch of the intact samples (None: there are none); position, and a line, of each broken one."""
    whole = [sample for sample in samples if not isinstance(sample, BrokenImage)]
    broken = [position for position, sample in enumerate(samples) if isinstance(sample, BrokenImage)]
    return stack(whole) if whole else None, broken, [str(samples[position]) for position in broken]


class ErasingLoader(PrefetchLoader):
    """timm's prefetcher of training images, whose random erasing depends on a place, as `engine.sampler` says.

    It is done a batch ahead, on the prefetcher's stream, when the random state is that of another update.
    """

    def __init__(self, loader: ImageLoader, run: Run, **options: Any):
        super().__init__(loader, re_prob=run.augment.reprob, re_mode=run.augment.remode, **options)
        self.erase, self.seed = self.random_erasing, run.train.seed

    def __iter__(self) -> Iterator[Any]:
        sampler, world = self.sampler, self.sampler.world
        places = count(sampler.start + world.rank, self.loader.batch_size * world.size)  # of batches' first images

        def erase(images: Tensor) -> Tensor:
            seed_everything(self.seed, sampler.epoch, next(places), ERASING)
            return self.erase(images)

        if self.erase:
            self.random_erasing = cast(RandomErasing, erase)  # all that timm asks of it is to be called
        return super().__iter__()


Loader = ImageLoader | PrefetchLoader


def count_broken(loader: Loader, limit: float, world: World) -> int:
    """The number of broken images that the loaders of all ranks have left out, in the current pass or the last one.

    Raises:
        BrokenImage: more than `limit`, on every rank.
    """
    broken = int(world.sum(torch.tensor(len(_image_loader(loader).broken), device=world.device)))
    check_broken(broken, limit)
    return broken


def indices_read(loader: Loader) -> list[int]:
    """The indices of the images that the last pass of this rank's `loader` has yielded, in their order."""
    omitted = set(_image_loader(loader).omitted)
    return [index for position, index in enumerate(loader.sampler) if position not in omitted]


def check_broken(broken: int, limit: float) -> None:
    """Refuses so many broken images in an epoch, over all ranks.

    Raises:
        BrokenImage: they are more than `limit`.
    """
    if broken > limit:
        raise BrokenImage(f"{broken} images of this epoch are broken, more than data.max_broken = {limit}; {VERIFY}")


def has_lost_workers(loader: Loader) -> bool:
    """Whether so many workers of `loader` were killed that a run should save and end."""
    return _image_loader(loader).has_lost_workers


def check_workers(loader: Loader, world: World) -> None:
    """Ends a run that has lost loader workers.

    Raises:
        WorkersLost: `has_lost_workers` on any rank; raised on every one.
    """
    lost = [str(rank) for rank, (flag,) in enumerate(world.gather([has_lost_workers(loader)])) if flag]
    if lost:
        workers = _image_loader(loader).num_workers
        raise WorkersLost(
            f"loader workers of rank {', '.join(lost)} were killed again and again (out of memory?); lower data.workers"
            f" = {workers}; the run is saved, and the same command resumes it"
        )


def _image_loader(loader: Loader) -> ImageLoader:
    return cast(ImageLoader, loader.loader) if isinstance(loader, PrefetchLoader) else loader


def images_of(loader: Loader) -> Images:
    """The images that `loader` reads, without the seeds of training."""
    dataset = _image_loader(loader).dataset
    return cast(Images, dataset.dataset if isinstance(dataset, SeededDataset) else dataset)


def create_loaders(
    run: Run, world: World, *, img_size: int | tuple[int, int], num_classes: int
) -> tuple[Loader, Loader, BatchAugment]:
    """Training loader, validation loader and batch-wise augmentation of a run.

    The loaders yield images (b, C, H, W) fp32 and class indices (b,) int64, or for a model with a mask token masks
    (`engine.masks`), on CUDA already on the device. Before each epoch call ``train_loader.sampler.set_epoch(epoch)``.
    The training loader yields micro-batches, `grad_accum_steps` per optimiser step. Their images do not depend on the
    random state of this process; the batch-wise augmentation depends on it alone.

    Raises:
        OptionError: missing or wrong folders, an empty split, classes that differ between the splits or from the
            model's, or fewer training images than one total batch.
    """
    batch_size, rest = divmod(run.train.total_batch_size, world.size * run.train.grad_accum_steps)
    assert not rest, "check_run refuses a total batch that cannot be divided"
    train, val = open_images(run, "train_split"), open_images(run, "val_split")
    if classes_of(train) != classes_of(val):
        names = difference(classes_of(train), classes_of(val))
        raise OptionError("data.val_split", f"classes differ from training: {names}")
    if not run.model.get("mask_token"):
        _check_num_classes(train, num_classes)
    if world.is_primary:
        report_ignored("data.train_split", train)
        report_ignored("data.val_split", val)
    if len(train) < run.train.total_batch_size:
        raise OptionError(
            "train.total_batch_size",
            f" = {run.train.total_batch_size} exceeds the {len(train)} training images; lower it",
        )
    val_limit = math.inf if run.data.broken_val == "skip" else 0
    sampler = EpochSampler(len(train), run.train.total_batch_size, world, run.train.seed, run.augment.repeats)
    return (
        _create_loader(train, sampler, batch_size, run, world, img_size, True, run.data.max_broken),
        _create_loader(val, _share(val, world), batch_size, run, world, img_size, False, val_limit),
        create_batch_augment(run.augment, num_classes),
    )


def create_val_loader(
    run: Run,
    world: World,
    *,
    img_size: int | tuple[int, int],
    num_classes: int | None,
    batch_size: int | None = None,
    skip_broken: bool = False,
) -> Loader:
    """Validation loader alone; over all ranks every image comes once.

    An image that cannot be read ends the evaluation with `BrokenImage`, or is left out and counted (`skip_broken`).

    Args:
        num_classes: that the images must have; None: any number.
        batch_size: images per rank; None: `choose_batch_size`.
    Raises:
        OptionError: missing or wrong folder, an empty split, or another number of classes.
    """
    val = open_images(run, "val_split")
    if num_classes is not None:
        _check_num_classes(val, num_classes)
    if world.is_primary:
        report_ignored("data.val_split", val)
    batch_size = batch_size or choose_batch_size(img_size)
    limit = math.inf if skip_broken else 0
    return _create_loader(val, _share(val, world), batch_size, run, world, img_size, False, limit)


def choose_batch_size(img_size: int | tuple[int, int]) -> int:
    """Images per batch without gradients: 128, or fewer if they are larger than 256 x 256 pixels."""
    return max(1, min(128, 128 * 256**2 // math.prod(to_2tuple(img_size))))


def open_images(run: Run, option: Literal["train_split", "val_split"]) -> Images:
    """`open_split`, or the sequences that the model of `run` is to copy."""
    if run.data.dataset != "copy":
        return open_split(run.data, option)
    split: Literal["train", "val"] = "train" if option == "train_split" else "val"
    number = run.data.num_sequences[split == "val"]
    return Images(CopyReader(split, number, to_2tuple(run.model["img_size"])[1], run.model["vocab_size"]))


def open_split(data: Data, option: str) -> Images:
    """The images of the split that the option `option` (train_split, val_split) names; of training, `data.subset`."""
    key = f"data.{option}"
    open_reader, path = _find_split(data, getattr(data, option), key)
    try:
        reader = open_reader(path)
    except (tarfile.TarError, OSError) as error:
        raise OptionError(key, f"{path!r} is not a readable {data.dataset} file ({error})") from error
    except LayoutError as error:
        raise OptionError(key, f"{path!r}: {error}") from error
    if data.classes is not None:
        reader = choose_classes(reader, data.classes)
    if data.subset is not None and option == "train_split":
        reader = choose_images(reader, data.subset, data.subset_seed)
    return Images(reader)


def _find_split(data: Data, split: str, key: str) -> tuple[Callable[[str], SplitReader], str]:
    """What reads the split named `split` by the option `key`, and where it is."""
    if data.dataset == "digits":
        if data.root is not None:
            raise OptionError("data.root", f"{data.root!r} given, but the digits need none; set data.dataset")
        if split not in ("train", "val"):
            raise OptionError(key, f"{split!r} is no split of the digits; known: train, val")
        return DigitsReader, split

    if data.root is None:
        raise OptionError("data.root", f"required for data.dataset={data.dataset}: the directory that holds the splits")
    if data.dataset == "hfds":
        return partial(HfdsReader, split=split), data.root
    root = Path(data.root)
    if not root.is_dir():
        raise OptionError("data.root", f"no directory {data.root!r}")
    if data.dataset.startswith(TORCH):
        return partial(TorchReader, data.dataset, split=split), data.root
    reader, endings = READERS[data.dataset]
    paths = [root / f"{split}{ending}" for ending in endings]
    path = next(filter(IS_THERE.get(data.dataset, Path.is_file), paths), None)
    if path is None:
        known = tuple(ending for _, endings in READERS.values() for ending in endings if ending)
        found = sorted(entry.name for entry in root.iterdir() if entry.is_dir() or entry.name.endswith(known))
        raise OptionError(
            key, f"no {paths[0].name!r} in {data.root!r}; found there: {', '.join(found[:20]) or 'nothing'}"
        )
    return reader, str(path)


def classes_of(dataset: Images) -> list[str]:
    """Class names in the order of their indices."""
    index = dataset.reader.class_to_idx
    return sorted(index, key=index.__getitem__)


def describe_ignored(dataset: Images) -> str:
    """The number of files that are no images, and one of them, for the ten commonest suffixes; "" if there are none."""
    named: dict[str, list[str]] = {}
    for path in dataset.reader.ignored:
        named.setdefault(suffix_of(path), []).append(path)
    kinds = sorted(named.items(), key=lambda item: -len(item[1]))
    texts = [f"{len(paths):,} {f'*{suffix}' if suffix else 'without suffix'} ({paths[0]!r})" for suffix, paths in kinds]
    return f"ignored files: {', '.join([*texts[:10], *(['...'] if texts[10:] else [])])}" if texts else ""


def report_ignored(name: str, dataset: Images) -> None:
    """Says on stderr which files of the split `name` are no images, and how many images are left out, if any."""
    if isinstance(reader := dataset.reader, SubsetReader) and len(reader) < reader.num_available:
        print(f"{name}: {len(reader):,} of {reader.num_available:,} images", file=sys.stderr, flush=True)
    if text := describe_ignored(dataset):
        print(f"{name}: {text}", file=sys.stderr, flush=True)


def difference(first: Sequence[str], second: Sequence[str], places: Sequence[str] = ("training", "validation")) -> str:
    """How two lists of class names differ: the names that only one of them has, ten of each at most, or their order."""
    only = zip(places, (sorted(set(first) - set(second)), sorted(set(second) - set(first))), strict=True)
    texts = [
        f"only in {place}: {', '.join(map(_shown, names[:10]))}{', ...' if names[10:] else ''} ({len(names)})"
        for place, names in only
        if names
    ]
    return "; ".join(texts) or "the same names in another order"


def _shown(name: str) -> str:
    """A name from a stranger's file, fit to be printed."""
    return (name if name.isprintable() else ascii(name))[:100]


def identify_data(train: Images, val: Images) -> dict[str, Any]:
    """What of the data is part of a run: class names, and a digest of each split's list of files."""
    return {"classes": classes_of(train), "train_files": digest_files(train), "val_files": digest_files(val)}


def digest_files(images: Images) -> str:
    """SHA-256 of the class index and the name, relative to the split, of every image in order."""
    digest, names, labels = hashlib.sha256(), iter(images.reader.filenames()), images.reader.labels
    changes = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), len(labels)]
    for begin, end in pairwise(changes):  # classes rather than images, of which there may be a million
        label = f"{labels[begin]} "
        text = label + f"\0{label}".join(islice(names, end - begin)) + "\0"
        digest.update(text.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _check_num_classes(dataset: Images, num_classes: int) -> None:
    found = len(classes_of(dataset))
    if found != num_classes:
        raise OptionError("model.num_classes", f" = {num_classes}, but the images have {found} classes; set it to that")


def _share(dataset: Images, world: World) -> range:
    """The indices that this rank evaluates. Unlike in timm's OrderedDistributedSampler, none is repeated as padding."""
    return range(world.rank, len(dataset), world.size)


def show_images(images: Images, run: Run) -> Images:
    """`images` as the model of `run` sees them in validation, but as bytes (C, H, W), not normalised."""
    shown = Images(images.reader)
    shown.mode = images.mode
    shown.transform = create_transform(run, run.model["img_size"], is_training=False, as_bytes=True)
    return shown


def _create_loader(
    dataset: Images,
    sampler: EpochSampler | range,
    batch_size: int,
    run: Run,
    world: World,
    img_size: int | tuple[int, int],
    is_training: bool,
    limit: float,
) -> Loader:
    """timm's `create_loader`, but with a sampler of our own, which it does not accept.

    On CUDA, timm's prefetcher copies images as uint8, while the device computes, and normalises and erases them there;
    not tokens.
    """
    data = run.data
    channels = num_channels(run)
    prefetch = world.on_cuda and not run.model.get("vocab_size")
    dataset.mode = "L" if channels == 1 else "RGB"
    dataset.transform = create_transform(run, img_size, is_training, as_bytes=prefetch)
    dataset.masks = create_masks(run, is_training)
    if is_training:
        remedy = f"too many broken images (data.max_broken = {limit} of an epoch, or a whole batch); {VERIFY}"
    else:
        remedy = f"refused in validation; {VERIFY}; data.broken_val=skip (validate.py: --skip-broken) leaves them out"
    loader = ImageLoader(
        SeededDataset(dataset, run.train.seed) if is_training else dataset,
        batch_size,
        stack=fast_collate if prefetch else default_collate,
        limit=limit,
        remedy=remedy,
        sampler=sampler,
        num_workers=data.workers,
        pin_memory=world.on_cuda,
    )
    if not prefetch:
        return loader
    mean, std = per_channel(data.mean, channels), per_channel(data.std, channels)
    options: dict[str, Any] = {"mean": mean, "std": std, "channels": channels, "device": world.device}
    return ErasingLoader(loader, run, **options) if is_training else PrefetchLoader(loader, **options)
