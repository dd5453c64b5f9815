"""Products of matrices whose sums are in float32 at least, for fast paths of exponentials and random features."""

import torch
from torch import Tensor

from ..parts.features import compute_dtype
from . import memory


def factor_dtype(x: Tensor) -> torch.dtype:
    """Type of the factors of products of tokens like x: float32 at least, and on CUDA bfloat16 for bfloat16.

    There, logits, log masses and sums stay in float32, and samples, weights and gradients are rounded to the type that
    queries, keys and values have, as in fused softmax attention. Compiled graphs multiply in float32.
    """
    on_cuda = x.device.type in ("cuda", "cpu") and not memory.on_cpu(x)  # a CPU stands for CUDA in counts and tests
    in_half = x.dtype == torch.bfloat16 and on_cuda and not torch.compiler.is_compiling()
    return x.dtype if in_half else compute_dtype(x)


def full_product(
    a: Tensor, b: Tensor, offset: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """alpha a @ b + beta offset of matrices (n, ...) of `factor_dtype`, in float32 at least."""
    if a.dtype == compute_dtype(a):
        if offset is None:
            return scaled(a, b, alpha) if alpha != 1 else torch.bmm(a, b)
        return torch.baddbmm(offset, a, b, beta=beta, alpha=alpha)
    y = sum_in_full(a, b)
    if offset is None:
        return y.mul_(alpha) if alpha != 1 else y
    return torch.add(offset * beta if beta != 1 else offset, y, alpha=alpha, out=y)


def sum_in_full(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of matrices (n, ...) of bfloat16, in float32: an operator of CUDA alone."""
    return torch.bmm(a, b, out_dtype=compute_dtype(a))


def scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale a @ b of matrices (n, ...), in their type."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)
