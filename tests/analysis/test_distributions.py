"""Entropy of matrices whose answers are known, and grids of keys."""

import math

import pytest
import torch

from analysis.distributions import as_distribution, entropy, key_grid


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


@pytest.mark.parametrize(
    ("num_keys", "grid", "expected"), [(15, (3, 5), (3, 5)), (6, (16, 24), (2, 3)), (49, (28, 20), (7, 7))]
)
def test_key_grid(num_keys, grid, expected):
    assert key_grid(num_keys, grid) == expected
