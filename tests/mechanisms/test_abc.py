"""ABC: attention with bounded memory."""

import torch

from attention.mechanisms.abc import abc
from attention.mechanisms.softmax import softmax
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, draw, every_grid, h, tokens
from tests.support.symmetry import ALL

SMALL, CAUSAL = {"num_landmarks": 6}, {"causal": True}
CASES = [Case("abc", (5, 7), SMALL), Case("abc", (5, 7), {**SMALL, **CAUSAL})]
EFFECTS = {"num_landmarks": ({}, 6), "attn_drop": ({}, 0.5), "causal": ({}, True), "local": ({}, True)}
SYMMETRIES = [(ALL, SMALL), (set(), {**SMALL, **CAUSAL})]
SYMBOLS = {"c": 49}
LEARNED = {"control"}


@every_grid
def test_abc_limits(grid):
    q, k, v = tokens(grid)
    N = grid[0] * grid[1]
    each = torch.zeros(N, N, dtype=torch.float64).fill_diagonal_(1e3).expand(B, h, N, N)
    assert_equal(abc(q, k, v, each), softmax(q, k, v))  # one slot per token
    constant = draw(B, h, 1, 5).expand(B, h, N, 5)  # every slot holds the mean
    assert_equal(abc(q, k, v, constant), v.mean(2, keepdim=True).expand_as(v))
    # in causal attention, the mean of the tokens so far
    counts = torch.arange(1, N + 1, dtype=torch.float64)[:, None]
    assert_equal(abc(q, k, v, constant, causal=True), v.cumsum(2) / counts)


def test_a_slot_that_is_written_once_holds_that_token_from_then_on():
    """A control that grows without bound overwrites all earlier tokens: each query reads its own token alone."""
    q, k, v = tokens((6, 4))
    control = 1e3 * torch.arange(24, dtype=torch.float64)[:, None].expand(B, h, 24, 5)
    assert_equal(abc(q, k, v, control, causal=True), v)
    assert_equal(abc(q, k, v, -control, causal=True), v[:, :, :1].expand_as(v))
