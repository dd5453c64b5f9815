"""RFA: random features of unit queries and keys."""

import torch
import torch.nn.functional as F

from attention.mechanisms.performer import performer
from attention.mechanisms.rfa import rfa
from tests.support.cases import Case
from tests.support.comparisons import assert_equal, assert_mean
from tests.support.inputs import d, draw, h, tokens
from tests.support.symmetry import ALL

CASES = [
    Case("rfa", (5, 7), {"num_samples": 10, **options}, stochastic=True, well_conditioned=False)
    for options in ({}, {"causal": True})
]
EFFECTS = {"num_samples": ({}, 10), "causal": ({}, True), "local": ({}, True)}
SYMMETRIES = [(ALL, {}), (set(), {"causal": True})]
SYMBOLS = {"s": 64}
LEARNED = {"log_sigma"}

Q, K, V = tokens((6, 4))
OMEGA, SIGMA = draw(h, 40, d, seed=6), torch.tensor([0.8, 1.3], dtype=torch.float64)


def test_length_of_queries_and_keys_is_ignored():
    assert_equal(rfa(3 * Q, 0.7 * K, V, OMEGA, SIGMA), rfa(Q, K, V, OMEGA, SIGMA))


def test_rfa_is_performer_of_unit_queries_and_keys():
    q, k = (F.normalize(x, dim=-1) * d**0.25 / SIGMA[:, None, None] for x in (Q, K))
    assert_equal(rfa(Q, K, V, OMEGA, SIGMA), performer(q, k, V, OMEGA, features="trigonometric"))


def test_rfa_of_a_wide_kernel_averages_values():
    assert_equal(rfa(Q, K, V, OMEGA, 1e7 * SIGMA), V.mean(2, keepdim=True).expand_as(V))


def test_rfa_of_many_samples_is_softmax_of_cosines():
    """100 estimates from 4,000 samples each: their bias, O(1/S), lies far below the standard error of their mean."""
    cosines = F.normalize(Q[0], dim=-1) @ F.normalize(K[0], dim=-1).mT
    expected = (cosines / SIGMA[:, None, None] ** 2).softmax(-1) @ V[0]
    omega = draw(100, h, 4000, d, seed=8)
    assert_mean(torch.stack([rfa(Q[0], K[0], V[0], sample, SIGMA) for sample in omega]), expected)
