"""cosFormer."""

import math
from functools import partial

import pytest
import torch

from attention.mechanisms.cosformer import cosformer, reweight
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal, assert_weights_sum_to_one_or_vanish
from tests.support.inputs import B, d, draw, h, identity, layer, one_head, tokens

# With rectified features, all weights of a query may be zero, which gives 0; rounding may make one positive.
case = partial(Case, "cosformer", (5, 7), mixes_values=False, well_conditioned=False, positive_weights=False)

CASES = [case(), case({"layout": "2d"}), case(PREFIX), case({**PREFIX, "layout": "2d"}), case({"causal": True})]
EFFECTS = {"layout": ({}, "2d"), "causal": ({}, True), "local": ({}, True)}
SYMMETRIES = [({"transposed"}, {"layout": "2d"}), (set(), {}), (set(), {"causal": True})]
REFUSED = [
    ({"causal": True, "layout": "2d"}, r"attention\(cosformer\).layout = 2d: causal attention .*; set layout: 1d")
]
UNSIZED = True

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
IDENTITY = identity(N)


def test_by_hand():
    """Three tokens of a line: weights relu(q) relu(k) cos(pi (n - m) / 6), with cosines 1, sqrt(3) / 2, 1 / 2."""
    root = 3**0.5
    q, k, v = one_head(1, 2, -1), one_head(2, -3, 4), one_head(6, 12, 18)
    # the key -3 weighs nothing; query 0: weights 2 * 1 and 4 * 1/2 on 6 and 18; query 1, of length 2: 4 and 8, both
    # by sqrt(3) / 2: (6 + 2 * 18) / 3; query -1: no weight at all, and 0
    assert_equal(cosformer(q, k, v, grid=(1, 3)), one_head(12, 14, 0))
    # all keys 1: weights 1, sqrt(3)/2, 1/2; sqrt(3)/2, 1, sqrt(3)/2; 1/2, sqrt(3)/2, 1
    ones = one_head(1, 1, 1)
    expected = [(6 + 6 * root + 9) / (1.5 + root / 2), 12, (3 + 6 * root + 18) / (1.5 + root / 2)]
    assert_equal(cosformer(ones, ones, v, grid=(1, 3)), one_head(*expected))
    # a column of three is the same line
    assert_equal(cosformer(ones, ones, v, grid=(3, 1)), one_head(*expected))


@pytest.mark.parametrize("grid", [(1, N), GRID], ids=str)
def test_weights_are_not_negative_and_sum_to_one_or_vanish(grid):
    assert_weights_sum_to_one_or_vanish(cosformer(Q, K, IDENTITY, grid=grid))


@pytest.mark.parametrize("grid", [(1, N), GRID], ids=str)
def test_length_of_queries_and_keys_is_ignored(grid):
    assert_equal(cosformer(3 * Q, 0.7 * K, V, grid=grid), cosformer(Q, K, V, grid=grid))


@pytest.mark.parametrize("grid", [(1, N), GRID], ids=str)
def test_cosformer_is_the_explicitly_reweighted_kernel(grid):
    """Offsets within one axis never reach its length, so that no cosine is negative."""
    kernel = torch.zeros(N, N, dtype=torch.float64)
    for n, m in torch.cartesian_prod(torch.arange(N), torch.arange(N)).tolist():
        offsets = ((n // grid[1] - m // grid[1]) / grid[0], (n % grid[1] - m % grid[1]) / grid[1])
        kernel[n, m] = math.prod(math.cos(math.pi / 2 * offset) for offset in offsets)
    assert (kernel > 0).all()
    kernel = Q.relu() @ K.relu().mT * kernel
    assert_equal(cosformer(Q, K, IDENTITY, grid=grid), kernel / kernel.sum(-1, keepdim=True).clamp(min=1e-6))


def test_cosformer_does_not_know_where_counting_starts():
    q, k = draw(12, d), draw(12, d, seed=1)
    shifted = [torch.cat([x[9:], x[:9]]) for x in (q, k)]  # token n at position n + 3
    a, b = (reweight(q, (1, 12)) @ reweight(k, (1, 12)).mT for q, k in ((q, k), shifted))
    assert_equal(b[3:, 3:], a[:9, :9])


def test_cosformer_on_a_grid_of_one_row_is_that_of_the_raster():
    attn = layer("cosformer", GRID, layout="2d")
    raster = layer("cosformer", GRID)
    raster.load_state_dict(attn.state_dict())
    x = draw(B, N, h * d)
    assert_equal(attn(x, (1, N)), raster(x, (1, N)))
    assert (attn(x, GRID) - raster(x, GRID)).abs().max() > 1e-3


def test_cosformer_commutes_with_mirroring_the_grid():
    attn, x = layer("cosformer", GRID, layout="2d"), draw(B, N, h * d)
    for axis in (1, 2):
        mirrored = x.unflatten(1, GRID).flip(axis).flatten(1, 2)
        assert_equal(attn(mirrored, GRID).unflatten(1, GRID).flip(axis).flatten(1, 2), attn(x, GRID))


def test_a_query_without_positive_coordinates_gives_zero():
    q = torch.cat([-Q[:, :, :1].abs(), Q[:, :, 1:].abs()], 2)
    y = cosformer(q, K, V, grid=GRID)
    assert (y[:, :, 0] == 0).all()
    assert (y[:, :, 1:].abs().sum(-1) > 0).all()
