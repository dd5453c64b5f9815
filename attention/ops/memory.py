"""Where the fast paths' tensors lie, and how much they work on at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

CACHE = 8 * 2**20
"""Bytes that stay in a CPU's cache while they are worked on: a share of its L3."""

Part = tuple[slice, slice]


def cache_parts(x: Tensor, bytes_of_head: int) -> Iterator[Part]:
    """Slices of images and heads of x (B, h, ...) whose work, `bytes_of_head` for one head of one image, fits `CACHE`.

    Off the CPU, and in compiled graphs, which would repeat the work's operations for each: one part.
    """
    (B, h), pairs = x.shape[:2], max(CACHE // bytes_of_head, 1)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        pairs = max(B * h, 1)
    images, heads = max(pairs // h, 1), min(pairs, h)
    for b in range(0, B, images):
        for i in range(0, h, heads):
            yield slice(b, b + images), slice(i, i + heads)


def take(part: Part, *tensors: Tensor | None) -> list[Tensor | None]:
    """Views of a part of tensors (B, h, ...)."""
    return [None if x is None else x[part] for x in tensors]


def like_tokens(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty (B, h, N, d), of the type of x or `dtype`, that lies in memory as (B, N, h, d): merging the heads copies
    nothing.
    """
    B, h, N, d = x.shape
    return x.new_empty(B, N, h, d, dtype=dtype).transpose(1, 2)
