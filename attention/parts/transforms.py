"""Transforms of torch.func (grad, vmap, jvp, ...) and forward differentiation, which follow torch's own operators.

They do not follow gradients written by hand, nor torch's fused attention. Nor do second derivatives.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

by_definition = False
"""True on the path "plain" of `attention.kernels`, which sets it: softmax attention has no fused kernel then."""


def in_graph() -> bool:
    """True in compiled, exported and traced graphs, which fuse simple operators, and know no others for any batch."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """True in exported graphs; torch 2.11's own function is true in compiled ones too."""
    return torch.compiler.is_exporting()


def transformed() -> bool:
    """True within a transform of torch.func or forward differentiation; False in compiled and exported graphs.

    `torch.autograd.Function` and `torch.autograd.forward_ad` use the same two checks internally.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def softmax_attention(*args: Any, **kwargs: Any) -> Tensor:
    """torch's `scaled_dot_product_attention`; within a transform, and on the path "plain", by its definition."""
    if torch.compiler.is_compiling() or not (by_definition or transformed()):
        return F.scaled_dot_product_attention(*args, **kwargs)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)
