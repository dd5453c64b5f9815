"""Readers of a split as class folders, or as a tar file of them, by the same rules.

The classes are the folders of the first level, as in torchvision's `ImageFolder`: an image further below belongs to the
first folder on its way. Images are known by their suffixes; other files are ignored, and listed.
"""

import io
import os
import posixpath
import re
import sys
import tarfile
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby, pairwise, repeat
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
from timm.data.readers.reader import Reader
from timm.utils.misc import natural_key

from engine.errors import UserError
from engine.files import open_regular
from engine.images import SUFFIXES

_NO_IMAGES = f"no images (files named {', '.join(f'*{suffix}' for suffix in SUFFIXES)})"


class SplitReader(Protocol):
    """What readers of a split have beside timm's methods: what is known of all images before one is opened."""

    @property
    def labels(self) -> np.ndarray:
        """Class indices (number,), in the order of the images."""

    @property
    def class_to_idx(self) -> Mapping[str, int]:
        """Class name -> index."""

    @property
    def ignored(self) -> Sequence[str]:
        """Paths of files that are no images."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]: ...

    def filename(self, index: int) -> str: ...

    def filenames(self) -> Iterable[str]: ...


class LayoutError(ValueError):
    """Files that do not make up classes; the message says why, and the remedy."""


class Samples(Sequence[tuple[str, int]]):
    """Path and class index of every image, in three arrays.

    A million Python objects take 200 MB, and in every loader worker again: reading one writes to the memory it is in.

    Args:
        parts: class index and paths of images, one part after another.
    """

    def __init__(self, parts: Iterable[tuple[int, Iterable[str]]]):
        text, ends, labels = bytearray(), array("q", [0]), array("i")
        for label, paths in parts:
            names = list(paths)
            joined, lengths = "".join(names).encode(errors="surrogateescape"), [*map(len, names)]
            if len(joined) > sum(lengths):  # not in ASCII
                lengths = [len(name.encode(errors="surrogateescape")) for name in names]
            text += joined
            ends.extend(accumulate(lengths, initial=ends.pop()))
            labels.extend(repeat(label, len(names)))
        self.text, self.ends, self.labels = bytes(text), ends, np.array(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[str, int]:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        path = self.text[self.ends[index] : self.ends[index + 1]]
        return path.decode(errors="surrogateescape"), int(self.labels[index])

    def paths(self) -> Iterator[str]:
        """All paths in order."""
        return (self.text[begin:end].decode(errors="surrogateescape") for begin, end in pairwise(self.ends))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and list(self) == list(other)


class Layout(NamedTuple):
    """The files of a split in the order of their paths, numbers by value.

    Attributes:
        samples: path and class index of every image. class_to_idx: class name -> index. ignored: paths of other files.
    """

    samples: Samples
    class_to_idx: dict[str, int]
    ignored: list[str]


def classify(paths: Iterable[str]) -> Layout:
    """The layout of a split of the files `paths`, which are relative to it; one that ends in "/" is an empty folder.

    Raises:
        LayoutError: there is no image, one in no class folder, or a class folder without.
    """
    folders: defaultdict[str, list[str]] = defaultdict(list)
    others: list[str] = []
    for folder, group in groupby(paths, key=_first_folder):
        files = list(group)
        if images := [path for path in files if is_image(path)]:
            folders[folder].append("//".join([*images, ""]))  # a million strings would take three times as much
        if len(images) < len(files):
            others += [path for path in files if not is_image(path)]
    if not folders:
        raise LayoutError(_NO_IMAGES)
    if outside := sort_naturally(_split(folders.pop("", []))):
        raise LayoutError(f"images in no class folder: {len(outside):,}, such as {outside[0]!r}; move or remove them")
    class_to_idx = {name: index for index, name in enumerate(sort_naturally(folders))}
    others = sort_naturally(others)
    for path in others:
        if (folder := _first_folder(path)) and folder not in class_to_idx:
            raise LayoutError(f"the class folder {folder!r} holds no image; remove it")

    def parts() -> Iterator[tuple[int, Iterable[str]]]:
        """Folders one by one, but those that timm takes for equal together: the order is that of the whole paths."""
        for _, group in groupby(sort_naturally(f"{name}/" for name in folders), key=natural_key):
            names = [name.removesuffix("/") for name in group]
            images = sort_naturally(_split(chain.from_iterable(map(folders.pop, names))))
            for name, paths in groupby(images, key=_first_folder) if len(names) > 1 else [(names[0], images)]:
                yield class_to_idx[name], paths

    return Layout(Samples(parts()), class_to_idx, [path for path in others if not path.endswith("/")])


def _split(texts: Iterable[str]) -> list[str]:
    """The paths in `texts`, each followed by two slashes, which none contains."""
    return "".join(texts).split("//")[:-1]


def is_image(path: str) -> bool:
    """Whether the name of a file is that of an image."""
    if "/." in path or path.startswith("."):
        return suffix_of(path) in SUFFIXES  # ".jpg" has no suffix
    return path.lower().endswith(SUFFIXES)  # sooner


def suffix_of(path: str) -> str:
    """Suffix of a file's name in lower case, with its dot; "" if it has none."""
    name = path[path.rfind("/") + 1 :].lstrip(".")  # as posixpath.splitext, in a third of the time
    return name[name.rfind(".") :].lower() if "." in name else ""


def _first_folder(path: str) -> str:
    """The first folder on the way to a file; "" if it is in none."""
    return path.partition("/")[0] if "/" in path else ""


def sort_naturally(names: Iterable[str]) -> list[str]:
    """timm's order, numbers by value; names that it takes for equal ("01" and "1", "A" and "a") in that of the text."""
    names = sorted(names)
    numbers = _numbers(names)
    if numbers is None:
        return sorted(names, key=natural_key)
    return [names[index] for index in sorted(range(len(names)), key=numbers.__getitem__)]


def _numbers(names: Sequence[str]) -> list[int] | None:
    """The number by which the sorted `names` differ, as in ImageNet's folders; None: they differ in more than that.

    It orders them as `natural_key` does, in a fifth of the time.
    """
    if not names:
        return None
    prefix = re.sub(r"\d+$", "", posixpath.commonprefix([names[0], names[-1]]))
    suffix = re.sub(r"^\d+", "", names[0][len(prefix) :])
    found = [name[len(prefix) : len(name) - len(suffix)] for name in names if name.endswith(suffix)]
    return [*map(int, found)] if len(found) == len(names) and all(map(str.isdecimal, found)) else None


class LayoutReader(Reader):
    """timm reader of the images of a layout; where their content is, its subclasses know."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.samples, self.class_to_idx, self.ignored = layout

    @property
    def labels(self) -> np.ndarray:
        """Class indices (number,), in the order of the images."""
        return self.samples.labels

    def __len__(self) -> int:
        return len(self.samples)

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.samples[index][0]

    def filenames(self, basename: bool = False, absolute: bool = False) -> Iterator[str]:
        return self.samples.paths()


class FolderReader(LayoutReader):
    """Reads class folders, and opens nothing but regular files.

    Raises:
        LayoutError: see `classify`; or one folder is reached on two ways, as in a loop of links.
        OSError: a folder cannot be read.
    """

    def __init__(self, root: str):
        super().__init__(classify(find_files(root)))
        self.root = root

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        path, label = self.samples[index]
        return open_regular(os.path.join(self.root, path)), label


def list_files(names: Iterable[str]) -> list[str]:
    """The files that `names` stand for, in their order: a file itself, a folder its images and those below, - the files
    that standard input names, one a line.

    Raises:
        UserError: no such file or folder, a folder without images, or standard input is empty.
    """
    files = []
    for name in names:
        try:
            if name == "-":
                found = [os.fsdecode(line) for line in sys.stdin.buffer.read().splitlines() if line]
            elif os.path.isdir(name):
                found = [os.path.join(name, path) for path in sort_naturally(filter(is_image, find_files(name)))]
            else:
                os.stat(name)
                found = [name]
        except (OSError, LayoutError) as error:
            raise UserError(f"{name}: {getattr(error, 'strerror', error)}") from None
        if not found:
            raise UserError(f"{name}: {'no file is named on standard input' if name == '-' else _NO_IMAGES}")
        files += found
    return files


def find_files(root: str) -> Iterator[str]:
    """Paths of the files below the folder `root`, relative to it; links to folders are followed."""

    def refuse(error: OSError) -> None:
        raise error

    known: dict[tuple[int, int], str] = {}
    for folder, subfolders, files in os.walk(root, onerror=refuse, followlinks=True):
        path = os.path.relpath(folder, root)
        status = os.stat(folder)
        first = known.setdefault((status.st_dev, status.st_ino), path)
        if first != path:
            raise LayoutError(f"{path!r} and {first!r} are one folder; remove the link")
        prefix = "" if path == "." else f"{path}/"
        yield from (prefix + name for name in files)
        if prefix and not files and not subfolders:
            yield prefix


class ArrayReader(Reader):
    """timm reader of images in memory, each as a PGM file, or PPM.

    Args:
        images: bytes (number, height, width), grey, or (number, height, width, 3), RGB. labels: class indices.
        classes: names, in the order of their indices.
        white: the largest level.
    """

    ignored = ()

    def __init__(self, images: np.ndarray, labels: np.ndarray, classes: Iterable[str], white: int = 255):
        super().__init__()
        self.images, self.labels = images, labels
        self.class_to_idx = {name: index for index, name in enumerate(classes)}
        self.header = b"P%d %d %d %d\n" % (images.ndim + 2, images.shape[2], images.shape[1], white)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return io.BytesIO(self.header + self.images[index].tobytes()), int(self.labels[index])

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return f"{self.labels[index]}/{index}.pgm"


class FileReader(Reader):
    """timm reader of the files `paths`; the label of each is its position. It opens nothing but regular files."""

    ignored = ()

    def __init__(self, paths: Sequence[str]):
        super().__init__()
        self.paths, self.labels = paths, np.arange(len(paths))
        self.class_to_idx: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return open_regular(self.paths[index]), index

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.paths[index]


class TarReader(LayoutReader):
    """Reads a tar file of class folders, or of a tar file of one for every class, as ImageNet is published.

    Folders that hold all of the images are no classes, unless there is but one. Of two files of one name the later one
    counts, as in tar.

    Raises:
        LayoutError: see `classify`; or an image is stored as a link. OSError, TarError: it cannot be read.
    """

    def __init__(self, path: str):
        with tarfile.open(path, "r:") as tar:
            places = {name: place for name, *place in find_members(tar)}
        folders = {posixpath.dirname(name) for name in places if is_image(name)}
        shared = posixpath.commonpath(folders) if folders else ""
        shared = posixpath.dirname(shared) if folders == {shared} else shared
        prefix = f"{shared}/" if shared else ""
        super().__init__(classify(name.removeprefix(prefix) for name in places if name.startswith(prefix)))
        self.ignored += [name for name in places if not name.startswith(prefix)]
        self.path, self.places = path, np.array([places[prefix + name] for name in self.samples.paths()])

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        begin, size = map(int, self.places[index])
        return read_member(self.path, begin, size), int(self.labels[index])


def read_member(path: str, begin: int, size: int) -> BinaryIO:
    """The `size` bytes of the file `path` from `begin` on, or what is there of them."""
    with open(path, "rb", buffering=0) as file:  # not kept open: workers would share its position
        return io.BytesIO(os.pread(file.fileno(), size, begin))


def find_members(tar: tarfile.TarFile, folder: str = "", begin: int = 0) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of the files in `tar`, whose own first byte is `begin`, and in tar files inside it."""
    for member in tar:
        name = posixpath.normpath(posixpath.join(folder, member.name.lstrip("/")))
        if member.isreg() and not member.issparse():
            place = begin + member.offset_data
            if suffix_of(name) == ".tar":
                with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                    yield from find_members(inner, name[: -len(".tar")], place)
            else:
                yield name, place, member.size
        elif is_image(name) and not member.isdir():
            raise LayoutError(f"{name!r} is stored as a link, or sparse; make the file with `tar --dereference`")
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # where tarfile stops without a word
        raise tarfile.ReadError(f"damaged, or cut off, at byte {begin + tar.offset:,}")
