"""Tiles of tokens: building blocks of the Triton kernels of this folder.

Tokens are passed as tuples x = (pointer, strides of B, h and N), see `view`. S, a kernel's compile-time sizes, has the
head width d, its power of two block_d, and num_stages, the stages of loads.

Comments beside products give the shapes of blocks: q queries, k keys, c landmarks or samples, n tokens, d channels
(block_d).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import memory

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PROGRAMS = 1024
"""Number of programs that share sums over images: a few for every multiprocessor."""


@triton.jit
def cast(x, dtype: tl.constexpr):
    """`x` in `dtype`, rounded to nearest. Triton's interpreter truncates bf16, hence half a unit is added first."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b):
    """a @ b summed in fp32. Triton's interpreter holds bf16 as integers, which must not be multiplied."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")  # (rows, inner) @ (inner, columns)


@triton.jit
def dot_exactly(a, b):
    """a @ b of fp32 a without rounding a: if b is of a half type, a is the sum of two numbers of that type."""
    high = cast(a, b.dtype)
    product = dot(high, b)  # (rows, inner) @ (inner, columns)
    if b.dtype != tl.float32:
        product += dot(cast(a - high.to(tl.float32), b.dtype), b)  # the same shapes
    return product


@triton.jit
def tile(x, h, index, valid, S: tl.constexpr):
    """Pointers and mask of tokens `index` of the program's image and head: (t, block_d)."""
    batch, head, column = tl.program_id(0) // h, tl.program_id(0) % h, tl.arange(0, S.block_d)
    start = x[0] + batch.to(tl.int64) * x[1] + head.to(tl.int64) * x[2]
    return start + index[:, None].to(tl.int64) * x[3] + column, valid[:, None] & (column < S.d)


@triton.jit
def load(x, h, index, valid, dtype, S: tl.constexpr):
    pointers, mask = tile(x, h, index, valid, S)
    return cast(tl.load(pointers, mask, other=0.0), dtype)


@triton.jit
def store(x, h, index, valid, value, S: tl.constexpr):
    pointers, mask = tile(x, h, index, valid, S)
    tl.store(pointers, cast(value, x[0].dtype.element_ty), mask)


def view(x: Tensor | None) -> tuple[Tensor, int, int, int] | None:
    """Kernel argument for tokens (..., B, h, N, d): pointer, strides of B, h and N."""
    return None if x is None else (x, *x.stride()[-4:-1])


def dense(x: Tensor | None) -> Tensor | None:
    """`x` with contiguous channels."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def supported(*tokens: Tensor) -> bool:
    """Returns whether kernels take q, k, v of these shapes and places: at most 64 channels per head, on a GPU."""
    return all(x.shape[-1] <= 64 and len(x) and (memory.on_gpu(x) or INTERPRETED.value) for x in tokens)


def block_length(length: int, most: int) -> int:
    """The least power of two that `tl.dot` takes and that covers `length`, but at most `most`."""
    return min(max(triton.next_power_of_2(length), 16), most)


def launch_options(S: Any) -> dict[str, Any]:
    """Compile options of a kernel other than its sizes. Tiles of 64 rows take four warps."""
    return {"num_warps": 4, "num_stages": S.num_stages, "enable_fp_fusion": True}


def launch(kernel, programs: tuple[int, ...], *arguments) -> None:
    first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
    with torch.cuda.device_of(first):  # Triton launches on the current device
        kernel[programs](*arguments, **launch_options(arguments[-1]))
