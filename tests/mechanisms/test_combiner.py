"""Combiner."""

import math
from functools import partial

import pytest
import torch

from attention.parts.geometry import Windows
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import B, d, draw, every_grid, h, layer
from tests.support.symmetry import BLOCKS

case = partial(Case, "combiner")
WINDOW, FREE = {"window_size": 2}, {"position_bias": "none"}
SMALL = {"window_size": 3}

CASES = [
    case((5, 7), SMALL),
    case((6, 8), {"window_size": 2, "position_bias": "none"}),
    case((5, 7), {"window_size": 8, "layout": "1d", "summary": "relu"}),
    case((5, 7), {"window_size": 3, "summary": "identity", "pool": "mean"}),
    case((5, 7), {"window_size": 8, "causal": True, "layout": "1d"}),
    case((5, 7), {"window_size": 3, **PREFIX}),
]
EFFECTS = {
    **effects(SMALL, window_size=2, layout="1d", summary="identity", pool="mean", position_bias="none", attn_drop=0.5),
    "local": (SMALL, True),
    "causal": ({**SMALL, "layout": "1d"}, True),
}
SYMMETRIES = [
    *((BLOCKS, {**WINDOW, **FREE, "pool": x}) for x in ("max", "mean")),
    ({"transposed"}, {"window_size": 3, **FREE}),  # windows that do not divide the grid
    ({"between"}, WINDOW),  # a bias depends on positions inside a window, not on the window
]
GROWTH = [
    # Spans of u = sqrt(N) tokens; beside u + N/u weights a token has copies and summaries, which are linear. At a fixed
    # u, 2 N^2 C / u is most of 2 N (u + N/u) C: more clearly so with spans of 4 than with the usual 49.
    Growth(1.5, 1.5, lambda side: {"layout": "1d", "window_size": side}),
    Growth(2, 2, lambda side: {"window_size": 2}),
]
REFUSED = [({"window_size": 15}, r"attention\(combiner\).window_size = 15: .* at most 14")]
EVERYTHING = [
    {"window_size": 6, **FREE},
    {"window_size": 1, "summary": "identity", **FREE},  # the own span's summary would count its token twice
    {"causal": True, "layout": "1d", "window_size": 24, **FREE},
]
SYMBOLS = {"u": 49}
LEARNED = {"position_bias", "summary_k", "summary_q"}


@every_grid
@pytest.mark.parametrize("pool", ["max", "mean"])
def test_combiner_with_equal_tokens_in_a_span_counts_a_span_once(grid, pool):
    """The summary of equal tokens is the token, and each other span weighs as one token."""
    rows, columns = grid[0] // 2, grid[1] // 2
    q, k, v = (
        draw(B, h, rows, columns, d, seed=seed).repeat_interleave(2, 2).repeat_interleave(2, 3).flatten(2, 3)
        for seed in range(3)
    )
    attn = layer("combiner", grid, window_size=2, summary="identity", pool=pool, position_bias="none")
    span = (torch.arange(grid[0])[:, None] // 2 * columns + torch.arange(grid[1]) // 2).flatten()
    own = span[:, None] == span
    logits = q @ k.mT * d**-0.5 - (~own).double() * math.log(4)
    assert_equal(attn.attend(q, k, v, grid), logits.softmax(-1) @ v)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_combiner_pools_the_tokens_of_the_grid_alone(pool):
    """Spans that reach beyond the grid have the summaries of the tokens that they hold."""
    attn, x = layer("combiner", (5, 7), window_size=3, pool=pool), -draw(B, h, 35, d).abs()
    image = x.unflatten(2, (5, 7))
    spans = [image[:, :, i : i + 3, j : j + 3].flatten(2, 3) for i in (0, 3) for j in (0, 3, 6)]
    expected = torch.stack([span.amax(2) if pool == "max" else span.mean(2) for span in spans], 2)
    assert_equal(attn.pool(x, Windows((5, 7), (3, 3))), expected)
