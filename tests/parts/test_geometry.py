"""Windows of a grid."""

import itertools

import torch

from attention.parts.geometry import from_windows, to_windows, window_indices
from tests.support.inputs import CPU, every_grid, tokens


@every_grid
def test_windows_round_trip_and_cover_every_token_once(grid):
    (x,) = tokens(grid, 1)
    for window in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
        assert torch.equal(from_windows(to_windows(x, grid, window), grid, window), x)
        index = window_indices(grid, window, (0, 0), CPU)
        assert sorted(index[index >= 0].tolist()) == list(range(grid[0] * grid[1]))
