"""ABC: attention with bounded memory."""

import torch

from attention.mechanisms.abc import abc
from attention.mechanisms.softmax import softmax
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import B, draw, every_grid, h, tokens
from tests.support.symmetry import ALL

CASES = [Case("abc", (5, 7), {"num_landmarks": 6})]
EFFECTS = {"num_landmarks": ({}, 6), "attn_drop": ({}, 0.5)}
SYMMETRIES = [(ALL, {"num_landmarks": 6})]
GROWTH = [Growth(1, 1)]
SYMBOLS = {"c": 49}
LEARNED = {"control"}


@every_grid
def test_abc_limits(grid):
    q, k, v = tokens(grid)
    N = grid[0] * grid[1]
    each = torch.zeros(N, N, dtype=torch.float64).fill_diagonal_(1e3).expand(B, h, N, N)
    assert_equal(abc(q, k, v, each), softmax(q, k, v))  # every token has a slot of its own
    constant = draw(B, h, 1, 5).expand(B, h, N, 5)  # every slot holds the mean
    assert_equal(abc(q, k, v, constant), v.mean(2, keepdim=True).expand_as(v))
