"""Reads the labels of image files from a CSV file: the split NAME is NAME.csv, with the columns `file` and `label`.

Paths are relative to the folder of the CSV file. Each label is a class. The classes, and the images of a class, have
the natural order of their names, whatever the order of the lines.
"""

import csv
import os
import posixpath
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from io import TextIOWrapper

import numpy as np

from engine.data.folders import FolderReader, measure_files
from engine.data.layout import Layout, LayoutError, Samples, sort_naturally
from engine.runtime.reading import open_regular
from engine.runtime.text import one_line

COLUMNS = ("file", "label")

MAX_LINE = 2**20
"""Characters of a line that are read at a time; a field has fewer, by Python's limit."""


def open_csv(path: str) -> FolderReader:
    """Opens the images that the CSV file `path` lists.

    Raises:
        LayoutError: the columns are not `COLUMNS`; a line has no file, no label or another number of fields; a file is
            missing, elsewhere or named twice; or the file lists nothing. OSError: the CSV file cannot be read.
    """
    root, classes = os.path.dirname(path), defaultdict[str, list[str]](list)
    lines: dict[str, int] = {}
    for number, file, label in _read_rows(path):
        if (first := lines.setdefault(file, number)) != number:
            raise LayoutError(f"line {number}: {_shown(file)} is in line {first} already; remove one of them")
        if file.startswith(("/", "../")):
            raise LayoutError(f"line {number}: {_shown(file)} is not below {_shown(root)}; link to it there")
        classes[label].append(file)
    if not lines:
        raise LayoutError("lists no image; write a line for each, with its file and its label")
    sizes, listed = measure_files(os.path.join(root, file) for file in lines), [*lines]
    if missing := [listed[index] for index in np.flatnonzero(sizes < 0)]:
        where = f"line {lines[missing[0]]}: no file {_shown(missing[0])} in {_shown(root)}"
        raise LayoutError(f"{where} ({len(missing):,} of {len(lines):,} are missing); correct the paths")
    class_to_idx = {label: index for index, label in enumerate(sort_naturally(classes))}
    samples = Samples((index, sort_naturally(classes[label])) for label, index in class_to_idx.items())
    return FolderReader(Layout(samples, class_to_idx, []), root)


def _read_rows(path: str) -> Iterator[tuple[int, str, str]]:
    """Yields number of the line, file and label of every row."""
    with open_regular(path) as file, TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
        rows = csv.reader(iter(partial(text.readline, MAX_LINE), ""), strict=True)
        try:
            titles = [title.strip() for title in next(rows, [])]
            if sorted(titles) != sorted(COLUMNS):
                problem = f"the columns are {', '.join(map(_shown, titles)) or 'missing'}"
                raise LayoutError(f"{problem}; the first line must be file,label, and no other columns are read")
            for row in rows:
                if not row:
                    continue
                if len(row) != len(COLUMNS):
                    problem = f"{len(row)} fields; expected file and label"
                    raise LayoutError(f"line {rows.line_num}: {problem}, in quotes where they contain a comma")
                found = dict(zip(titles, map(str.strip, row), strict=True))
                for title in COLUMNS:
                    if not found[title]:
                        raise LayoutError(f"line {rows.line_num}: no {title}; give one, or remove the line")
                yield rows.line_num, posixpath.normpath(found["file"]), found["label"]
        except csv.Error as error:
            raise LayoutError(f"line {rows.line_num}: {error}") from None


def _shown(name: str) -> str:
    return repr(one_line(name, 200))
