"""Mean attention."""

from functools import partial

import torch

from attention.mechanisms.mean import mean
from attention.mechanisms.softmax import softmax
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import every_grid, one_head, tokens
from tests.support.symmetry import ALL

case = partial(Case, "mean", (5, 7))

CASES = [case(), case({"local": True}), case(PREFIX)]
EFFECTS = {"local": ({}, True)}
SYMMETRIES = [(ALL, {}), (set(), {"local": True})]
UNSIZED = True


def test_by_hand():
    """(6 + 12 + 18) / 3 = 12; without the second token, (6 + 18) / 2 = 12; without the third, (6 + 12) / 2 = 9."""
    v = one_head(6, 12, 18)
    assert_equal(mean(v), one_head(12, 12, 12))
    assert_equal(mean(v, key_mask=torch.tensor([[True, False, True]])), one_head(12, 12, 12))
    assert_equal(mean(v, key_mask=torch.tensor([[True, True, False]])), one_head(9, 9, 9))


@every_grid
def test_it_is_softmax_with_keys_of_zero(grid):
    q, k, v = tokens(grid)
    assert_equal(mean(v), softmax(q, 0 * k, v))
