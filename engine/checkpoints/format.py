"""Files of weights that need not be trusted: their content is checked before torch reads it.

`torch.load(weights_only=True)` runs no code, but it trusts the tensor sizes that a file states, and creates any object
of its list of types, even a byte array of a terabyte. A checkpoint of this project is an uncompressed archive of plain
values, ordered mappings and dense tensors; everything else is refused here.
"""

import io
import json
import math
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

MAX_PICKLE = 2**21
"""Bytes of the pickle, without the tensors' data; 5,000 tensors take 0.6 MB."""

MAX_MEMBERS = 30_000
"""Files in the archive, one for each tensor."""

MAX_PLAIN = 10_000
"""Values in the metadata, with references written out: a value that contains itself is refused."""

MAX_CLASSES = 100
"""Classes of objects that a file of another program may hold."""

MEMBER = re.compile(r"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.[a-z_]+|\.data/serialization_id)")

OPERATIONS = re.compile(
    "PROTO|STOP|MARK|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?|NONE|NEWTRUE|NEWFALSE|BININT[12]?|LONG1"
    "|BINFLOAT|BINUNICODE|GLOBAL|REDUCE|BUILD|BINPERSID|(LONG_)?BIN(PUT|GET)"
)
"""Operations of the pickles that torch writes (protocol 2); none allocates more than the file holds."""

NEW_OBJECT = "a pickle with NEWOBJ"
"""The one problem that files of other programs may have: an object of a class."""

ITEM_SIZE = {
    f"{name}Storage": size
    for size, names in {8: "Double Long", 4: "Float Int", 2: "Half BFloat16 Short", 1: "Char Byte Bool"}.items()
    for name in names.split()
}
"""torch's storage types -> bytes of an element."""


class ForeignObject:
    """An object in a pickle of another program. Its own class is never imported.

    Attributes:
        class_name: ``"argparse.Namespace"``. state: the object's state in the pickle.
    """

    class_name = ""
    state: Any = None

    def __init__(self, *arguments: Any):
        if self.class_name != "functools.partial":  # pickled as a call; other objects are made without one
            raise pickle.UnpicklingError(f"a pickle with a call of {self.class_name}"[:100])

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Safetensors(NamedTuple):
    """A file in the safetensors format.

    Attributes:
        weights: name -> tensor. metadata: the texts in its header.
    """

    weights: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def names(self) -> Set[str]:
        """The names of the weights."""
        return self.weights.keys()

    def load(self, foreign: bool = False) -> dict[str, Any]:
        """Returns the weights; `foreign` makes no difference."""
        return self.weights


class Archive(NamedTuple):
    """A file of torch.save, of which nothing has been unpickled yet.

    Attributes:
        members: name in the archive -> bytes, checked against their CRC. names: all texts in its pickle.
        problems: operations that a checkpoint of this project does not have.
    """

    members: dict[str, bytes]
    names: Set[str]
    problems: list[str]

    def load(self, foreign: bool = False) -> dict[str, Any]:
        """Returns the content of the file in main memory.

        Args:
            foreign: accept files of other programs too; their objects become `ForeignObject`.
        Raises:
            ValueError, pickle.UnpicklingError and others: the file holds anything that `save_checkpoint` does not
                write, or claims more bytes than it has.
        """
        return _load(*self.copy(foreign))

    def copy(self, foreign: bool = False) -> tuple[io.BytesIO, list[type[ForeignObject]]]:
        """Returns a copy of the file, made from its checked members, and the classes of foreign objects in it.

        torch reads this copy: it might find other members or sizes in the file itself.
        """
        if problems := [problem for problem in self.problems if not (foreign and problem == NEW_OBJECT)]:
            raise ValueError(problems[-1])
        reader = _Reader(self.members["data.pkl"], {name: len(data) for name, data in self.members.items()}, foreign)
        reader.load()
        copy = io.BytesIO()
        with zipfile.ZipFile(copy, "w") as archive:
            for name, data in self.members.items():
                archive.writestr(f"archive/{name}", data)
        copy.seek(0)
        return copy, [*reader.classes.values()]


def _load(copy: io.BytesIO, classes: Sequence[type[ForeignObject]]) -> dict[str, Any]:
    with torch.serialization.safe_globals([(kind, kind.class_name) for kind in classes]):
        return torch.load(copy, map_location="cpu", weights_only=True)


def open_safetensors(content: bytes) -> Safetensors:
    """Reads a file in the safetensors format.

    Raises:
        Exception: the file is damaged.
    """
    size = int.from_bytes(content[:8], "little")
    if size > MAX_PICKLE:
        raise ValueError(f"a header of more than {MAX_PICKLE} bytes")
    weights = safetensors.torch.load(content)
    return Safetensors(weights, json.loads(content[8 : 8 + size]).get("__metadata__", {}))


def open_archive(content: bytes) -> Archive:
    """Opens a file of torch.save, and checks its members and the operations of its pickle.

    Raises:
        ValueError, zipfile.BadZipFile and others: no such file, one that claims more bytes than it has, or bytes that
            do not match their CRC.
    """
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise ValueError("neither a whole file of torch.save nor in the safetensors format")
    members = _read_members(content)
    num_put = 0
    problems: dict[str, None] = {}  # in their order, each once
    names: set[str] = set()
    for operation, argument, _ in pickletools.genops(members["data.pkl"]):
        if not OPERATIONS.fullmatch(operation.name):
            problems[f"a pickle with {operation.name}"] = None
        if operation.name in ("BINPUT", "LONG_BINPUT"):
            num_put += 1
            if not isinstance(argument, int) or argument > num_put:  # Python allocates a table of that size
                problems["a pickle that numbers its objects at random"] = None
        if operation.name == "BINUNICODE":
            names.add(str(argument))
    return Archive(members, names, [*problems])


def read_archive(content: bytes) -> dict[str, Any]:
    """Reads a file that `save_checkpoint` has written; it need not be trusted.

    Raises:
        Exception: see `open_archive` and `Archive.load`.
    """
    copy, classes = open_archive(content).copy()  # the archive is freed: memory for the tensors
    return _load(copy, classes)


def _read_members(content: bytes) -> dict[str, bytes]:
    """Returns name in the archive -> bytes, checked against their CRC."""
    if content.count(b"PK\x01\x02") > MAX_MEMBERS:  # each makes an object of half a kilobyte
        raise ValueError(f"an archive of more than {MAX_MEMBERS} files")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if strange := [member.filename for member in archive.infolist() if not MEMBER.fullmatch(member.filename)]:
            raise ValueError(f"an archive with {strange[0][:40]!r}")
        sizes = {name: member.file_size for name, member in members.items()}
        if len(members) < len(archive.infolist()) or sum(sizes.values()) > len(content):
            raise ValueError("an archive that claims more than it holds")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise ValueError("a compressed archive")
        if sizes.get("data.pkl", MAX_PICKLE + 1) > MAX_PICKLE:
            raise ValueError(f"no structure of at most {MAX_PICKLE} bytes")
        if min(member.header_offset for member in members.values()) or content[-22:-18] != b"PK\x05\x06":
            raise ValueError("an archive with something before or after it")
        return {name: archive.read(member) for name, member in members.items()}


class _Reader(pickle.Unpickler):
    """Unpickles plain values, with None for every tensor."""

    def __init__(self, structure: bytes, sizes: Mapping[str, int], foreign: bool):
        super().__init__(io.BytesIO(structure))
        self.sizes, self.foreign = sizes, foreign
        self.classes: dict[str, type[ForeignObject]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _check_tensor
        if module == "torch" and name in ITEM_SIZE:
            return ITEM_SIZE[name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype  # an option of some optimisers
        if self.foreign and len(self.classes) < MAX_CLASSES:
            full = f"{module}.{name}"
            return self.classes.setdefault(full, type("ForeignObject", (ForeignObject,), {"class_name": full}))
        raise pickle.UnpicklingError(f"a pickle with {module}.{name}"[:100])

    def persistent_load(self, pid: tuple) -> int:
        """Returns the number of elements of a storage."""
        kind, item_size, key, _, num_elements = pid
        if kind != "storage" or self.sizes.get(f"data/{key}") != item_size * num_elements:
            raise ValueError(f"a tensor of {num_elements} elements, which the archive does not hold")
        return num_elements


def _check_tensor(num_elements: int, offset: int, size: tuple, stride: tuple, *rest: Any) -> None:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    outside = 0 not in size and last >= num_elements
    if min((offset, *size, *stride)) < 0 or outside or math.prod(size) > num_elements:  # or expanded: larger in a model
        raise ValueError(f"a tensor of size {size} in {num_elements} elements")


def check_plain(value: Any) -> None:
    """Checks that `value` is a plain value of bounded size and depth.

    Raises:
        ValueError: it is not.
    """
    rest, num_seen = [(value, 0)], 0
    while rest:
        value, depth = rest.pop()
        num_seen += 1
        if num_seen > MAX_PLAIN or depth > 20:
            raise ValueError("a configuration of too many values")
        if isinstance(value, dict):
            rest += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list | tuple):
            rest += [(item, depth + 1) for item in value]
        elif not isinstance(value, str | int | float | None):
            raise ValueError(f"a configuration with a {type(value).__name__}")
