"""Readers of image files: those below a folder, such as class folders, and files that a command line names.

The images in class folders come from a listing at the start, or from an index of it (`python -m engine.data.prepare
ROOT --index`). Both give the same images in the same order.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.data.images import BrokenImage
from engine.data.layout import (
    NO_IMAGES,
    Layout,
    LayoutError,
    LayoutReader,
    SplitReader,
    classify,
    describe_files,
    is_hidden,
    is_image,
    sort_naturally,
)
from engine.data.table import map_table, refuse_others, write_table
from engine.runtime.errors import UserError
from engine.runtime.reading import open_regular, parsing
from engine.runtime.text import one_line

INDEX = ".folders.safetensors"
"""Ending of an index, after the name of the split; one of WebDataset shards may lie beside it."""


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


class IndexedReader(FolderReader):
    """Reads the files that an index lists, which need not be trusted: opens files below `root` only."""

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        path, _ = self.samples[index]
        if path.startswith("/") or ".." in path.split("/"):
            raise BrokenImage("its path leads out of the data set")
        return super().__getitem__(index)


def open_class_folders(root: str) -> FolderReader:
    """Opens the images in class folders.

    Raises:
        LayoutError: as in `classify`; two paths lead to one folder, as in a loop of links; or the index is damaged, or
            a folder has changed since. OSError: a folder or the index cannot be read.
    """
    index = index_of(root)
    return IndexedReader(_read_index(index, root), root) if index.is_file() else FolderReader(_list(root), root)


def index_of(root: str) -> Path:
    """Returns the path of the index of the class folders in `root`, beside `root`."""
    return Path(f"{os.path.abspath(root)}{INDEX}")


def write_index(root: str) -> Layout:
    """Writes the index of the class folders in `root`, with the time of each folder's last change; returns the layout.

    Raises:
        LayoutError: as in `classify`; or the folders change meanwhile. OSError: no space, or no permission.
    """
    refuse_others(index_of(root))
    layout = _list(root)
    times = {folder: _changed_at(root, folder) for folder, _, _ in _walk(root)}
    if layout.samples.text != _list(root).samples.text:
        raise LayoutError("files are added or removed; make the index when that has ended")
    notes = {"folders": json.dumps(times), "ignored": json.dumps(layout.ignored), "hidden": "ignored"}
    write_table(index_of(root), layout.samples, layout.class_to_idx, notes)
    return layout


def _list(root: str) -> Layout:
    return classify(find_files(root))


def _read_index(path: Path, root: str) -> Layout:
    samples, class_to_idx, _, notes = map_table(path)
    with parsing(path.name, "make it anew", LayoutError):
        times, ignored = json.loads(notes["folders"]), json.loads(notes["ignored"])
        changed = [folder for folder, time in times.items() if time != _changed_at(root, folder)]
        if not all(isinstance(name, str) for name in ignored):
            raise ValueError("files that have no names")
    if notes.get("hidden") != "ignored":
        raise LayoutError(f"{path.name} is of an earlier version, which listed hidden files; make it anew")
    if changed:
        problem = f"{path.name} is older than the folder {one_line(changed[0], 100)!r}, or of other folders"
        raise LayoutError(f"{problem}; make it anew (python -m engine.data.prepare ROOT --index), or remove it")
    return Layout(samples, class_to_idx, ignored)


def _changed_at(root: str, folder: str) -> int:
    """Time of the last change of a folder in `root`, nanoseconds; -1 if it is not there."""
    try:
        return os.stat(os.path.join(root, folder)).st_mtime_ns
    except (OSError, ValueError):  # ValueError: a name that no file has
        return -1


def measure_files(paths: Iterable[str]) -> np.ndarray:
    """Returns the sizes of files, bytes, (number,) int64; -1 for a file that is not there."""

    def measure(path: str) -> int:
        try:
            return os.stat(path).st_size
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
    for folder, subfolders, files in _walk(root):
        prefix = "" if folder == "." else f"{folder}/"
        yield from (prefix + name for name in files)
        if prefix and not files and not subfolders:
            yield prefix


def _walk(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields the folders below `root`, relative to it, "." first, with the names of their folders and files.

    Hidden folders stand among the files, with a "/" at the end. Errors are those of `find_files`.
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
        yield path, subfolders, files


class FileReader(SplitReader):
    """Reads the files `paths`; the label of each is its position. Opens regular files only."""

    def __init__(self, paths: Sequence[str]):
        super().__init__()
        self.paths, self.labels = paths, np.arange(len(paths))
        self.class_to_idx = {}

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        return open_regular(self.paths[index]), index

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.paths[index]

    def fingerprints(self) -> np.ndarray:
        return measure_files(self.paths)
