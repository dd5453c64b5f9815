"""MetaFormer's pooling."""

from functools import partial

import pytest
import torch

from attention.mechanisms.mean import mean
from attention.mechanisms.pooling import pooling
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, every_grid, h, layer, one_head, tokens

case = partial(Case, "pooling", (5, 7), mixes_values=False)

CASES = [case(), case({"pool_size": 5})]
EFFECTS = {"pool_size": ({}, 5)}
SYMMETRIES = [({"transposed"}, {})]
REFUSED = [
    ({"pool_size": 4}, r"attention\(pooling\).pool_size = 4: must be odd; nearest valid: 3"),
    ({"pool_size": 1}, r"attention\(pooling\).pool_size = 1: a token less itself is zero; give 3 or more"),
    ({"pool_size": 29}, r"attention\(pooling\).pool_size = 29: .*; at most 27"),
]


def test_by_hand():
    """A row of three: means of 6, 12; of all; of 12, 24; less 6, 12, 24. Padding does not count."""
    v = one_head(6, 12, 24)
    assert_equal(pooling(v, grid=(1, 3), pool_size=3), one_head(3, 2, -6))
    # without the second token, the others are alone
    key_mask = torch.tensor([[True, False, True]])
    y = pooling(v, grid=(1, 3), pool_size=3, key_mask=key_mask)
    assert_equal(y[:, :, [0, 2]], one_head(0, 0))
    # the corner of 2 x 2 has all four in its square
    assert_equal(pooling(one_head(1, 2, 3, 6), grid=(2, 2), pool_size=3), one_head(2, 1, 0, -3))


@every_grid
def test_constants_vanish_and_the_largest_square_is_the_mean(grid):
    (v,) = tokens(grid, 1)
    constant = v[:, :, :1].expand_as(v)
    assert_equal(pooling(constant, grid=grid, pool_size=3), 0 * v)
    assert_equal(pooling(v, grid=grid, pool_size=2 * max(grid) - 1), mean(v) - v)


@pytest.mark.parametrize("pool_size", [3, 5])
def test_a_padded_image_is_the_smaller_image(pool_size):
    """Tokens beyond the smaller grid do not count, as padding does not."""
    v = draw(B, h, 24, d)
    counts = torch.zeros(6, 4, dtype=torch.bool)
    counts[:5, :3] = True
    y = pooling(v, grid=(6, 4), pool_size=pool_size, key_mask=counts.flatten().expand(B, -1))
    smaller = pooling(v[:, :, counts.flatten()], grid=(5, 3), pool_size=pool_size)
    assert_equal(y[:, :, counts.flatten()], smaller)


def test_with_the_residual_it_is_the_mean_of_the_neighbours():
    """Projections of the identity: x + y, as a block adds them, is the average pooling of x."""
    attn, x = layer("pooling", (6, 4)), draw(1, 24, h * d)
    with torch.no_grad():
        for linear in (attn.qkv, attn.proj):
            linear.weight.copy_(torch.eye(h * d))
            linear.bias.zero_()
    inner = x.unflatten(1, (6, 4))[:, 1:4, 1:4].mean((1, 2))  # the square around token (2, 2)
    assert_equal((x + attn(x, (6, 4)))[:, 2 * 4 + 2], inner)
