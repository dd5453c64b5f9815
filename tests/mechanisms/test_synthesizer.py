"""Synthesizer."""

from functools import partial

import torch

from attention.mechanisms.synthesizer import synthesizer
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import d, draw, every_grid, h, layer, tokens

case = partial(Case, "synthesizer", (5, 7))

CASES = [case({"rank": 2}), case({"rank": 2, **PREFIX})]
EFFECTS = {"rank": ({}, 2), "attn_drop": ({}, 0.5), "local": ({}, True)}
SYMMETRIES = [(set(), {})]  # the weights depend on every position
GROWTH = [Growth(2, 2)]
SYMBOLS = {"p": 8}
LEARNED = {"factors"}


@every_grid
def test_synthesizer_limits(grid):
    (v,) = tokens(grid, 1)
    N = grid[0] * grid[1]
    r = torch.zeros(h, N, 3, dtype=torch.float64)
    assert_equal(synthesizer(r, draw(h, N, 3), v), v.mean(2, keepdim=True).expand_as(v))
    logits = draw(h, N, N, seed=3)
    assert_equal(synthesizer(logits, torch.eye(N).double().expand(h, N, N), v), logits.softmax(-1) @ v)


def test_synthesizer_has_values_alone():
    """No image changes the weights."""
    attn, (x, y) = layer("synthesizer", (6, 4)), (draw(1, 24, h * d, seed=seed) for seed in (0, 1))
    assert_equal(attn(x + y, (6, 4)) + attn(0 * x, (6, 4)), attn(x, (6, 4)) + attn(y, (6, 4)))


def test_without_factors_prefix_tokens_are_averaged_too():
    grid = (4, 6)
    attn, x = Case("synthesizer", grid, PREFIX).build(), draw(2, 2 + 24, 12)
    with torch.no_grad():
        attn.factors.zero_()
    v = attn.qkv(x)
    assert_equal(attn(x, grid), attn.proj(v.mean(1, keepdim=True).expand_as(v)))
