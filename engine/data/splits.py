"""A split of a data set: its reader, its images, its classes and its identity."""

import math
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import Image
from timm.layers import to_2tuple
from torch import Tensor
from torch.utils.data import Dataset

from attention.options import OptionError, collecting, refuse
from engine.config.schema import Data, Run, num_channels
from engine.data.arrays import ArrayReader, DigitsReader
from engine.data.augment import Size, create_transform
from engine.data.cache import INDEX, CacheReader
from engine.data.csv_file import open_csv
from engine.data.datasets import TORCH, TorchReader
from engine.data.folders import open_class_folders
from engine.data.idx import ENDINGS, IdxReader
from engine.data.images import BrokenImage, decode, pass_on
from engine.data.layout import LOOSE, LayoutError, SplitReader, describe_files, is_hidden, is_image, name_classes
from engine.data.subset import SubsetReader, choose_classes, choose_images, hold_out
from engine.data.webdataset import WdsReader
from engine.objectives import choose_objective
from engine.objectives.copying import Copying
from engine.runtime.errors import UserError
from engine.runtime.text import describe_difference, describe_error, one_line

READERS: dict[str, tuple[Callable[[str], SplitReader], Sequence[str]]] = {
    "folder": (open_class_folders, ("",)),
    "csv": (open_csv, (".csv",)),
    "cache": (CacheReader, (INDEX,)),
    "idx": (IdxReader, ENDINGS),
    "wds": (WdsReader, ("-*.tar", ".tar")),
}
"""data.dataset -> reader of a split, and the endings of its file after the split's name ("": it is a folder)."""


@dataclass(eq=False)
class Images(Dataset):
    """The images of a split: transformed image and class index, or the `BrokenImage` that says why there is none.

    Args:
        transform: function of a PIL image; None leaves images as they are. mode: "RGB", or "L" for grey levels.
        create_target: function of an image's index that returns its target; None: the target is the class index.
    """

    reader: SplitReader
    transform: Callable[[Image.Image], Any] | None = None
    mode: Literal["RGB", "L"] = "RGB"
    create_target: Callable[[int], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.reader)

    def filename(self, index: int) -> str:
        return self.reader.filename(index)

    def __getitem__(self, index: int) -> tuple[Any, int | Tensor] | BrokenImage:
        try:
            image, label = self._read(index)
            inputs = image if self.transform is None else self.transform(image)
        except BrokenImage as error:
            return BrokenImage(f"{self.filename(index)}: {error}")
        return inputs, label if self.create_target is None else self.create_target(index)

    def _read(self, index: int) -> tuple[Any, int]:
        """The decoded image and its class index.

        Raises:
            BrokenImage: its file cannot be read. DataError: the machine failed.
        """
        try:
            file, label = self.reader[index]
            with file:
                return self.parse(file), int(label)
        except (OSError, tarfile.TarError) as error:
            pass_on(error)
            raise BrokenImage(str(error)) from error

    def parse(self, file: BinaryIO) -> Any:
        """Returns what `transform` takes of an open file: its decoded image."""
        return decode(file, self.mode)


Splits = tuple[Images, Images]
"""Training and validation images of a run."""


def open_images(
    run: Run, option: Literal["train_split", "val_split"], img_size: Size, as_bytes: bool, opened: Images | None = None
) -> Images:
    """Opens the split that `option` names, as inputs and targets of the model of `run`.

    Args:
        img_size: pixels of the inputs. as_bytes: see `create_transform`. opened: the split, if it is open.
    """
    is_training = option == "train_split"
    return Images(
        (_open_data(run, option) if opened is None else opened).reader,
        create_transform(run, img_size, is_training, as_bytes),
        "L" if num_channels(run) == 1 else "RGB",
        choose_objective(run).create_targets(run, is_training),
    )


def _open_data(run: Run, option: str) -> Images:
    if Copying.applies(run):
        return Images(ArrayReader(*Copying.draw(run, option == "train_split")))
    return open_split(run.data, option)


def open_splits(run: Run, num_classes: int | None = None) -> Splits:
    """Opens both splits of `run`, without transforms.

    Args:
        num_classes: outputs of the model; None: `model.num_classes`.
    Raises:
        OptionError: missing or wrong folders, an empty split, classes that differ between the splits or from the
            model's, or fewer training images than one total batch; all of these.
    """
    problems, opened = list[OptionError](), dict[str, Images]()
    for option in ("train_split", "val_split"):
        with collecting(problems):
            opened[option] = _open_data(run, option)
    if train := opened.get("train_split"):
        names = classes_of(train)
        if len(opened) == 2 and names != (others := classes_of(opened["val_split"])):
            problem = f"classes differ from training: {describe_difference(names, others)}"
            problems.append(OptionError("data.val_split", problem))
        with collecting(problems):
            expected = run.model["num_classes"] if num_classes is None else num_classes
            if choose_objective(run).predicts_classes and len(names) != expected:
                problem = f" = {expected}, but the images have {len(names)} classes; set it to that"
                raise OptionError("model.num_classes", problem)
        with collecting(problems):
            if len(train) < (batch_size := run.train.total_batch_size):
                problem = f" = {batch_size} exceeds the {len(train)} training images; lower it"
                raise OptionError("train.total_batch_size", problem)
    refuse(problems)
    return opened["train_split"], opened["val_split"]


def open_split(data: Data, option: str, key: str | None = None) -> Images:
    """Opens the split that `option` (train_split, val_split) names; of a training split only `data.subset`.

    With `data.val_fraction` or `data.folds`, both are parts of the training split: the images held out validate.

    Args:
        key: name of the option in errors; None: that of a configuration.
    Raises:
        OptionError: there is no such split, it cannot be read, or it has too few images.
    """
    is_validation = option == "val_split"
    option = "train_split" if data.held_out_by else option
    key = key or f"data.{option}"
    open_reader, path = find_split(data, getattr(data, option), key)
    try:
        reader = open_reader(path)
        reader.class_to_idx = name_classes(reader.class_to_idx)
    except (UserError, OptionError):
        raise
    except LayoutError as error:
        raise OptionError(key, f"{path!r}: {error}") from error
    except Exception as error:  # a parser raises many
        reason = error if isinstance(error, OSError | tarfile.TarError) else describe_error(error)
        problem = f"{path!r} is not a readable {data.dataset} file ({one_line(str(reason))})"
        raise OptionError(key, problem) from error
    if data.classes is not None:
        reader = choose_classes(reader, data.classes)
    if data.subset is not None and option == "train_split":
        reader = choose_images(reader, data.subset, data.subset_seed)
    if data.held_out_by:
        reader = hold_out(reader, data)[is_validation]
    return Images(reader)


def find_split(data: Data, split: str, key: str) -> tuple[Callable[[str], SplitReader], str]:
    """Finds the reader and the path of the split that the option `key` names `split`. OptionError: there is none."""
    if data.dataset == "digits":
        if data.root is not None:
            raise OptionError("data.root", f"{data.root!r} given, but the digits need none; set data.dataset")
        if split not in ("train", "val"):
            raise OptionError(key, f"{split!r} is no split of the digits; known: train, val")
        return DigitsReader, split

    if data.root is None:
        raise OptionError("data.root", f"required for data.dataset={data.dataset}: the directory that holds the splits")
    root = Path(data.root)
    if not root.is_dir():
        raise OptionError("data.root", f"no directory {data.root!r}")
    if data.dataset.startswith(TORCH):
        return partial(TorchReader, data.dataset, split=split), data.root
    reader, endings = READERS[data.dataset]
    paths = [root / f"{split}{ending}" for ending in endings]
    is_there = {"folder": Path.is_dir, "wds": lambda path: any(path.parent.glob(path.name))}  # else, single files
    path = next(filter(is_there.get(data.dataset, Path.is_file), paths), None)
    if path is None:
        known = tuple(ending for _, endings in READERS.values() for ending in endings if ending)
        entries = sorted(root.iterdir())
        found = [entry.name for entry in entries if entry.is_dir() or entry.name.endswith(known)][:20]
        if loose := [name for entry in entries if is_image(name := entry.name) and not is_hidden(name)]:
            found.insert(0, f"{len(loose):,} images in no folder, such as {loose[0]!r}")
        problem = f"no {paths[0].name!r} in {data.root!r}; found there: {one_line(', '.join(found)) or 'nothing'}"
        raise OptionError(key, f"{problem}{_advise(key, data.dataset, bool(loose))}")
    return reader, str(path)


def _advise(key: str, dataset: str, has_loose_images: bool) -> str:
    """Returns what to do about a split that is missing, for the end of the message."""
    if key == "data.val_split":
        training = "; in training, data.val_fraction=0.2 holds out a part of the training images instead"
        return training + "; to validate on class folders there, data.val_split=." * (dataset == "folder")
    if dataset != "folder":
        return ""
    if has_loose_images:
        return f"; {LOOSE}"
    remedy = "data.train_split=. data.val_fraction=0.2" if key == "data.train_split" else f"{key} ."
    return f"; if those are the class folders: {remedy}"


def classes_of(dataset: Images) -> list[str]:
    """Class names in the order of their indices."""
    index = dataset.reader.class_to_idx
    return sorted(index, key=index.__getitem__)


def count_data_classes(data: Data) -> int:
    """Returns the number of classes of the training images, for `model.num_classes` = auto.

    Raises:
        OptionError: there is one, or they are splits, as where `data.root` is the folder above that of the classes.
    """
    names = classes_of(open_split(data, "train_split"))
    if len(names) < 2:
        problem = f"the images are all of one class, {one_line(names[0], 100)!r}; name the folder of the classes"
        raise OptionError("model.num_classes", f" = auto: {problem} (data.root, data.train_split)")
    if {"train", "val", "valid", "validation", "test"}.issuperset(name.lower() for name in names):
        problem = f"the classes {', '.join(names)} have names of splits; set data.train_split, data.val_split"
        raise OptionError("model.num_classes", f" = auto: {problem} and data.val_fraction=null")
    return len(names)


def count_classes(dataset: Images) -> np.ndarray:
    """Returns the number of images of every class, (classes,) int64; an OptionError names a class that has none."""
    names = classes_of(dataset)
    counts = np.bincount(dataset.reader.labels, minlength=len(names))
    if empty := [name for name, count in zip(names, counts, strict=True) if not count]:
        problem = f"the class {one_line(empty[0], 100)!r} has no training image to balance; leave it out (data.classes)"
        raise OptionError("train.class_weights", problem)
    return counts


def report_split(data: Data, option: Literal["train_split", "val_split"], images: Images, img_size: Size) -> None:
    """Reports on stderr: omitted images, held-out validation, non-image files, images prepared too small."""
    number, lines = f"{len(images):,}", []
    if isinstance(reader := images.reader, SubsetReader) and len(reader) < reader.num_available:
        lines.append(f"data.{option}: {number} of {reader.num_available:,} images")
    if data.held_out_by and option == "val_split":
        held = f"{number} images held out of data.train_split = {data.train_split!r} ({data.held_out_by})"
        lines = [f"validation: {held}; data.val_split is not read"]
    if text := describe_files(images.reader.ignored):
        lines.append(f"data.{option}: {text}")
    if data.classes:
        names, used = classes_of(images), {*np.unique(images.reader.labels).tolist()}
        if empty := one_line(", ".join(name for index, name in enumerate(names) if index not in used), 100):
            lines.append(f"data.{option}: {len(names) - len(used)} of {len(names)} classes have no image: {empty}")
    needed = math.floor(max(to_2tuple(img_size)) / (data.crop_pct if option == "val_split" else 1))  # before the crop
    if 0 < images.reader.short_side < needed:
        problem = f"data.{option}: the images were prepared with a short side of {images.reader.short_side} pixels"
        remedy = f"prepare them with --short-side {needed}, or 0, which keeps their size"
        lines.append(f"warning: {problem}, and are enlarged to {needed}; {remedy}")
    for line in lines:
        print(line, file=sys.stderr, flush=True)
