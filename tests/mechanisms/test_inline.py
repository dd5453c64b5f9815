"""InLine attention."""

from functools import partial

import torch

from attention.mechanisms.inline import inline
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import B, d, draw, h, identity, one_head, tokens
from tests.support.symmetry import ALL

case = partial(Case, "inline", (5, 7))

CASES = [
    case(mixes_values=False),
    case({"local": False}),
    case(PREFIX, mixes_values=False),
    case({**PREFIX, "local": False}),
]
EFFECTS = {"local": ({}, False)}
SYMMETRIES = [(set(), {}), (ALL, {"local": False})]
GROWTH = [
    Growth(1, 1),
    Growth(1, 0, lambda side: {"local": False}),  # centred keys and values are kept instead of keys and values
]
LEARNED = {"filters"}
UNSIZED = True
NO_MATRIX = "channels"  # each has filters of its own


def ours(w):
    names = {"proj.": "proj.", "residual.": "filters."}
    state = {new + key.removeprefix(old): w[key] for old, new in names.items() for key in w if key.startswith(old)}
    return {f"qkv.{part}": torch.cat([w[f"q.{part}"], w[f"kv.{part}"]]) for part in ("weight", "bias")} | state


VISION = {"inline_6x9": ({}, ours)}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)


def test_by_hand():
    """Keys 1, 3 and values 10, 20 have covariance (1 * 5 + 1 * 5) / 2 = 5: y = 15 + 5 q."""
    assert_equal(inline(one_head(0, -2), one_head(1, 3), one_head(10, 20), grid=(1, 2)), one_head(15, 5))
    filters = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    filters[0, 0, 1] = torch.tensor([2.0, 0.0, 3.0])  # twice the token before, thrice the one after
    y = inline(one_head(0, -2), one_head(1, 3), one_head(10, 20), filters, grid=(1, 2))
    assert_equal(y, one_head(15 + 60, 5 + 20))


def test_weights_sum_to_one_and_some_are_negative():
    weights = inline(Q, K, identity(N), grid=GRID)
    assert_equal(weights.sum(-1), torch.ones(B, h, N, dtype=torch.float64))
    assert (weights < 0).any()


def test_the_same_vector_added_to_all_keys_has_no_effect():
    assert_equal(inline(Q, K + draw(B, h, 1, d, seed=7), V, grid=GRID), inline(Q, K, V, grid=GRID))


def test_keys_that_are_all_the_same_give_the_mean():
    assert_equal(inline(Q, 0 * K, V, grid=GRID), V.mean(2, keepdim=True).expand_as(V))


def test_queries_of_different_length_are_told_apart():
    y, twice, mean = (inline(a * Q, K, V, grid=GRID) for a in (1, 2, 0))
    assert (twice - y).abs().max() > 0.1
    assert_equal(twice - mean, 2 * (y - mean))
