"""DPFP: deterministic parameter-free features."""

from functools import partial

import torch

from attention.mechanisms.dpfp import dpfp, projection
from tests.support.cases import Case
from tests.support.comparisons import assert_equal, assert_weights_sum_to_one_or_vanish
from tests.support.inputs import d, identity, tokens
from tests.support.symmetry import ALL

# With rectified features, all weights of a query may be zero, which gives 0; rounding may make one positive.
case = partial(Case, "dpfp", (5, 7), mixes_values=False, well_conditioned=False)

CASES = [case(), case({"nu": 2})]
EFFECTS = {"nu": ({}, 2), "local": ({}, True)}
SYMMETRIES = [(ALL, {})]
REFUSED = [({"nu": 16}, r"attention\(dpfp\).nu = 16: .*; at most 15")]
SYMBOLS = {"nu": 1}
UNSIZED = True

GRID = (6, 4)
Q, K, V = tokens(GRID)


def test_weights_are_not_negative_and_sum_to_one_or_vanish():
    assert_weights_sum_to_one_or_vanish(dpfp(Q, K, identity(24), nu=2))


def test_length_of_queries_and_keys_is_ignored():
    assert_equal(dpfp(3 * Q, 0.7 * K, V, nu=2), dpfp(Q, K, V, nu=2))


def test_dpfp_of_opposite_vectors_is_orthogonal_and_the_last_roll_completes_all_pairs():
    phi, opposite = (projection(x, 2 * d - 1) for x in (Q, -Q))
    assert phi.shape[-1] == 2 * d * (2 * d - 1)
    assert ((phi * opposite).sum(-1) == 0).all()
    r = torch.cat([Q, -Q], -1).relu()
    assert_equal(phi.sum(-1), r.sum(-1) ** 2 - r.square().sum(-1))
