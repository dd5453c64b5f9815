"""The contract fails safe: empty batches go through everywhere, and grids that do not fit their tokens are refused."""

import re

import pytest
import torch
from torch import Tensor

from attention import ATTENTION, Attention, Grid, create_attention, kernels
from tests.support.facts import CASES

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize("path", ["auto", "lean", "plain"])
@every_case
def test_an_empty_batch_goes_through(case, path):
    attn, x = case.build(), case.tokens(batch=0).requires_grad_()
    for training in (True, False):
        with kernels.use(path):
            y = attn.train(training)(x, case.grid)
            y.sum().backward()
        assert y.shape == x.grad.shape == x.shape
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in attn.parameters())


def assert_refused(attn: Attention, x: Tensor, grid: Grid, expected: int):
    """By the number of tokens that came and the number `expected`."""
    with pytest.raises(ValueError, match=r"tokens") as error:
        attn(x, grid)
    assert {x.shape[1], expected} <= set(map(int, re.findall(r"\d+", str(error.value))))


@every_case
def test_tokens_that_do_not_fit_the_grid_are_refused(case):
    """One row more; one token too many; and those of the grid without the prefix tokens that the layer is built for."""
    attn, x, (H, W) = case.build(), case.tokens(), case.grid
    assert_refused(attn, x, (H + 1, W), case.num_tokens((H + 1, W)))
    assert_refused(attn, torch.cat([x[:, :1], x], 1), (H, W), x.shape[1])
    if case.options.get("num_prefix_tokens"):
        assert_refused(attn, x[:, -H * W :], (H, W), x.shape[1])


@pytest.mark.parametrize("name", ATTENTION)
def test_tokens_of_almost_the_same_number_are_refused(name):
    attn = create_attention(name, dim=8, num_heads=2, grid=(28, 28))
    assert_refused(attn, torch.randn(1, 28 * 28, 8), (27, 29), 27 * 29)
