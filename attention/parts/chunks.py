"""A sequence taken apart into chunks, between which causal attention's sums run along."""

import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk of a long sequence, a power of two."""


def chunk_size(N: int) -> int:
    """Tokens of a chunk of N tokens: a power of two, at most `CHUNK`."""
    return min(CHUNK, 1 << (N - 1).bit_length())


def num_chunked(N: int) -> int:
    """N tokens with those that are added for whole chunks."""
    return N + -N % chunk_size(N)


def pad(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Tokens (B, h, N, d) followed by more of this value, up to a multiple of `size`."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size), value=value)


def chunks(x: Tensor, size: int) -> Tensor:
    """(B, h, N, d) -> (B, h, g, size, d)."""
    return x.unflatten(2, (x.shape[2] // size, size))
