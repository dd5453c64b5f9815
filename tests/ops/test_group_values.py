"""Groups that a query of causal attention attends to, and means of groups that are tiles of the grid."""

import pytest
import torch

from attention import kernels
from attention.ops.group_values.op import attended_groups, group_mean
from attention.parts.geometry import Windows, split_heads
from attention.parts.groups import bins

N, CPU = 35, torch.device("cpu")


@pytest.mark.parametrize("overlap", [0, 3])
def test_groups_attended_to_by_the_paper_and_by_the_released_code(overlap):
    groups, windows = bins((1, N), (1, 9), CPU), Windows((1, N), (1, 8), (0, overlap), causal=True)
    members = [set(index[valid].tolist()) for index, valid in zip(groups.members[0], groups.valid[0], strict=True)]
    paper, released = (attended_groups(groups, rule, windows).flatten(0, 1) for rule in ("paper", "released"))
    for n in range(N):
        window = windows.attended(n)[0]
        assert paper[n].tolist() == [max(group) < min(window) for group in members]  # disjoint from E, and before it
        assert released[n].tolist() == [max(group) < n for group in members]  # E's own tokens count twice
    assert (released & ~paper).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("grid", "counts"), [((4, 6), (2, 2)), ((6, 1), (2, 1)), ((1, 35), (1, 7))], ids=str)
@pytest.mark.parametrize("images", [3, 0])
def test_means_of_tiles_are_those_of_the_definition(images, grid, counts, dtype):
    """Large numbers, whose sums overflow half types; gradients have the memory layout of tokens."""
    generator, (rows, columns) = torch.Generator().manual_seed(0), counts
    x = 3e4 + torch.randn(images, grid[0] * grid[1], 30, generator=generator, dtype=torch.float64)
    gradient = torch.randn(images, 2, 1, rows * columns, 5, generator=generator, dtype=torch.float64).to(dtype)
    k, groups, results = split_heads(x.to(dtype).requires_grad_(), 3, 2)[1], bins(grid, counts, CPU), []
    for path in ("auto", "plain"):
        with kernels.use(path):
            mean = group_mean(k, groups)
        assert mean.dtype == dtype
        results.append((mean, *torch.autograd.grad(mean, k, gradient)))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected)
    assert results[0][1].transpose(1, 2).is_contiguous()
