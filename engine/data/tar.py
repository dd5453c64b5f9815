"""Reader of a tar file of class folders, by the rules of `engine.data.layout`."""

import io
import os
import posixpath
import tarfile
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from engine.data.layout import LayoutError, LayoutReader, classify, is_hidden, is_image, suffix_of
from engine.runtime.reading import open_regular


class TarReader(LayoutReader):
    """Reads a tar file of class folders, or one that holds a tar file for each class, as ImageNet is published.

    A folder that holds all of the images is no class, unless it is the only one. If two files have one name, the later
    one counts, as in tar.

    Raises:
        LayoutError: as in `classify`; or an image is stored as a link. OSError, TarError: the file cannot be read.
    """

    def __init__(self, path: str):
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            places = {name: place for name, *place in find_members(tar)}
        folders = {posixpath.dirname(name) for name in places if is_image(name) and not is_hidden(name)}
        shared = posixpath.commonpath(folders) if folders else ""
        shared = posixpath.dirname(shared) if folders == {shared} else shared
        prefix = f"{shared}/" if shared else ""
        super().__init__(classify(name.removeprefix(prefix) for name in places if name.startswith(prefix)))
        self.ignored = [*self.ignored, *(name for name in places if not name.startswith(prefix))]
        self.path, self.places = path, np.array([places[prefix + name] for name in self.samples.paths()])

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        begin, size = map(int, self.places[index])
        return read_member(self.path, begin, size), int(self.labels[index])

    def fingerprints(self) -> np.ndarray:
        return self.places[:, -1]


def read_member(path: str, begin: int, size: int) -> BinaryIO:
    """Reads `size` bytes of the file `path` from byte `begin` on, or fewer if the file ends before."""
    with open_regular(path) as file:  # not kept open: workers would share its position
        return io.BytesIO(os.pread(file.fileno(), size, begin))


def find_members(tar: tarfile.TarFile, folder: str = "", begin: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yields name, first byte and size of the files in `tar`, which starts at byte `begin`, and in tar files inside."""
    for member in tar:
        name = posixpath.normpath(posixpath.join(folder, member.name.lstrip("/")))
        if member.isreg() and not member.issparse():
            place = begin + member.offset_data
            if suffix_of(name) == ".tar" and not is_hidden(name):
                with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                    yield from find_members(inner, name[: -len(".tar")], place)
            else:
                yield name, place, member.size
        elif is_image(name) and not member.isdir() and not is_hidden(name):
            raise LayoutError(f"{name!r} is stored as a link, or sparse; make the file with `tar --dereference`")
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # where tarfile stops without a word
        raise tarfile.ReadError(f"damaged, or cut off, at byte {begin + tar.offset:,}")
