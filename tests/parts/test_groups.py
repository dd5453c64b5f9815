"""Partitions of the grid's tokens into groups."""

import itertools

import pytest
import torch

from attention.parts.geometry import Windows
from attention.parts.groups import bin_counts, bins, bins_outside, chunks_outside, group_max, group_mean
from tests.support.inputs import CPU, draw, one_head


@pytest.mark.parametrize(
    ("count", "grid", "counts"),
    [
        (16, (12, 4), (4, 4)),  # 8x2 are squarer, but of unequal size
        (16, (4, 12), (4, 4)),
        (48, (16, 15), (16, 3)),
        (12, (6, 8), (3, 4)),  # of the factors that divide the grid the squarest
        (8, (5, 7), (2, 4)),  # no factors divide it
        (12, (6, 6), (3, 4)),  # 2x6 divide it, but a square grid's bins are as square as can be
        (49, (28, 28), (7, 7)),
        (49, (24, 24), (7, 7)),
        (9, (1, 35), (1, 9)),
    ],
)
def test_bins_are_of_equal_size_where_they_can_be_and_then_square(count, grid, counts):
    assert bin_counts(count, grid, "num_landmarks") == counts


@pytest.mark.parametrize("grid", [(4, 4), (5, 7), (24, 24)], ids=str)
@pytest.mark.parametrize("counts", [(1, 1), (2, 3), (4, 4), (1, 4)], ids=str)
def test_bins_are_disjoint_cover_the_grid_and_have_the_stated_edges(grid, counts):
    groups = bins(grid, counts, CPU)
    assert groups.members.shape[1] == counts[0] * counts[1]
    assert sorted(groups.members[groups.valid].tolist()) == list(range(grid[0] * grid[1]))
    (H, W), (rows, columns) = grid, counts
    for i, j in itertools.product(range(rows), range(columns)):
        y, x = (range(a * size // n, (a + 1) * size // n) for a, size, n in ((i, H, rows), (j, W, columns)))
        c = i * columns + j
        assert groups.members[0, c][groups.valid[0, c]].tolist() == [a * W + b for a in y for b in x]


def test_means_of_grown_bins_count_what_lies_outside_the_grid():
    """Released code: bins of one token, grown by one on either side, hold three; at the border one of them is 0."""
    x = one_head(3, 6, 12)
    assert group_mean(x, bins((1, 3), (1, 3), CPU)).flatten().tolist() == [3, 6, 12]
    assert group_mean(x, bins((1, 3), (1, 3), CPU, (0, 1))).flatten().tolist() == [3, 7, 6]


@pytest.mark.parametrize(("grid", "counts"), [((4, 6), (2, 3)), ((5, 7), (2, 3))], ids=str)
def test_pools_are_taken_over_the_members_of_each_group_and_of_none_are_zero(grid, counts):
    """Groups are tiles, unequal bins, bins outside windows, some of them empty, and groups with masked tokens."""
    N = grid[0] * grid[1]
    x, whole = draw(2, 3, N, 4), bins(grid, counts, CPU)
    key_mask = draw(2, N) > 0.5
    key_mask[1, whole.members[0, 1]] = False
    outside = bins_outside(whole, Windows(grid, (4, 4)))
    for groups in (whole, outside, whole.masked(key_mask), outside.masked(key_mask)):
        means, largest = group_mean(x, groups), group_max(x, groups)
        valid = groups.valid.expand(2, 1, *groups.members.shape)[:, 0]
        for b, g, c in itertools.product(range(2), *map(range, groups.members.shape[:2])):
            members = x[b, :, groups.members[g, c][valid[b, g, c]]]
            if members.shape[1] == 0:
                members = torch.zeros(3, 1, 4).double()
            torch.testing.assert_close(means[b, :, g, c], members.sum(1) / members.shape[1])
            assert torch.equal(largest[b, :, g, c], members.amax(1))
    assert (outside.masked(key_mask).num_members() == 0).any()


@pytest.mark.parametrize("overlap", [(0, 0), (1, 1)])
@pytest.mark.parametrize(("grid", "window"), [((6, 4), (2, 2)), ((5, 7), (3, 3))], ids=str)
def test_partitions_outside_windows_complete_them(grid, window, overlap):
    (H, W), windows = grid, Windows(grid, window, overlap)
    outside = [bins_outside(bins(grid, (2, 2), CPU), windows), chunks_outside(windows, 4, CPU)]
    for groups, n in itertools.product(outside, range(H * W)):
        g = (n // W // window[0]) * -(-W // window[1]) + n % W // window[1]
        attended = windows.attended(n)[0]
        assert sorted([*attended, *groups.members[g][groups.valid[g]].tolist()]) == list(range(H * W))
    chunks = outside[1]
    for g in range(len(chunks.members)):
        members = [c[v].tolist() for c, v in zip(chunks.members[g], chunks.valid[g], strict=True)]
        assert [*itertools.chain(*members)] == sorted(itertools.chain(*members))
        assert max(map(len, members)) - min(map(len, members)) <= 1


def test_complement_chunks_of_the_papers():
    """735/49 = 15 tokens a chunk at N = 784, 3 at 196, 63 at 3136."""
    for side, size in ((28, 15), (14, 3), (56, 63)):
        groups = chunks_outside(Windows((side, side), (7, 7)), 49, CPU)
        assert (groups.num_members() == size).all()


@pytest.mark.parametrize("margin", [(0, 0), (1, 1)])
@pytest.mark.parametrize("grid", [(4, 6), (5, 7)], ids=str)
def test_means_of_large_halves_are_finite(grid, margin):
    """Tiles, unequal bins and grown ones, with and without masked tokens: sums are beyond float16, means are not."""
    N = grid[0] * grid[1]
    x, key_mask = torch.full((2, 3, N, 4), 6e4, dtype=torch.float16), torch.arange(N).expand(2, -1) % 3 > 0
    groups = bins(grid, (2, 3), CPU, margin)
    for masked in (groups, groups.masked(key_mask)):
        mean = group_mean(x, masked)
        assert mean.dtype == x.dtype
        assert mean.isfinite().all()
        assert (mean == 6e4).all() or groups.padded_means
    for mask in (None, key_mask):
        assert (Windows(grid, (3, 2), key_mask=mask).mean(x) == 6e4).all()
