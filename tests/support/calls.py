"""Capture of the call of a mechanism's pure function inside its layer, and a layer's outputs and gradients."""

import sys

import pytest
import torch
from torch import Tensor

from attention import ATTENTION, Attention, kernels
from tests.support.cases import Case
from tests.support.comparisons import FP64, FP64_GRADIENT


def capture_op(case: Case, attn: Attention, x: Tensor, key_mask: Tensor | None = None) -> tuple:
    """Returns (op, positional arguments, keyword arguments) of the call that the mechanism makes for `x`.

    Drops keywords that are None, because twins take no masks; tests of masks remove the masked tokens instead.
    """
    module, name = sys.modules[ATTENTION[case.name].__module__], case.op or case.name
    op, calls = getattr(module, name), []

    def spy(*args, **kwargs):
        calls.append((args, kwargs))
        return op(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, spy)
        attn(x, case.grid) if key_mask is None else attn(x, case.grid, key_mask)
    assert len(calls) == 1
    args, options = calls[0]
    return op, args, {key: value for key, value in options.items() if value is not None}


def value_and_gradients(attn, x: Tensor, grid, amp: bool = False) -> list[Tensor]:
    """Output, gradient of the tokens, gradients of all parameters that have one."""
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        y = attn(x, grid)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype))
    gradients = [x.grad, *(p.grad for p in attn.parameters() if p.grad is not None)]
    attn.zero_grad()
    return [y.detach(), *gradients]


def assert_paths_agree(case: Case, path: str):
    """Asserts that a layer's output and gradients in training equal those of the path "auto"."""
    attn, x = case.build(), case.tokens()
    (y, *gradients) = value_and_gradients(attn, x, case.grid)
    with kernels.use(path):
        (other, *other_gradients) = value_and_gradients(attn, x, case.grid)
    torch.testing.assert_close(other, y, rtol=FP64, atol=FP64)
    for gradient, expected in zip(other_gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)
