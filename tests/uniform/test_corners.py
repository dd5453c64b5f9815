"""Corner cases of a layer's input, on every path: no images, one channel, one summary token, windows beyond the grid.
tests/ops/test_triton.py tests the widest heads of kernels.
"""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attention import ATTENTION, kernels
from tests.support.calls import capture_op, value_and_gradients
from tests.support.comparisons import FP64, FP64_GRADIENT
from tests.support.facts import FACTS

CORNERS: dict[str, tuple[tuple[int, int], dict[str, Any], dict[str, Any]]] = {  # grid, options, layer context
    "no images": ((5, 7), {}, {}),
    "one channel": ((5, 7), {}, {"dim": 1, "num_heads": 1}),
    "one summary token": ((5, 7), {"num_landmarks": 1}, {}),
    "window beyond a side": ((3, 5), {"window_size": 4}, {}),
    "window beyond both": ((3, 5), {"window_size": 7}, {"grid": (8, 9)}),
}


def corners() -> Iterator[Any]:
    """For every mechanism, the corners that its options allow, applied to its ordinary case."""
    for name, attention in ATTENTION.items():
        ordinary, known = FACTS[name].CASES[0], {field.name for field in dataclasses.fields(attention.Config)}
        for corner, (grid, options, context) in CORNERS.items():
            if options.keys() <= known:
                case = dataclasses.replace(ordinary, grid=grid, options=ordinary.options | options)
                yield pytest.param(case, context, int(corner != "no images"), id=f"{name}, {corner}")


@pytest.mark.parametrize(("case", "context", "batch"), list(corners()))
def test_corners_are_right_on_every_path(case, context, batch):
    attn, x, results = case.build(**context).eval(), case.tokens()[:batch, :, : context.get("dim")], []
    for path in ("plain", "auto"):
        with kernels.use(path):
            results.append(value_and_gradients(attn, x, case.grid))
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)
    assert results[0][0].shape == x.shape
    if not batch:
        return
    op, arguments, options = capture_op(case, attn, x)
    twin = getattr(sys.modules[op.__module__], f"{op.__name__}_reference")
    torch.testing.assert_close(op(*arguments, **options), twin(*arguments, **options), rtol=FP64, atol=FP64)
