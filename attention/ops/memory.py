"""Memory: the layout of tensors of the fast paths, and the chunks that they work on."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..parts.geometry import Windows

CACHE = 8 * 2**20
"""Bytes of a chunk that stay in a CPU's cache while it is processed: a share of the L3 cache."""

WORDS = torch.complex128, torch.int64, torch.int32
"""Types that `copy` moves several numbers as, the widest first."""

Chunk = tuple[slice, slice]


def on_cpu(x: Tensor) -> bool:
    """True if fast paths should suit a CPU. Tests replace this function to count operators as on another device."""
    return x.device.type == "cpu"


def on_gpu(x: Tensor) -> bool:
    """True if Triton's kernels can run on the tensor's device. Tests and counts replace this function."""
    return x.is_cuda


def cache_chunks(x: Tensor, bytes_of_head: int) -> Iterator[Chunk]:
    """Slices of images and heads of x (B, h, ...), each as large as `CACHE` allows at `bytes_of_head` per head of an
    image.

    There is one chunk on other devices than CPUs, and in compiled graphs, which would repeat the operations per chunk.
    """
    (B, h), pairs = x.shape[:2], max(CACHE // bytes_of_head, 1)
    if not on_cpu(x) or torch.compiler.is_compiling():
        pairs = max(B * h, 1)
    images, heads = max(pairs // h, 1), min(pairs, h)
    for b in range(0, B, images):
        for i in range(0, h, heads):
            yield slice(b, b + images), slice(i, i + heads)


def take(chunk: Chunk, *tensors: Tensor | None) -> list[Tensor | None]:
    """Views of one chunk of tensors (B, h, ...)."""
    return [None if x is None else x[chunk] for x in tensors]


def like_tokens(x: Tensor) -> Tensor:
    """Returns an empty tensor (B, h, N, d), laid out in memory as (B, N, h, d): merging the heads copies nothing."""
    B, h, N, d = x.shape
    return x.new_empty(B, N, h, d).transpose(1, 2)


def copy(target: Tensor, x: Tensor) -> Tensor:
    """`target.copy_(x)`, for values without gradients. A GPU moves them in words of up to 16 bytes.

    Between two memory layouts a GPU computes an address for every element. With elements of two bytes it reaches a
    quarter of its bandwidth, with 16 almost all of it (docs/speed.md).
    """
    if target.dtype == x.dtype and not (on_cpu(x) or torch.compiler.is_compiling()) and (word := _word(target, x)):
        target.view(word).copy_(x.view(word))
        return target
    return target.copy_(x)


def _word(*tensors: Tensor) -> torch.dtype | None:
    """The longest of `WORDS` that views of all tensors, of one type, can have; None if there is none.

    Apple's GPUs have no numbers of 16 bytes.
    """
    if any(x.stride(-1) != 1 for x in tensors):
        return None
    starts = (n for x in tensors for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    nbytes = math.gcd(*starts) * tensors[0].element_size()
    words = WORDS[1:] if tensors[0].device.type == "mps" else WORDS
    return next((word for word in words if nbytes % word.itemsize == 0), None)


def contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of x in `dtype`, for values without gradients; never returns x itself."""
    if on_cpu(x) or torch.compiler.is_compiling():
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return copy(torch.empty(x.shape, dtype=x.dtype, device=x.device), x).to(dtype)


def partition(x: Tensor, windows: Windows, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Copies tokens (B, h, N, d) to windows (B h g, w, d) of `dtype`, into `out` if given; never returns a view."""
    tokens = windows.view(x)
    copied = contiguous(tokens, dtype) if out is None else copy(out.view(tokens.shape), tokens)
    return copied.flatten(4, 5).flatten(0, 3)


def tiles_to_tokens(y: Tensor, tiles: Windows, like: Tensor) -> Tensor:
    """Windows (B h g, w, d) that divide the grid -> tokens (B, h, N, d) in the type of `like` and the memory layout of
    `like_tokens`.
    """
    (B, h, N, d), (H, W), (rows, columns) = like.shape, tiles.grid, tiles.size
    y = y if on_cpu(y) else y.to(like.dtype)  # so that words can be copied
    tokens = y.view(B, h, H // rows, W // columns, rows, columns, d).permute(0, 2, 4, 3, 5, 1, 6)
    return contiguous(tokens, like.dtype).view(B, N, h, d).transpose(1, 2)


def tile_products(x: Tensor, y: Tensor, tiles: Windows, like: Tensor) -> Tensor:
    """`tiles_to_tokens` of x * y, each (B h g, w or 1, d or 1), on a CPU without a copy of the product."""
    tokens = like_tokens(like)
    target = tiles.view(tokens)

    def of_windows(each: Tensor) -> Tensor:
        return each.unflatten(1, tiles.size if each.shape[1] > 1 else (1, 1)).unflatten(0, target.shape[:4])

    x, y = of_windows(x), of_windows(y)
    if on_cpu(like) and not torch.compiler.is_compiling():  # compilers refuse an `out` that is not contiguous
        torch.mul(x, y, out=target)
    else:
        copy(target, (x * y).to(target.dtype))
    return tokens


def reverse(y: Tensor, x: Tensor, windows: Windows) -> Tensor:
    """Writes windows y (B h g, w, d) to tokens x (B, h, N, d) and returns them: the inverse of `partition`."""
    (B, h), (H, W), (rows, columns) = x.shape[:2], windows.grid, windows.size
    down, across = -(-H // rows), -(-W // columns)
    tokens = y.unflatten(1, windows.size).unflatten(0, (B, h, down, across)).transpose(3, 4)
    if H % rows or W % columns:
        copy(x.unflatten(2, windows.grid), tokens.flatten(4, 5).flatten(2, 3)[:, :, :H, :W])
    else:
        copy(x.unflatten(2, (down, rows, across, columns)), tokens)
    return x
