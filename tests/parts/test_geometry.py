"""Windows of a grid."""

import itertools

import pytest
import torch

from attention.mechanisms.local import local
from attention.parts.geometry import Windows
from tests.support.inputs import CPU, every_grid, tokens


@every_grid
def test_windows_round_trip_and_cover_every_token_once(grid):
    (x,) = tokens(grid, 1)
    for window in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
        windows = Windows(grid, window)
        assert torch.equal(windows.reverse(windows.partition(x)), x)
        index = windows.indices(CPU)
        assert index.shape == (windows.count, windows.num_queries)
        assert (windows.mask(CPU) is None) == (not windows.padded)
        assert sorted(index[index >= 0].tolist()) == list(range(grid[0] * grid[1]))


@every_grid
@pytest.mark.parametrize("overlap", [(0, 0), (1, 1), (0, 2)])
def test_keys_of_a_window_are_what_each_of_its_tokens_attends_to(grid, overlap):
    windows, N = Windows(grid, (2, 3), overlap), grid[0] * grid[1]
    index = windows.indices(CPU)
    assert index.shape == (windows.count, windows.num_keys)
    (x,) = tokens(grid, 1)
    keys = windows.partition_keys(x)
    for n in range(N):
        attended, positions, _ = windows.attended(n)
        row = index[windows.index_of(n)]
        assert row[positions].tolist() == attended == row[row >= 0].tolist()
        assert torch.equal(keys[:, :, windows.index_of(n)][:, :, positions], x[:, :, attended])
        earlier = windows._replace(causal=True).attended(n)[0]
        assert earlier == [m for m in attended if m <= n]


def test_a_misspelt_keyword_is_named():
    with pytest.raises(TypeError, match="windw"):
        Windows((4, 6), windw=(2, 2))
    q = torch.zeros(1, 1, 24, 2)
    with pytest.raises(TypeError, match="window"):
        local(q, q, q, window=Windows((4, 6), (2, 2)))
