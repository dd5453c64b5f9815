"""Entropy and distance of matrices whose answers are known."""

import math

import pytest
import torch

from analysis.distributions import as_distribution, entropy, key_grid, mean_distance

GRID = (3, 5)
PLACES = [(y, x) for y in range(3) for x in range(5)]


def test_entropy():
    uniform = torch.full((2, 4, 15), 1 / 15, dtype=torch.float64)
    torch.testing.assert_close(
        entropy(uniform), torch.full((2,), math.log(15), dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert entropy(torch.eye(15)) == 0
    halves = torch.tensor([[0.5, 0.5, 0, 0], [1.0, 0, 0, 0]])
    assert entropy(halves) == pytest.approx(math.log(2) / 2)


def test_weights_that_are_no_distribution_count_by_magnitude_and_rows_of_zeros_not_at_all():
    weights = torch.tensor([[3.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(as_distribution(weights)[0], torch.tensor([0.75, 0.25, 0.0]))
    assert entropy(weights) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_distance_of_planted_maps():
    corner = torch.zeros(15, 15)
    corner[:, 0] = 1
    assert mean_distance(corner, GRID, GRID) == pytest.approx(sum(math.hypot(*place) for place in PLACES) / 15)
    assert mean_distance(torch.eye(15), GRID, GRID) == 0
    two_below = torch.eye(15)[[(y + 2) % 3 * 5 + x for y, x in PLACES]]  # from row 0 two rows down, else one row up
    assert mean_distance(torch.stack([two_below, 7 * two_below]), GRID, GRID).tolist() == pytest.approx([4 / 3] * 2)


def test_distance_of_fewer_keys():
    """Keys of 2x2 tokens are half a diagonal away from each of these."""
    own = torch.zeros(24, 6)
    for n in range(24):
        own[n, n // 6 // 2 * 3 + n % 6 // 2] = 1
    assert mean_distance(own, (4, 6), (2, 3)) == pytest.approx(math.hypot(0.5, 0.5))


@pytest.mark.parametrize(
    ("num_keys", "grid", "expected"), [(15, (3, 5), (3, 5)), (6, (16, 24), (2, 3)), (49, (28, 20), (7, 7))]
)
def test_key_grid(num_keys, grid, expected):
    assert key_grid(num_keys, grid) == expected
