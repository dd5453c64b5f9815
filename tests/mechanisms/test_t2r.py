"""T2R: learned features."""

import torch

from attention.mechanisms.t2r import t2r
from tests.support.cases import Case
from tests.support.comparisons import assert_equal, assert_weights_sum_to_one_or_vanish
from tests.support.inputs import d, draw, h, identity, tokens
from tests.support.symmetry import ALL

# With rectified features, all weights of a query may be zero, which gives 0; rounding may make one positive.
CASES = [
    Case("t2r", (5, 7), {"num_features": 6, **options}, mixes_values=False, well_conditioned=False)
    for options in ({}, {"causal": True})
]
EFFECTS = {"num_features": ({}, 6), "causal": ({}, True), "local": ({}, True)}
SYMMETRIES = [(ALL, {}), (set(), {"causal": True})]
SYMBOLS = {"m": 32}
LEARNED = {"feature_bias", "feature_weight"}

Q, K, V = tokens((6, 4))
WEIGHT, BIAS = draw(h, 8, d, seed=4), draw(h, 8, seed=5)


def test_weights_are_not_negative_and_sum_to_one_or_vanish():
    assert_weights_sum_to_one_or_vanish(t2r(Q, K, identity(24), WEIGHT, BIAS))


def test_t2r_without_weights_averages_values():
    assert_equal(t2r(Q, K, V, 0 * WEIGHT, BIAS.abs()), V.mean(2, keepdim=True).expand_as(V))


def test_t2r_with_the_identity_is_cosformer_without_distances():
    eye = torch.eye(d, dtype=torch.float64).expand(h, d, d)
    kernel = Q.relu() @ K.relu().mT
    y = t2r(Q, K, V, eye, torch.zeros(h, d, dtype=torch.float64))
    assert_equal(y, kernel @ V / kernel.sum(-1, keepdim=True).clamp(min=1e-6))
