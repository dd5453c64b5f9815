"""Cross-covariance attention."""

import torch
import torch.nn.functional as F

from attention.mechanisms.softmax import softmax
from attention.mechanisms.xca import xca
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import d, draw, tokens
from tests.support.symmetry import ALL

CASES = [Case("xca", (5, 7), mixes_values=False)]
EFFECTS = {"attn_drop": ({}, 0.5), "local": ({}, True)}
SYMMETRIES = [(ALL, {})]
LEARNED = {"temperature"}
UNSIZED = True
NO_MATRIX = "channels"  # which it mixes

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
SIGMA = torch.tensor([0.8, 1.3], dtype=torch.float64)


def test_xca_is_softmax_attention_between_channels():
    q, k = (F.normalize(x, dim=2).mT for x in (Q, K))  # (B, h, d, N): channels as tokens
    assert_equal(xca(Q, K, V, SIGMA), softmax(q * SIGMA[:, None, None] * N**0.5, k, V.mT).mT)


def test_xca_ignores_the_length_of_every_channel():
    a, b = draw(d, seed=7).exp(), draw(d, seed=8).exp()
    assert_equal(xca(Q * a, K * b, V, SIGMA), xca(Q, K, V, SIGMA))


def test_xca_averages_channels_when_cold_and_picks_them_when_hot():
    assert_equal(xca(Q, K, V, 0 * SIGMA), V.mean(-1, keepdim=True).expand_as(V))
    orthogonal = torch.linalg.qr(Q).Q
    assert_equal(xca(orthogonal, orthogonal, V, 1e3 * SIGMA), V)
