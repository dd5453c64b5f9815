"""Rotary positions of a grid."""

import math

import pytest
import torch

from attention.parts.rotary import rotate, rotate_reference
from tests.support.comparisons import assert_equal
from tests.support.inputs import draw

GRID, N = (5, 7), 35
every_kind = pytest.mark.parametrize("endpoint", [True, False])


def test_by_hand():
    """With eight channels, the slower of two pairs rotates by 1/10000 per row with the endpoint, by 1/100 without."""
    x = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(1, N, 4)
    for endpoint, slow in ((True, 1e-4), (False, 1e-2)):
        y = rotate(x, GRID, endpoint=endpoint)[0, 3 * 7 + 2]
        angles = torch.tensor([3, 3 * slow, 2, 2 * slow], dtype=torch.float64)
        assert_equal(y, torch.stack([angles.cos(), angles.sin()], -1).flatten())


@every_kind
@pytest.mark.parametrize("width", [1, 4, 7, 12])
def test_it_is_its_literal_twin_in_value_and_gradient(width, endpoint):
    results, probe = [], draw(2, N + 2, width, seed=1)
    for function in (rotate, rotate_reference):
        x = draw(2, N + 2, width).requires_grad_()
        y = function(x, GRID, endpoint=endpoint)
        (y * probe).sum().backward()
        results.append((y, x.grad))
    for value, expected in zip(*results, strict=True):
        assert_equal(value, expected)


@every_kind
def test_products_know_positions_by_their_difference(endpoint):
    """The same query and key at all places."""
    q, k = (draw(1, 8, seed=seed).expand(N, 8) for seed in (0, 1))
    products = rotate(q, GRID, endpoint=endpoint) @ rotate(k, GRID, endpoint=endpoint).mT
    products = products.view(*GRID, *GRID)
    assert_equal(products[1:, 2:, 1:, 2:], products[:-1, :-2, :-1, :-2])
    assert (products - products.transpose(0, 2)).abs().max() > 0.1


def test_lengths_prefix_tokens_and_channels_that_are_left_stay():
    x = draw(3, N + 2, 7)
    y = rotate(x, GRID, endpoint=True)
    assert_equal(y[:, :2], x[:, :2])
    assert_equal(y[..., 4:], x[..., 4:])
    assert_equal(y.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(y[:, 3:], x[:, 3:])


def test_one_pair_turns_by_the_position_itself():
    x = torch.ones(1, 2, 4, dtype=torch.float64)
    y = rotate(x, (1, 2), endpoint=True)[0, 1]
    assert_equal(y, torch.tensor([1, 1, math.cos(1) - math.sin(1), math.cos(1) + math.sin(1)], dtype=torch.float64))
