"""Linear attention."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from attention.mechanisms.linear import linear, linear_reference
from attention.parts.features import elu_plus_one
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal, assert_weights_sum_to_one_or_vanish
from tests.support.growth import Growth
from tests.support.inputs import draw, identity, one_head, tokens
from tests.support.symmetry import ALL

case = partial(Case, "linear", (5, 7))

CASES = [case(), case({"local": True}), case(PREFIX), case({"causal": True})]
EFFECTS = {"local": ({}, True), "causal": ({}, True)}
SYMMETRIES = [(ALL, {}), (set(), {"local": True}), (set(), {"causal": True})]
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: {"causal": True})]
REFUSED = [({"eps": 1e-6}, r"attention\(linear\).eps: unknown option; known: causal, local")]
UNSIZED = True

GRID = (6, 4)
Q, K, V = tokens(GRID)


def test_by_hand():
    """phi(x) = elu(x) + 1: x + 1 above zero, exp(x) below. Queries and keys are not scaled."""
    # features of the keys 0, 2, -log 2: 1, 3, 1/2; a query of one channel cancels
    # (6 * 1 + 12 * 3 + 18 / 2) / 4.5 = 51 / 4.5
    q, k, v = one_head(0, 1, -5), one_head(0, 2, -math.log(2)), one_head(6, 12, 18)
    assert_equal(linear(q, k, v), one_head(34 / 3, 34 / 3, 34 / 3))


def test_by_hand_in_two_channels():
    q = one_head((0, 1), (-math.log(2), 2), (3, 0))  # features 1 2, 1/2 3, 4 1
    k = one_head((0, 0), (1, 0), (0, 2))  # features 1 1, 2 1, 1 3
    v = one_head((6, 0), (12, 1), (18, 0))
    # weights of query 0: 3, 4, 7, total 14: (18 + 48 + 126) / 14, 4 / 14
    # of query 1: 3.5, 4, 9.5, total 17: (21 + 48 + 171) / 17, 4 / 17
    # of query 2: 5, 9, 7, total 21: (30 + 108 + 126) / 21, 9 / 21
    assert_equal(linear(q, k, v), one_head((192 / 14, 4 / 14), (240 / 17, 4 / 17), (264 / 21, 9 / 21)))


def test_weights_are_not_negative_and_sum_to_one():
    assert_weights_sum_to_one_or_vanish(linear(Q, K, identity(24)))


def test_linear_attention_of_one_negative_channel_is_softmax_of_the_keys():
    """elu + 1 is exp below zero, and q falls out of exp(q) exp(k)."""
    q, k = -Q[..., :1].abs(), -K[..., :1].abs()
    assert_equal(linear(q, k, V), (k.mT.softmax(-1) @ V).expand_as(V))


def test_features_of_linear_attention_do_not_cancel_in_bfloat16():
    x = torch.tensor([-20.0, -3.0, 0.0, 2.0], dtype=torch.bfloat16)
    torch.testing.assert_close(elu_plus_one(x).double(), F.elu(x.double()) + 1, rtol=2**-8, atol=0)
    assert F.elu(x)[0] + 1 == 0


def test_sums_of_linear_attention_leave_the_range_of_half_precision():
    q, k, v = (30 * draw(1, 1, 4000, 4, seed=seed).half().abs() for seed in range(3))
    assert elu_plus_one(k.double()).sum(-2).max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(linear(q, k, v), linear(q.float(), k.float(), v.float()))


def test_linear_attention_of_a_query_whose_weights_vanish_is_zero():
    for function in (linear, linear_reference):
        assert_equal(function(Q - 60, K, V), torch.zeros_like(V))
