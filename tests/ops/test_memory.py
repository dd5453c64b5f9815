"""Copies between memory layouts, in words of several numbers."""

import pytest
import torch

from attention.ops import memory
from attention.parts.geometry import Windows
from bench.operators import off_cpu


@pytest.mark.parametrize(
    ("dtype", "d", "start", "word"),
    [
        (torch.bfloat16, 64, 0, torch.complex128),
        (torch.bfloat16, 12, 0, torch.int64),
        (torch.bfloat16, 8, 4, torch.int64),  # begins within a word of 16 bytes
        (torch.bfloat16, 6, 0, torch.int32),
        (torch.bfloat16, 5, 0, None),
        (torch.float32, 6, 0, torch.int64),
        (torch.float32, 5, 0, torch.int32),
        (torch.float64, 3, 0, torch.int64),
    ],
)
def test_copies_take_the_longest_word_that_fits(dtype, d, start, word):
    source = torch.randn(start + 4 * 6 * 3 * d).to(dtype)[start:].view(4, 6, 3, d)[:, :, 1:]
    target = torch.zeros(2, 6, 4, d, dtype=dtype).permute(2, 1, 0, 3)
    assert memory._word(target, source) == word
    with off_cpu():
        assert memory.copy(target, source) is target
    assert torch.equal(target, source)


def test_broadcast_and_transposed_tensors_are_copied():
    row, target = torch.randn(3, 1, 8).bfloat16(), torch.empty(3, 5, 8, dtype=torch.bfloat16)
    with off_cpu():
        memory.copy(target, row.expand(3, 5, 8))
        assert torch.equal(target, row.expand(3, 5, 8))
        memory.copy(target, torch.ones(3, 8, 5, dtype=torch.bfloat16).mT)  # numbers of a row are not side by side
        assert target.eq(1).all()
        memory.copy(target, torch.zeros(3, 5, 8))  # converts
        assert target.eq(0).all()


@pytest.mark.parametrize("grid", [(6, 8), (5, 7)])
def test_windows_and_back(grid):
    x, windows = torch.randn(2, 3, grid[0] * grid[1], 16), Windows(grid, (3, 4))
    with off_cpu():
        partitioned = memory.partition(x, windows, torch.float64)
        assert torch.equal(partitioned.view(2, 3, windows.num_windows, 12, 16), windows.partition(x).double())
        assert torch.equal(memory.reverse(partitioned.float(), torch.empty_like(x), windows), x)
