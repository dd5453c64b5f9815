"""What a checkpoint file may contain, checked before torch reads it, because the file need not be trusted.

`torch.load(weights_only=True)` runs no code, but it trusts the tensor sizes that a file states, and creates any object
of its list of types, a byte array of a terabyte among them. A checkpoint of this project is an uncompressed archive of
plain values, ordered mappings and dense tensors; everything else is refused here.
"""

import io
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from typing import Any

import torch

MAX_PICKLE = 2**21
"""Bytes of the pickle, without the tensors' data; that of 5,000 tensors has 0.6 MB."""

MAX_PLAIN = 10_000
"""Values in the metadata, with references written out: a value that contains itself would have no end."""

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


def read_archive(content: bytes) -> dict[str, Any]:
    """The checkpoint in the bytes of a file, in main memory, after `validate_pickle`, whose errors it raises."""
    validate_pickle(content)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def validate_pickle(content: bytes) -> None:
    """Checks the archive and the pickle of a checkpoint file without creating a tensor.

    Raises:
        ValueError, pickle.UnpicklingError, zipfile.BadZipFile and others: the file holds anything that
            `save_checkpoint` does not write, or claims more bytes than it has.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if strange := [name for name in names if not MEMBER.fullmatch(name)]:
            raise ValueError(f"an archive with {strange[0][:40]!r}")
        if len(set(names)) < len(names) or sum(member.file_size for member in members) > len(content):
            raise ValueError("an archive that claims more than it holds")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("a compressed archive")
        sizes = {name.partition("/")[2]: member.file_size for name, member in zip(names, members, strict=True)}
        if sizes.get("data.pkl", MAX_PICKLE + 1) > MAX_PICKLE:
            raise ValueError(f"no structure of at most {MAX_PICKLE} bytes")
        structure = archive.read(next(name for name in names if name.endswith("/data.pkl")))

    num_put = 0
    for operation, argument, _ in pickletools.genops(structure):
        if not OPERATIONS.fullmatch(operation.name):
            raise ValueError(f"a pickle with {operation.name}")
        if operation.name in ("BINPUT", "LONG_BINPUT"):
            num_put += 1
            if argument > num_put:  # Python allocates a table of that size
                raise ValueError("a pickle that numbers its objects at random")
    _Reader(structure, sizes).load()


class _Reader(pickle.Unpickler):
    """Unpickles plain values, with None for every tensor."""

    def __init__(self, structure: bytes, sizes: dict[str, int]):
        super().__init__(io.BytesIO(structure))
        self.sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _check_tensor
        if module == "torch" and name in ITEM_SIZE:
            return ITEM_SIZE[name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype  # an option of some optimisers
        raise pickle.UnpicklingError(f"a pickle with {module}.{name}"[:100])

    def persistent_load(self, pid: tuple) -> int:
        """The number of elements of a storage."""
        kind, item_size, key, _, num_elements = pid
        if kind != "storage" or self.sizes.get(f"data/{key}") != item_size * num_elements:
            raise ValueError(f"a tensor of {num_elements} elements, which the archive does not hold")
        return num_elements


def _check_tensor(num_elements: int, offset: int, size: tuple, stride: tuple, *rest: Any) -> None:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (0 not in size and last >= num_elements):
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
