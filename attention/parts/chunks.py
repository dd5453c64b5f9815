"""Chunks of a sequence; causal attention carries its sums from each chunk to the next."""

import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk of a long sequence, a power of two."""


def chunk_size(N: int) -> int:
    """Tokens of a chunk of N tokens: a power of two, at most `CHUNK`."""
    return min(CHUNK, 1 << (int(N) - 1).bit_length())  # torch.jit.trace records sizes as tensors


def num_chunked(N: int) -> int:
    """Number of tokens after N is padded to whole chunks."""
    return N + -N % chunk_size(N)


def pad(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Pads tokens (B, h, N, d) at the end with `value`, up to a multiple of `size`."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size), value=value)


def chunks(x: Tensor, size: int) -> Tensor:
    """(B, h, N, d) -> (B, h, g, size, d)."""
    return x.unflatten(2, (x.shape[2] // size, size))
