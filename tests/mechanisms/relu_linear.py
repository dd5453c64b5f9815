"""ReLU linear attention."""

from functools import partial

import torch

from attention.mechanisms.relu_linear import relu_linear
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal, assert_weights_sum_to_one_or_vanish
from tests.support.growth import Growth
from tests.support.inputs import B, draw, h, identity, one_head, tokens
from tests.support.symmetry import ALL

# Rectified features: a query may find no weight at all, and then gives 0, or find one by rounding.
case = partial(Case, "relu_linear", (5, 7), mixes_values=False, well_conditioned=False)

CASES = [case(), case({"local": True}), case(PREFIX)]
EFFECTS = {"local": ({}, True)}
SYMMETRIES = [(ALL, {}), (set(), {"local": True})]
GROWTH = [Growth(1, 1)]
SYMBOLS = {}
UNSIZED = True

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)


def test_by_hand():
    """Query 1 weighs keys 1 and 3 by 1/4 and 3/4; the key -2 and the query -1 have no weight."""
    y = relu_linear(one_head(1, 7, -1), one_head(1, -2, 3), one_head(8, 100, 16))
    assert_equal(y, one_head(14, 14, 0))


def test_weights_are_not_negative_and_sum_to_one_or_vanish():
    weights = relu_linear(Q, K, identity(N))
    assert_weights_sum_to_one_or_vanish(weights)
    assert (torch.linalg.matrix_rank(weights) <= Q.shape[-1]).all()


def test_length_of_a_query_and_of_all_keys_together_has_no_effect():
    lengths, of_keys = draw(B, h, N, 1, seed=7).exp(), draw(B, h, 1, 1, seed=8).exp()
    assert_equal(relu_linear(lengths * Q, of_keys * K, V), relu_linear(Q, K, V))


def test_a_query_without_positive_channels_gives_zero_and_finite_gradients():
    for dtype in (torch.float64, torch.float32, torch.float16):
        q, k, v = (x.detach().to(dtype, copy=True).requires_grad_() for x in (-Q.abs(), K, V))
        y = relu_linear(q, k, v)
        assert not y.any()
        y.sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v))
