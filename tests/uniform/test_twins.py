"""Every op equals its literal twin, in value and in all gradients, and its gradients are slopes."""

import sys

import pytest
import torch
from torch import Tensor

from tests.support.calls import capture_op
from tests.support.comparisons import FP64, FP64_GRADIENT
from tests.support.facts import CASES, ORDINARY
from tests.support.partition import chosen


def leaves(args: tuple) -> list:
    """Copies of arguments as leaves; floating-point tensors require gradients."""
    return [a.detach().clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


MODES = [
    pytest.param(case, training, id=f"{case}-{'train' if training else 'eval'}")
    for case in CASES
    for training in (True, False)
]


@pytest.mark.parametrize(
    ("case", "training"), chosen(MODES, lambda case, training: training or case.two_modes or case in ORDINARY)
)
def test_op_equals_its_literal_twin_in_value_and_all_gradients(case, training):
    op, args, options = capture_op(case, case.build().train(training), case.tokens())
    twin = getattr(sys.modules[op.__module__], f"{op.__name__}_reference")
    results = []
    for function in (op, twin):
        inputs = leaves(args)
        y = function(*inputs, **options)
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
        (y * probe).sum().backward()
        results.append((y, [x.grad for x in inputs if isinstance(x, Tensor) and x.requires_grad]))
    (y, gradients), (y_twin, gradients_twin) = results
    torch.testing.assert_close(y, y_twin, rtol=FP64, atol=FP64)
    for gradient, expected in zip(gradients, gradients_twin, strict=True):
        gradient, expected = (torch.zeros(()) if g is None else g for g in (gradient, expected))
        torch.testing.assert_close(
            *torch.broadcast_tensors(gradient.double(), expected.double()), rtol=FP64_GRADIENT, atol=FP64_GRADIENT
        )


@pytest.mark.parametrize(
    "case", chosen((case for case in CASES if case.gradients_are_slopes), lambda case: case in ORDINARY), ids=str
)
def test_gradients_are_slopes(case):
    """Compares gradients with finite differences along random directions, with the training noise held fixed."""
    attn, x = case.build(), case.tokens(batch=1).requires_grad_()
    names, parameters = zip(*attn.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(3)
        return torch.func.functional_call(attn, dict(zip(names, parameters, strict=True)), (x, case.grid))

    torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)
