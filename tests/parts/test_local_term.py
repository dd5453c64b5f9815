"""The local term: a depthwise convolution of values, shared by heads or not."""

import pytest
import torch
import torch.nn.functional as F

from attention import ATTENTION, AttentionFactory, LayerContext, options_of
from attention.parts.local_term import LocalTerm
from tests.support.calls import value_and_gradients
from tests.support.cases import Case
from tests.support.comparisons import FP64, FP64_GRADIENT, assert_equal
from tests.support.inputs import draw

B, h, d, GRID = 2, 3, 4, (5, 7)
N = GRID[0] * GRID[1]


def local_term_reference(v, weight, bias, grid):
    """The local term, tap by tap; filters (C or d, size, size) for the channels of all heads, or of each head."""
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


def test_masked_tokens_are_zeros():
    term, v, counts = LocalTerm(d, 3).double(), draw(B, h, N, d), draw(B, N) > 0
    assert_equal(term.convolve(v, GRID, counts), term.convolve(torch.where(counts[:, None, :, None], v, 0), GRID))
    term.float().convolve(v.float(), GRID).sum().backward()
    assert term.weight.grad.stride() == term.weight.stride()  # with others, DDP warns, and copies them in every step


SMALL = {"window_size": 3, "num_landmarks": 6, "cluster_size": 4, "block_size": 4, "kernel_size": 3}
SMALL |= {"num_clusters": 4, "num_top_keys": 5}
HAVE_ONE = [name for name, kind in ATTENTION.items() if "local" in options_of(name) and kind.local_size]


@pytest.mark.parametrize("name", HAVE_ONE)
def test_a_layer_with_it_is_one_with_the_literal_term_in_value_and_all_gradients(name, monkeypatch):
    """Prefix tokens have no local term."""
    grid, own, P = (3, 4), vars(ATTENTION[name].Config()), 0 if ATTENTION[name].prefix_tokens == "refused" else 2
    small = {key: value for key, value in SMALL.items() if key in own}
    case = Case(name, grid, {**small, "local": True, "num_prefix_tokens": P})
    attn, x = case.build().eval(), case.tokens()
    found = value_and_gradients(attn, x, grid)

    def literal(v, grid, key_mask):
        y = local_term_reference(v[:, :, P:], attn.local_term.weight[:, 0], attn.local_term.bias, grid)
        return F.pad(y, (0, 0, P, 0))

    monkeypatch.setattr(attn.local_term, "convolve", literal)
    (y, *gradients), (y_literal, *expected) = found, value_and_gradients(attn, x, grid)
    torch.testing.assert_close(y, y_literal, rtol=FP64, atol=FP64)
    torch.testing.assert_close(gradients, expected, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)


@pytest.mark.parametrize("name", HAVE_ONE)
def test_its_cost_is_stated(name):
    """25 taps, or 9, for every channel of every token; prefix tokens do not matter."""
    mechanism, costs = ATTENTION[name], []
    for local in (False, True):
        config = AttentionFactory.from_options({"name": name, "local": local}).config
        costs.append(mechanism.layer_cost(LayerContext(dim=192, num_heads=3, grid=(14, 14)), config))
    taps, width = mechanism.local_size**2, 64 if mechanism.local_by_head else 192
    parameters, macs = (after - before for before, after in zip(*costs, strict=True))
    assert (parameters, macs) == (width * (taps + 1), taps * 196 * 192)
