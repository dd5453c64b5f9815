"""What a checkpoint file may contain, checked before torch reads it, because the file need not be trusted.

`torch.load(weights_only=True)` runs no code, but it trusts the tensor sizes that a file states, and creates any object
of its list of types, a byte array of a terabyte among them. A checkpoint of this project is an uncompressed archive of
plain values, ordered mappings and dense tensors; everything else is refused here.
"""

import io
import json
import math
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Set
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from models.convert import is_released

MAX_PICKLE = 2**21
"""Bytes of the pickle, without the tensors' data; that of 5,000 tensors has 0.6 MB."""

MAX_MEMBERS = 30_000
"""Files in the archive, one for each tensor."""

MAX_PLAIN = 10_000
"""Values in the metadata, with references written out: a value that contains itself would have no end."""

MAX_CLASSES = 100
"""Kinds of objects that a file of another program may hold."""

MEMBER = re.compile(r"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.[a-z_]+|\.data/serialization_id)")

OPERATIONS = re.compile(
    "PROTO|STOP|MARK|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?|NONE|NEWTRUE|NEWFALSE|BININT[12]?|LONG1"
    "|BINFLOAT|BINUNICODE|GLOBAL|REDUCE|BUILD|BINPERSID|(LONG_)?BIN(PUT|GET)"
)
"""Operations of the pickles that torch writes (protocol 2); none allocates more than the file holds."""

ITEM_SIZE = {
    f"{name}Storage": size
    for size, names in {8: "Double Long", 4: "Float Int", 2: "Half BFloat16 Short", 1: "Char Byte Bool"}.items()
    for name in names.split()
}
"""torch's storage types -> bytes of an element."""


LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of torch.save begin that are no archives, from before torch 1.6."""


class ForeignFile(Exception):
    """A file that is no checkpoint of this project. The message says what it seems to be."""


class ReleasedFile(ForeignFile):
    """A file with weights of the released code of EVA and LARA."""


class Record:
    """An object in a file of another program: the name of its class, and its state. The class itself is never built.

    Attributes:
        kind: ``"argparse.Namespace"``. state: what the file has for it.
    """

    kind = ""
    state: Any = None

    def __init__(self, *arguments: Any):
        if self.kind != "functools.partial":  # which pickles itself as a call; an object is made without one
            raise pickle.UnpicklingError(f"a pickle with a call of {self.kind}"[:100])

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_archive(content: bytes, foreign: bool = False) -> dict[str, Any]:
    """The checkpoint in the archive `content`, as torch.save writes it, in main memory; the file need not be trusted.

    torch reads a copy, which is made here of what has been checked: that another reader may find other members in the
    same file, or other sizes, makes no difference.

    Args:
        foreign: accept files of other programs too; their objects are `Record`.
    Raises:
        ForeignFile: a file of another program. ValueError, pickle.UnpicklingError, zipfile.BadZipFile and
            others: the file holds anything that `save_checkpoint` does not write, claims more bytes than it has, or has
            bytes that do not match their CRC.
    """
    if content.startswith(LEGACY):
        raise ForeignFile("a file of torch.save before torch 1.6")
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise ValueError("neither a whole file of torch.save nor in the safetensors format")
    members = _read_members(content)
    records = _check_pickle(members["data.pkl"], {name: len(data) for name, data in members.items()}, foreign)
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    del members
    copy.seek(0)
    with torch.serialization.safe_globals([(record, record.kind) for record in records]):
        return torch.load(copy, map_location="cpu", weights_only=True)


def read_foreign(content: bytes) -> dict[str, Any]:
    """What is in a file of another program, in the safetensors format or as torch.save writes it.

    Raises:
        Exception: the file is damaged, or holds what need not be trusted.
    """
    return safetensors.torch.load(content) if content[8:9] == b"{" else read_archive(content, foreign=True)


def read_safetensors(content: bytes) -> tuple[dict[str, Tensor], str]:
    """The weights in a file of the safetensors format, and the metadata that `engine.export` gave them.

    Raises:
        ForeignFile: without such metadata. Others: the file is damaged.
    """
    size = int.from_bytes(content[:8], "little")
    if size > MAX_PICKLE:
        raise ValueError(f"a header of more than {MAX_PICKLE} bytes")
    weights = safetensors.torch.load(content)
    header = json.loads(content[8 : 8 + size])
    if "run" not in header.get("__metadata__", {}):
        kind = ReleasedFile if is_released(weights) else ForeignFile
        raise kind("weights in the safetensors format")
    return weights, header["__metadata__"]["run"]


def _read_members(content: bytes) -> dict[str, bytes]:
    """Name in the archive -> bytes, which have been checked against their CRC."""
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


def _check_pickle(structure: bytes, sizes: Mapping[str, int], foreign: bool) -> list[type[Record]]:
    """Checks the pickle of an archive with members of these `sizes`, without creating a tensor; the kinds of records
    in it.
    """
    num_put, problem = 0, ""
    names: set[str] = set()
    for operation, argument, _ in pickletools.genops(structure):
        if not OPERATIONS.fullmatch(operation.name) and not (foreign and operation.name == "NEWOBJ"):
            problem = f"a pickle with {operation.name}"
        if operation.name in ("BINPUT", "LONG_BINPUT"):
            num_put += 1
            if not isinstance(argument, int) or argument > num_put:  # Python allocates a table of that size
                problem = "a pickle that numbers its objects at random"
        if operation.name == "BINUNICODE":
            names.add(str(argument))
    if not foreign:
        _refuse_foreign(names)
    if problem:
        raise ValueError(problem)
    reader = _Reader(structure, sizes, foreign)
    reader.load()
    return list(reader.records.values())


def _refuse_foreign(names: Set[str]) -> None:
    """Raises ForeignFile for a file that another program wrote, by the `names` in it."""
    if {"config", "progress"} <= names:
        return
    if is_released(names):
        raise ReleasedFile("weights of the released code of EVA and LARA")
    if {"arch", "state_dict"} <= names:
        raise ForeignFile("a checkpoint of timm's train.py")
    if names & {"state_dict", "model"}:
        raise ForeignFile("a checkpoint of another training script")
    if any(name.endswith(("weight", "bias")) for name in names):
        raise ForeignFile("a state dict, weights alone")


class _Reader(pickle.Unpickler):
    """Unpickles plain values, with None for every tensor."""

    def __init__(self, structure: bytes, sizes: Mapping[str, int], foreign: bool):
        super().__init__(io.BytesIO(structure))
        self.sizes, self.foreign = sizes, foreign
        self.records: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _check_tensor
        if module == "torch" and name in ITEM_SIZE:
            return ITEM_SIZE[name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype  # an option of some optimisers
        if self.foreign and len(self.records) < MAX_CLASSES:
            kind = f"{module}.{name}"
            return self.records.setdefault(kind, type("Record", (Record,), {"kind": kind}))
        raise pickle.UnpicklingError(f"a pickle with {module}.{name}"[:100])

    def persistent_load(self, pid: tuple) -> int:
        """The number of elements of a storage."""
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
    """Checks that `value` is a plain value of bounded size and depth, as metadata is.

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
