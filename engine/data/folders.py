"""Readers of image files: those below a folder, such as class folders, and files that a command line names."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np

from engine.data.layout import (
    NO_IMAGES,
    Layout,
    LayoutError,
    LayoutReader,
    Samples,
    classify,
    describe_files,
    is_hidden,
    is_image,
    sort_naturally,
)
from engine.runtime.errors import UserError
from engine.runtime.reading import open_regular
from engine.runtime.text import one_line


class FolderReader(LayoutReader):
    """Reads the files of `layout`, whose paths are relative to the folder `root`; opens regular files only."""

    def __init__(self, layout: Layout, root: str):
        super().__init__(layout)
        self.root = root

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        path, label = self.samples[index]
        return open_regular(os.path.join(self.root, path)), label

    def fingerprints(self) -> np.ndarray:
        return measure_files(os.path.join(self.root, path) for path in self.samples.paths())


def open_class_folders(root: str) -> FolderReader:
    """Opens the images in class folders.

    Raises:
        LayoutError: as in `classify`; or two paths lead to one folder, as in a loop of links.
        OSError: a folder cannot be read.
    """
    return FolderReader(classify(find_files(root)), root)


def measure_files(paths: Iterable[str]) -> np.ndarray:
    """Returns the sizes of files, bytes, (number,) int64; -1 for what is no file."""

    def measure(path: str) -> int:
        try:
            there = os.stat(path)
            return there.st_size if stat.S_ISREG(there.st_mode) else -1
        except (OSError, ValueError):  # a link that leads nowhere, or a name that no file has: a broken image
            return -1

    return np.fromiter(map(measure, paths), np.int64)


def list_files(names: Iterable[str]) -> list[str]:
    """Lists the files that `names` stand for, in order.

    A file stands for itself, a folder for all images below it, without hidden ones, which are named on stderr, and "-"
    for the files and folders that standard input names, one per line.

    Raises:
        UserError: a file or folder does not exist, a folder holds no images, or standard input is empty.
    """
    files = []
    for name in names:
        try:
            if name == "-":
                found = list_files(os.fsdecode(line) for line in sys.stdin.buffer.read().splitlines() if line)
            elif os.path.isdir(name):
                inside = [*find_files(name)]
                if hidden := [*filter(is_hidden, inside)]:
                    print(f"{one_line(name)}: {describe_files(hidden)}", file=sys.stderr)
                    inside = [path for path in inside if not is_hidden(path)]
                found = [os.path.join(name, path) for path in sort_naturally(filter(is_image, inside))]
            else:
                os.stat(name)
                found = [name]
        except (OSError, ValueError) as error:  # of a LayoutError, or a null character
            raise UserError(f"{one_line(name)}: {getattr(error, 'strerror', error)}") from None
        if not found:
            raise UserError(f"{one_line(name)}: {'no file is named on standard input' if name == '-' else NO_IMAGES}")
        files += found
    return files


def find_files(root: str) -> Iterator[str]:
    """Yields the paths of the files below `root`, relative to it; empty or hidden folders have a "/" at the end.

    Links to folders are followed. Hidden folders are not entered.

    Raises:
        LayoutError: two paths lead to one folder. OSError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    known: dict[tuple[int, int], str] = {}
    for folder, subfolders, files in os.walk(root, onerror=refuse, followlinks=True):
        path = os.path.relpath(folder, root)
        status = os.stat(folder)
        first = known.setdefault((status.st_dev, status.st_ino), path)
        if first != path:
            raise LayoutError(f"{path!r} and {first!r} are one folder; remove the link")
        files += [f"{name}/" for name in subfolders if is_hidden(name)]
        subfolders[:] = [name for name in subfolders if not is_hidden(name)]
        prefix = "" if path == "." else f"{path}/"
        yield from (prefix + name for name in files)
        if prefix and not files and not subfolders:
            yield prefix


def open_files(paths: Iterable[str]) -> FolderReader:
    """Opens the files `paths`; the label of each is its position."""
    return FolderReader(Layout(Samples((number, [path]) for number, path in enumerate(paths)), {}, []), root="")
