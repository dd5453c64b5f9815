"""Windows of a grid."""

import itertools

import pytest
import torch

from attention.mechanisms.local import local
from attention.parts.geometry import Windows, resample
from tests.support.inputs import CPU, every_grid, tokens


@every_grid
def test_windows_round_trip_and_cover_every_token_once(grid):
    (x,) = tokens(grid, 1)
    for window in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
        windows = Windows(grid, window)
        assert torch.equal(windows.reverse(windows.partition(x)), x)
        index = windows.indices(CPU)
        assert index.shape == (windows.num_windows, windows.num_queries)
        assert (windows.mask(CPU) is None) == (not windows.padded)
        assert sorted(index[index >= 0].tolist()) == list(range(grid[0] * grid[1]))


@every_grid
@pytest.mark.parametrize("overlap", [(0, 0), (1, 1), (0, 2)])
def test_keys_of_a_window_are_what_each_of_its_tokens_attends_to(grid, overlap):
    windows, N = Windows(grid, (2, 3), overlap), grid[0] * grid[1]
    index = windows.indices(CPU)
    assert index.shape == (windows.num_windows, windows.num_keys)
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


@pytest.mark.parametrize(("old", "grid"), [((3, 1), (6, 1)), ((3, 2), (6, 1)), ((3, 2), (6, 2)), ((3, 1), (6, 3))])
def test_tables_of_one_column_are_resampled_as_others_and_as_rows(old, grid):
    """Resamples numbers 0, 1, 2 from top to bottom. torch's antialiased images of one column are wrong."""
    table = torch.arange(3.0)[:, None].expand(old)
    expected = torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2])[:, None].expand(grid)
    assert torch.allclose(resample(table.reshape(1, -1), old, grid).view(grid), expected)
    assert torch.allclose(resample(table.mT.reshape(1, -1), old[::-1], grid[::-1]).view(grid[::-1]), expected.mT)
