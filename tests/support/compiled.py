"""Kernels compiled ahead of time for absent GPUs, and the resources that they use."""

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.ops.triton_tokens import launch_options

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", int: "i32", float: "fp32"}


class Resources(NamedTuple):
    """Registers of a thread, bytes of a thread that spill to memory, bytes that a block shares."""

    registers: int
    spilled: int
    shared: int


def compiler(capability: int, found: dict[str, list[Resources]]) -> Callable[..., None]:
    """A replacement of `triton_tokens.launch` that compiles kernels for a GPU and adds what each uses to `found`.

    As at a launch, the compiler learns which pointers and numbers are multiples of 16.
    """

    def compile_only(kernel, programs: tuple[int, ...], *arguments: Any) -> None:
        types, constants, hints = {}, {}, {}
        for i, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=True)):
            types[name] = described(argument, (i,), constants, hints)
        source, options = ASTSource(kernel, types, constants, hints), launch_options(arguments[-1])
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
            triton.knobs.nvidia.dump_ptxas_log = True
            binary = triton.compile(source, GPUTarget("cuda", capability, 32), options)
        numbers = (sum(map(int, re.findall(rf"(\d+) {what}", log.getvalue()))) for what in ("reg", "bytes spill"))
        found.setdefault(kernel.__name__, []).append(Resources(*numbers, binary.metadata.shared))

    return compile_only


def described(argument: Any, path: tuple[int, ...], constants: dict, hints: dict) -> Any:
    """The type of a kernel's argument, in Triton's notation."""
    if isinstance(argument, tuple) and not hasattr(argument, "num_stages"):
        return tuple(described(x, (*path, i), constants, hints) for i, x in enumerate(argument))
    number, kind = argument, type(argument)
    if isinstance(argument, torch.Tensor):
        number, kind = argument.data_ptr(), argument.dtype
    if kind not in TYPES or number == 1:
        constants[path] = argument
        return "constexpr"
    if number % 16 == 0:
        hints[path] = [["tt.divisibility", 16]]
    return TYPES[kind]
