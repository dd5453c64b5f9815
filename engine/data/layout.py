"""Images, classes and order of a split, from the paths of its files.

The classes are the folders of the first level, as in torchvision's `ImageFolder`. A file is an image if it has the
suffix of one and is not hidden; other files are ignored, and listed.
"""

import posixpath
from abc import abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby, pairwise, repeat
from typing import BinaryIO, NamedTuple

import numpy as np
from timm.data.readers.reader import Reader
from timm.utils.misc import natural_key

from engine.data.images import SUFFIXES
from engine.runtime.text import to_nfc

NO_IMAGES = f"no images (files named {', '.join(f'*{suffix}' for suffix in SUFFIXES)})"

OF_SYSTEMS = (
    *("@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot"),  # of network storage
    *("__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found"),
)
"""Folders of operating systems, which hold copies."""

HIDDEN = ("/.", *(f"/{name}/" for name in OF_SYSTEMS))
"""Beginning of a hidden name, and the names of `OF_SYSTEMS`, in a path between slashes."""

LOOSE = (
    "move each image into a folder that is named for its class, or list them in a CSV file with the columns file and"
    " label (data.dataset=csv); predict.py takes images without classes"
)
"""Remedy for images in no class folder."""


class SplitReader(Reader):
    """Reader of a split: timm's methods, and facts about all images that are known before one is opened.

    Attributes:
        labels: class indices (number,), in the order of the images. class_to_idx: class name -> index.
        ignored: paths of the files that are not images.
        short_side: that of images which were made smaller when the split was prepared, pixels; 0: none was, or unknown.
    """

    labels: np.ndarray
    class_to_idx: Mapping[str, int]
    ignored: Sequence[str] = ()
    short_side: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[BinaryIO, int]: ...

    @abstractmethod
    def fingerprints(self) -> np.ndarray:
        """Number that stands for the content of every image, (number,) int64.

        It is the CRC-32 of an image in memory, and the size in bytes of one that lies in a file.
        """


class LayoutError(ValueError):
    """Files that cannot be read as a split of classes. The message gives the reason and the remedy."""


def name_classes(class_to_idx: Mapping[str, int]) -> dict[str, int]:
    """Returns class name -> index with the names in NFC, in which those of macOS are equal to those of other systems.

    Raises:
        LayoutError: two names become one.
    """
    known: dict[str, str] = {}
    for name in class_to_idx:
        if (first := known.setdefault(to_nfc(name), name)) != name:
            problem = f"the classes {first!a} and {name!a} are one name in two Unicode normalisations"
            raise LayoutError(f"{problem}; rename or merge them")
    return {to_nfc(name): index for name, index in class_to_idx.items()}


class Samples(Sequence[tuple[str, int]]):
    """Path and class index of every image, in three arrays: objects would take 200 MB per million in each worker.

    Args:
        parts: class index and paths of images of each part; the parts are joined in order.
    """

    def __init__(self, parts: Iterable[tuple[int, Iterable[str]]]):
        text, ends, labels = bytearray(), array("q", [0]), array("i")
        for label, paths in parts:
            names = [path.encode(errors="surrogateescape") for path in paths]
            text += b"".join(names)
            ends.extend(accumulate(map(len, names), initial=ends.pop()))
            labels.extend(repeat(label, len(names)))
        self.text, self.ends, self.labels = bytes(text), ends, np.array(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[str, int]:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        path = self.text[self.ends[index] : self.ends[index + 1]]
        return path.decode(errors="surrogateescape"), int(self.labels[index])

    def paths(self) -> Iterator[str]:
        """Yields all paths in order."""
        return (self.text[begin:end].decode(errors="surrogateescape") for begin, end in pairwise(self.ends))


class Layout(NamedTuple):
    """The files of a split in the natural order of their paths, which compares numbers by value.

    Attributes:
        ignored: paths of other files, and of hidden files and folders.
    """

    samples: Samples
    class_to_idx: dict[str, int]
    ignored: list[str]


def classify(paths: Iterable[str]) -> Layout:
    """Returns the layout of a split from the relative `paths` of its files; one that ends in "/" is an empty folder.

    Raises:
        LayoutError: there is no image, an image lies outside of all class folders, or a class folder holds no image.
    """
    folders, others = defaultdict[str, list[str]](list), list[str]()
    for path in paths:
        is_taken = is_image(path) and not is_hidden(path)
        (folders[_first_folder(path)] if is_taken else others).append(path)
    if not folders:
        raise LayoutError(NO_IMAGES)
    if outside := sort_naturally(folders.pop("", [])):
        remedy = "move or remove them" if folders else LOOSE
        raise LayoutError(f"images in no class folder: {len(outside):,}, such as {outside[0]!r}; {remedy}")
    class_to_idx = {name: index for index, name in enumerate(sort_naturally(folders))}
    others = sort_naturally(others)
    for path in others:
        if (folder := _first_folder(path)) and folder not in class_to_idx and not is_hidden(folder):
            raise LayoutError(f"the class folder {folder!r} holds no image; remove it")

    def parts() -> Iterator[tuple[int, Iterable[str]]]:
        # Folders whose names are equal in timm's order are sorted as one, so that the order of whole paths holds.
        for _, group in groupby(sort_naturally(f"{name}/" for name in folders), key=_natural_key):
            names = [name.removesuffix("/") for name in group]
            images = sort_naturally(chain.from_iterable(map(folders.pop, names)))
            for name, paths in groupby(images, key=_first_folder) if len(names) > 1 else [(names[0], images)]:
                yield class_to_idx[name], paths

    ignored = [path for path in others if not path.endswith("/") or is_hidden(path)]
    return Layout(Samples(parts()), class_to_idx, ignored)


def is_hidden(path: str) -> bool:
    """Returns whether a name in a relative path is hidden (".name"), or that of a folder of an operating system."""
    path = f"/{path}/"
    return any(mark in path for mark in HIDDEN)


def is_image(path: str) -> bool:
    """Returns whether a file is an image, by its name."""
    return suffix_of(path) in SUFFIXES


def suffix_of(path: str) -> str:
    """Returns the suffix of a file's name in lower case, with its dot; "" if it has none."""
    return posixpath.splitext(path)[1].lower()


def describe_files(ignored: Iterable[str]) -> str:
    """Returns the number of ignored files, and one of them, for the ten commonest suffixes; "" if there are none."""
    named: dict[str, list[str]] = {}
    for path in ignored:
        suffix = suffix_of(path)
        kind = "hidden or of the system" if is_hidden(path) else f"*{suffix}" if suffix else "without suffix"
        named.setdefault(kind, []).append(path)
    kinds = sorted(named.items(), key=lambda item: -len(item[1]))
    texts = [f"{len(paths):,} {kind} ({paths[0]!r})" for kind, paths in kinds]
    return f"ignored files: {', '.join([*texts[:10], *(['...'] if texts[10:] else [])])}" if texts else ""


def _first_folder(path: str) -> str:
    """Returns the first folder of a path; "" if there is none."""
    return path.partition("/")[0] if "/" in path else ""


def sort_naturally(names: Iterable[str]) -> list[str]:
    """Sorts names in timm's order, numbers by value; names equal in it ("01" and "1", "A" and "a") sort as text.

    The order does not depend on the Unicode normalisation.
    """
    return sorted(sorted(sorted(names), key=to_nfc), key=_natural_key)


def _natural_key(name: str) -> list[int | str]:
    return natural_key(to_nfc(name))


class LayoutReader(SplitReader):
    """Reader of the images of a layout; subclasses read their content."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.samples, self.class_to_idx, self.ignored = layout
        self.labels = self.samples.labels

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.samples[index][0]

    def filenames(self, basename: bool = False, absolute: bool = False) -> Iterator[str]:
        return self.samples.paths()
