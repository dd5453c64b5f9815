"""Transformer-LS."""

from functools import partial

import torch
from torch import Tensor

from attention import Grid
from attention.mechanisms.softmax import softmax
from attention.mechanisms.transformer_ls import normalise, transformer_ls
from attention.parts.geometry import Windows, merge_heads
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, every_grid, h, layer, tokens
from tests.support.symmetry import ALL, BLOCKS

# Keys and values are normalised, so that the output is no mean of values, except without averages or dual_norm.
case = partial(Case, "transformer_ls", mixes_values=False, stock_keys=False)
WINDOW, FREE, FEW = {"window_size": 2}, {"position_bias": "none"}, {"num_landmarks": 6}
SMALL = {"window_size": 3}

CASES = [
    case((5, 7), {**FEW, "window_size": 3}),
    case((6, 8), {**FEW, **WINDOW, **FREE, "dual_norm": False}, mixes_values=True),
    case((5, 7), {**FEW, "window_size": 3, "overlap": 1}),
    case((5, 7), {**FEW, "window_size": 8, "layout": "1d", "overlap": 3}),
    case((5, 7), {**FEW, "window_size": 0}),
    case((5, 7), {"num_landmarks": 0, "window_size": 3}, op="local", mixes_values=True),
    case((5, 7), {**FEW, "window_size": 3, **PREFIX}),
]
EFFECTS = {
    **effects(SMALL, num_landmarks=4, window_size=2, layout="1d", overlap=1, dual_norm=False, position_bias="none"),
    **effects(SMALL, attn_drop=0.5, local=True),
}
SYMMETRIES = [
    (ALL, {**FEW, "window_size": 0}),
    (BLOCKS, {**FEW, **WINDOW, **FREE}),
    ({"transposed"}, {**FEW, "window_size": 3, "overlap": 1, **FREE}),  # windows that overlap
    ({"between"}, {**FEW, **WINDOW}),  # a bias depends on positions inside a window, not on the window
]
REFUSED = [
    ({"window_size": 0, "num_landmarks": 0}, r"window_size = 0: .* give one of them"),
    ({"window_size": 15}, r"attention\(transformer_ls\).window_size = 15: larger than the 14x14 grid; at most 14"),
]
EVERYTHING = [{"window_size": 6, "num_landmarks": 0, "dual_norm": False, **FREE}]
SYMBOLS = {"|E|": 49, "r": 16}
LEARNED = {"norm_full", "norm_slots", "position_bias", "slots"}
NO_MATRIX = "not linear"  # LayerNorm of averages of values


def run(q, k, v, slots, *, grid: Grid, window: Grid) -> Tensor:
    return transformer_ls(q, k, v, slots, windows=Windows(grid, window))


@every_grid
def test_transformer_ls_with_one_average_per_token_is_softmax(grid):
    q, k, v = tokens(grid)
    slots = torch.eye(q.shape[2], dtype=torch.float64).log().clamp(min=-1e3).expand(B, h, -1, -1)
    assert_equal(run(q, k, v, slots, grid=grid, window=(0, 0)), softmax(q, k, v))


@every_grid
def test_dual_norm_makes_keys_and_values_as_large_as_their_averages(grid):
    attn, x = layer("transformer_ls", grid, num_landmarks=5, window_size=2), draw(B, grid[0] * grid[1], h * d)
    for norm in (attn.norm_full, attn.norm_slots):
        norm.reset_parameters()
    _, k, v, slots = attn.project(x, grid)
    assert slots.shape == (B, h, 5, x.shape[1])
    averages = normalise(slots.softmax(-1) @ k, attn.norm_slots.weight, attn.norm_slots.bias)
    for y in (k, v, averages):
        all_heads = merge_heads(y)
        assert_equal(all_heads.mean(-1), torch.zeros_like(all_heads[..., 0]))
        torch.testing.assert_close(
            all_heads.var(-1, correction=0), torch.ones_like(all_heads[..., 0]), rtol=0, atol=1e-2
        )
