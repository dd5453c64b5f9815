"""Rank-augmented linear attention."""

import math
from functools import partial

import pytest
import torch

from attention.mechanisms.rala import rala
from attention.parts.features import elu_plus_one
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, h, identity, layer, one_head, tokens

case = partial(Case, "rala", (5, 7), mixes_values=False)

CASES = [case(), case({"local": False}), case(PREFIX)]
EFFECTS = {"local": ({}, False)}
SYMMETRIES = [(set(), {}), (set(), {"local": False})]
LEARNED = {"gate", "local_term"}
UNSIZED = True


def ours(w):
    """The module's linear layers are 1 x 1 convolutions, and one of them makes queries, keys, values and gates."""
    (qkv, gate), (qkv_bias, gate_bias) = (w[f"qkvo.{part}"].squeeze().split([48, 16]) for part in ("weight", "bias"))
    return {
        **{"qkv.weight": qkv, "qkv.bias": qkv_bias, "gate.weight": gate, "gate.bias": gate_bias},
        **{"proj.weight": w["proj.weight"].squeeze(), "proj.bias": w["proj.bias"]},
        **{"local_term.weight": w["lepe.weight"], "local_term.bias": w["lepe.bias"]},
    }


VISION = {"rala_6x9": ({}, ours)}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
UNTURNED = partial(rala, grid=(1, 1))  # all tokens but one are prefix tokens


def test_by_hand():
    """Features 1 and 3 of queries, of mean 2; 1 and 2 of keys. One channel does not turn."""
    y, a = rala(one_head(0, 2), one_head(0, 1), one_head(10, 20), grid=(1, 2)), math.exp(2)
    torch.testing.assert_close(y, one_head(*[(10 + 2 * a * 20) / (1 + 2 * a)] * 2), rtol=0, atol=1e-4)


def test_a_key_like_the_mean_query_weighs_more():
    """Its weight is larger than in linear attention with the same features."""
    phi_q, phi_k = elu_plus_one(Q), elu_plus_one(K)
    kernel = phi_q @ phi_k.mT
    alpha = N * (phi_q.mean(2, keepdim=True) @ phi_k.mT * d**-0.5).softmax(-1)
    assert_equal(alpha.mean(-1), torch.ones(B, h, 1, dtype=torch.float64))
    expected = alpha * kernel / ((alpha * kernel).sum(-1, keepdim=True) + 1e-6 * N)
    assert_equal(UNTURNED(Q, K, identity(N)), expected)


def test_rotated_weights_may_be_negative_and_do_not_sum_to_one():
    weights = rala(Q, K, identity(N), grid=GRID)
    assert (weights < 0).any()
    assert (weights.sum(-1) < 1).all()
    assert (torch.linalg.matrix_rank(weights) <= d).all()


def test_a_normaliser_that_vanishes_makes_no_large_output():
    """Queries and keys use different channels, which a rotation aligns."""
    q, k = one_head(*[(40, -40, 0, 0)] * 4), one_head(*[(-40, 40, -40, -40)] * 4)
    v = one_head(*[(1, 10, 0, 0)] * 4)
    y = rala(q, k, v, grid=(4, 1))
    assert_equal(y.abs().amax(2), 2 * v.abs().amax(2))
    assert_equal(rala(0 * q, k, v, grid=(1, 1)), UNTURNED(0 * q, k, v))


@pytest.mark.parametrize("name", ["mlla", "polaformer", "rala", "circulant"])
def test_a_gate_of_zero_leaves_the_bias(name):
    attn, x = layer(name, GRID), draw(B, N, h * d)
    for parameter in attn.gate.parameters():
        torch.nn.init.zeros_(parameter)
    assert_equal(attn(x, GRID), attn.proj.bias.expand_as(x))
