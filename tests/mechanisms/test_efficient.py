"""Efficient attention."""

import math
from functools import partial

import torch

from attention.mechanisms.efficient import efficient
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import B, draw, h, identity, one_head, tokens
from tests.support.symmetry import ALL

case = partial(Case, "efficient", (5, 7))

CASES = [case(), case({"local": True}), case(PREFIX), case({**PREFIX, "local": True})]
EFFECTS = {"local": ({}, True)}
SYMMETRIES = [(ALL, {}), (set(), {"local": True})]
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: {"local": True})]
UNSIZED = True
VISION = {
    "efficient_6x9": (
        {},
        lambda w: {
            "qkv.weight": torch.cat([w[f"{part}.weight"] for part in ("queries", "keys", "values")])[..., 0, 0],
            "qkv.bias": torch.cat([w[f"{part}.bias"] for part in ("queries", "keys", "values")]),
            "proj.weight": w["reprojection.weight"][..., 0, 0],
            "proj.bias": w["reprojection.bias"],
        },
    )
}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)


def test_by_hand():
    """One channel has weight 1 for every query, and keys 0, log 2, log 5 have weights 1/8, 2/8, 5/8."""
    k, v = one_head(0, math.log(2), math.log(5)), one_head(8, 16, 24)
    assert_equal(efficient(one_head(3, -1, 0), k, v), one_head(20, 20, 20))
    # two channels: pools of 20 and, by keys 0, 0, log 2, of (8 + 16 + 48) / 4 = 18; a query mixes them by 1/3 and 2/3
    k = one_head((0, 0), (math.log(2), 0), (math.log(5), math.log(2)))
    q = one_head((0, math.log(2)), (1, 1), (math.log(3), 0))
    y = efficient(q, k, torch.cat([v, -v], -1))[..., 0]
    assert_equal(y[0, 0], torch.tensor([20 / 3 + 12, 19, 15 + 4.5], dtype=torch.float64))


def test_weights_are_positive_sum_to_one_and_have_the_rank_of_a_head():
    weights = efficient(Q, K, identity(N))
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, h, N, dtype=torch.float64), rtol=1e-14, atol=0)
    assert (torch.linalg.matrix_rank(weights) == Q.shape[-1]).all()


def test_a_number_added_to_a_query_or_to_a_channel_of_all_keys_has_no_effect():
    of_query, of_channel = draw(B, h, N, 1, seed=7), draw(B, h, 1, Q.shape[-1], seed=8)
    assert_equal(efficient(Q + of_query, K + of_channel, V), efficient(Q, K, V))


def test_large_keys_pick_one_token_per_channel():
    picked = V.gather(2, K.argmax(2)[..., None].expand(-1, -1, -1, V.shape[-1]))
    assert_equal(efficient(Q, 1e5 * K, V), Q.softmax(-1) @ picked)
