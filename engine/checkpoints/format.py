"""Reader of weight files that need not be trusted: archives of torch.save, and safetensors.

`torch.load(weights_only=True)` runs no code, but it trusts the tensor sizes that a file states, and creates any object
of its list of types, even a byte array of a terabyte. This reader makes plain values, ordered mappings and dense
tensors of at most the bytes in an uncompressed archive. Other objects become `ForeignObject`, whatever their class.
"""

import io
import json
import math
import pickle
import pickletools
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import safetensors.torch
import torch

MAX_PICKLE = 2**23
"""Bytes of the pickle, without the tensors' data; 5,000 tensors take 0.6 MB, and 200,000 numbers of classes 3 MB."""

MAX_MEMBERS = 30_000
"""Files in the archive, one for each tensor."""

MAX_PLAIN = 10_000
"""Values in the metadata, with references written out: a value that contains itself is refused."""

MAX_CLASSES = 100
"""Classes of objects that a file of another program may hold."""

MAX_STATES = 1_000
"""States that objects are given: of mappings the metadata, and of objects of another program."""

MAX_NUMBERS_AS_KEYS = 1_000
"""Keys of mappings that are numbers of more than 16 bits, which a file can choose so that they collide."""

MEMBER = re.compile(r"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.[a-z_]+|\.data/serialization_id)")

OPERATIONS = re.compile(
    "PROTO|STOP|MARK|EMPTY_(DICT|LIST|TUPLE)|TUPLE[123]?|APPENDS?|SETITEMS?|NONE|NEWTRUE|NEWFALSE|NEWOBJ"
    "|BININT[12]?|LONG1|BINFLOAT|BINUNICODE|GLOBAL|REDUCE|BUILD|BINPERSID|(LONG_)?BIN(PUT|GET)"
)
"""Operations of the pickles that torch writes (protocol 2); none allocates more than the file holds, or reads numbers
from text, which takes time by the square of its length."""

BY_CODE = {ord(x.code): x for x in pickletools.opcodes if OPERATIONS.fullmatch(x.name)}

SMALL_KEYS = re.compile("BINUNICODE|BININT[12]")
NUMBERS_AS_KEYS = re.compile("BININT|LONG1|BINFLOAT|NONE|NEWTRUE|NEWFALSE")
"""Operations whose objects may be keys of a mapping. The hashes of numbers, unlike those of texts, are predictable."""

STORAGES = {
    **{"DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool},
}
"""torch's storage types -> type of an element."""


class ForeignObject:
    """An object in a pickle of another program. Its own class is never looked up.

    Attributes:
        class_name: ``"argparse.Namespace"``. state: the object's state in the pickle.
    """

    class_name = ""
    state: Any = None

    def __init__(self, *arguments: Any):
        if self.class_name != "functools.partial":  # pickled as a call; other objects are made without one
            remedy = "save the weights alone, with torch.save(model.state_dict(), FILE)"
            raise pickle.UnpicklingError(f"a pickle with a call of {self.class_name[:100]}; {remedy}")

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Content(NamedTuple):
    """Content of a file of weights, in main memory.

    Attributes:
        values: the mapping in the file. metadata: the texts in the header of a safetensors file; None: another file.
        class_names: classes of the foreign objects in the file.
    """

    values: Mapping[str, Any]
    metadata: Mapping[str, str] | None = None
    class_names: tuple[str, ...] = ()

    def own(self) -> dict[str, Any]:
        """Returns the values of a file that this project has written. UnpicklingError: it has foreign objects."""
        if self.class_names:
            raise pickle.UnpicklingError(f"a pickle with {self.class_names[0]}"[:100])
        return dict(self.values)


def read_safetensors(content: bytes) -> Content:
    """Reads a file in the safetensors format. Exception: it is damaged."""
    size = int.from_bytes(content[:8], "little")
    if size > MAX_PICKLE:
        raise ValueError(f"a header of more than {MAX_PICKLE} bytes")
    weights = safetensors.torch.load(content)
    return Content(weights, json.loads(content[8 : 8 + size]).get("__metadata__", {}))


def read_archive(content: bytes) -> Content:
    """Reads a file of torch.save; it need not be trusted.

    Raises:
        ValueError, zipfile.BadZipFile, pickle.UnpicklingError and others: no such file, one that claims more bytes than
            it has, bytes that do not match their CRC, or a call of an unknown function.
    """
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise ValueError("neither whole, of torch.save from torch 1.6 on, nor safetensors; save the weights anew")
    members = _read_members(content)
    if members.get("byteorder", sys.byteorder.encode()) != sys.byteorder.encode():
        raise ValueError("tensors in the byte order of another kind of processor")
    _check_operations(members["data.pkl"])
    _Reader(members).load()  # without tensors, on which a pickle could call methods
    reader = _Reader(members, {})
    values = reader.load()
    if not isinstance(values, Mapping):
        raise ValueError(f"holds a {type(values).__name__}")
    return Content(values, class_names=tuple(reader.classes))


def _operations(structure: bytes) -> Iterator[tuple[pickletools.OpcodeInfo, Any]]:
    """Yields the operations of a pickle and their arguments, which are read only where the operation is known."""
    stream = io.BytesIO(structure)
    while code := stream.read(1):
        operation = BY_CODE.get(code[0])
        if operation is None:
            raise ValueError(f"a pickle with the operation {code!r}")
        yield operation, operation.arg.reader(stream) if operation.arg else None
        if operation.name == "STOP":
            return
    raise ValueError("a pickle without an end")


def _check_operations(structure: bytes) -> None:
    """Checks that a pickle takes no more time or memory than its size allows; raises an error of any kind if it does.

    Follows the unpickler's stack, with the name of the operation that makes an object instead of the object.
    """
    stack: list[str] = []
    memo: dict[int, str] = {}
    num_put = num_states = num_numbers = 0
    for operation, argument in _operations(structure):
        name, before = operation.name, operation.stack_before
        if name in ("BINPUT", "LONG_BINPUT"):
            num_put += 1
            if argument > num_put:  # Python allocates a table of that size
                raise ValueError("a pickle that numbers its objects at random")
            memo[argument] = stack[-1]
        taken = []  # the last first
        if pickletools.markobject in before:
            taken, before = list(iter(stack.pop, "MARK")), before[:-2]
        taken += [stack.pop() for _ in before]
        made = memo[argument] if name in ("BINGET", "LONG_BINGET") else name
        stack += [made] * len(operation.stack_after)
        if name in ("SETITEM", "SETITEMS"):
            keys = [key for key in taken[1::2] if not SMALL_KEYS.fullmatch(key)]
            if not all(map(NUMBERS_AS_KEYS.fullmatch, keys)):
                raise ValueError("a mapping with keys that are neither texts nor numbers")
            num_numbers += len(keys)
            if num_numbers > MAX_NUMBERS_AS_KEYS:
                raise ValueError(f"mappings with more than {MAX_NUMBERS_AS_KEYS} large numbers as keys")
        elif name == "BUILD":
            num_states += 1
            if num_states > MAX_STATES:
                raise ValueError(f"a pickle of more than {MAX_STATES} objects with a state")


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
    """Unpickles a structure.

    Args:
        storages: name in the archive -> its storage, filled while reading; None: check tensors, and put None there.
    """

    def __init__(self, members: Mapping[str, bytes], storages: dict[str, torch.UntypedStorage] | None = None):
        super().__init__(io.BytesIO(members["data.pkl"]))
        self.members, self.storages = members, storages
        self.classes: dict[str, type[ForeignObject]] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full == "collections.OrderedDict":
            return partial(self.mapping)  # a new one each time: a pickle can change its attributes
        if full == "torch._utils._rebuild_tensor_v2":
            return partial(self.tensor)
        if full in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
            return partial(self.parameter)
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype  # an option of some optimisers
        if len(self.classes) == MAX_CLASSES and full not in self.classes:
            raise pickle.UnpicklingError(f"a pickle of more than {MAX_CLASSES} classes")
        return self.classes.setdefault(full, type("ForeignObject", (ForeignObject,), {"class_name": full}))

    def persistent_load(self, pid: tuple) -> tuple[str, torch.dtype]:
        """Returns the name and the type of a storage that the archive holds."""
        kind, dtype, key, _, num_elements = pid
        if not isinstance(key, str) or not isinstance(num_elements, int):
            raise ValueError("a tensor whose data has no name or size")
        name = f"data/{key}"
        data = self.members.get(name)
        if kind != "storage" or data is None or len(data) != dtype.itemsize * num_elements:
            raise ValueError(f"a tensor of {num_elements} elements, which the archive does not hold")
        return name, dtype

    @staticmethod
    def mapping() -> OrderedDict[Any, Any]:
        """Returns an empty mapping; called with the items of another one, it would copy them."""
        return OrderedDict()

    @staticmethod
    def parameter(data: torch.Tensor | None, *rest: Any) -> torch.Tensor | None:
        """Returns the tensor of a parameter, without its attributes."""
        if not (data is None or torch.is_tensor(data)):
            raise pickle.UnpicklingError("a parameter that is no tensor")
        return data

    def tensor(self, storage: tuple[str, torch.dtype], offset: int, size: tuple, stride: tuple, *rest: Any) -> Any:
        """Returns a tensor in a storage, or None, see `storages`."""
        if len(size) > 64 or not all(type(x) is int for x in (offset, *size, *stride)):  # 64: as in torch
            raise ValueError("a tensor of a strange size")
        name, dtype = storage
        num_elements = len(self.members[name]) // dtype.itemsize
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        outside = 0 not in size and last >= num_elements
        if min((offset, *size, *stride)) < 0 or outside or math.prod(size) > num_elements:  # or expanded: larger copies
            raise ValueError(f"a tensor of size {size} in {num_elements} elements")
        if self.storages is None:
            return None
        if name not in self.storages:
            self.storages[name] = torch.UntypedStorage.from_buffer(self.members[name], dtype=torch.uint8)
        return torch.empty(0, dtype=dtype).set_(self.storages[name], offset, size, stride)


def check_plain(value: Any) -> None:
    """Checks that `value` is a plain value of bounded size and depth. ValueError: it is not."""
    rest, num_seen = [(value, 0)], 0
    while rest:
        value, depth = rest.pop()
        num_seen += 1
        if num_seen + (len(value) if isinstance(value, dict | list | tuple) else 0) > MAX_PLAIN or depth > 20:
            raise ValueError("a configuration of too many values")
        if isinstance(value, dict):
            rest += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list | tuple):
            rest += [(item, depth + 1) for item in value]
        elif not isinstance(value, str | int | float | None):
            raise ValueError(f"a configuration with a {type(value).__name__}")
