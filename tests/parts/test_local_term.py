"""The local term: a depthwise convolution of values, shared by heads or not."""

import pytest
import torch

from attention.parts.local_term import LocalTerm
from tests.support.comparisons import assert_equal
from tests.support.inputs import draw

B, h, d, GRID = 2, 3, 4, (5, 7)
N = GRID[0] * GRID[1]


def local_term_reference(v, weight, bias, grid):
    """Tap by tap; filters (C or d, size, size) for the channels of all heads, or of each."""
    (H, W), size = grid, weight.shape[-1]
    filters, biases = (x.repeat(h * d // len(x), *[1] * (x.dim() - 1)).view(h, d, *x.shape[1:]) for x in (weight, bias))
    y = biases[:, None].expand(B, h, H * W, d).clone()
    for n in range(H * W):
        for i in range(size):
            for j in range(size):
                row, column = n // W + i - size // 2, n % W + j - size // 2
                if 0 <= row < H and 0 <= column < W:
                    y[:, :, n] += filters[:, :, i, j] * v[:, :, row * W + column]
    return y


@pytest.mark.parametrize(("width", "size"), [(d, 5), (h * d, 3)])
def test_taps(width, size):
    term, v = LocalTerm(width, size).double(), draw(B, h, N, d)
    assert_equal(term(v, GRID), local_term_reference(v, term.weight[:, 0], term.bias, GRID))


def test_prefix_tokens_have_none_and_are_left_out():
    term, v = LocalTerm(d, 5).double(), draw(B, h, 2 + N, d)
    y = term(v, GRID)
    assert not y[:, :, :2].any()
    assert_equal(y[:, :, 2:], term(v[:, :, 2:], GRID))


def test_masked_tokens_are_zeros():
    term, v, counts = LocalTerm(d, 3).double(), draw(B, h, N, d), draw(B, N) > 0
    assert_equal(term(v, GRID, counts), term(torch.where(counts[:, None, :, None], v, 0), GRID))
