"""Local attention."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention import Grid
from attention.mechanisms.local import local
from attention.parts.geometry import Windows
from tests.support.cases import CLIP, PREFIX, Case, effects
from tests.support.comparisons import assert_equal, under_mask
from tests.support.inputs import GRIDS, one_head, tokens
from tests.support.symmetry import BLOCKS

case = partial(Case, "local")
WINDOW, FREE = {"window_size": 2}, {"position_bias": "none"}
CAUSAL = {"causal": True, "layout": "1d", "window_size": 8}

CASES = [
    case((5, 7), {"window_size": 3}),
    case((6, 8), {"window_size": 2, "position_bias": "none"}),
    case((5, 7), {"window_size": 4, "overlap": 2}),
    case((5, 7), {"window_size": 3, "overlap": 1, "position_bias": "t5"}),
    case((5, 7), {"window_size": 3, "overlap": 1, "position_bias": "table_released"}),
    case((5, 7), {"window_size": 3, "overlap": 1, "position_bias": "t5_released"}),
    case((5, 7), {"layout": "1d", "window_size": 8, "overlap": 3}),
    case((5, 7), {"layout": "1d", "window_size": 8, "overlap": 3, "position_bias": "t5"}),
    case((5, 7), {"layout": "1d", "window_size": 8, "overlap": 3, "position_bias": "table_released"}),
    case((5, 7), {**CAUSAL, "overlap": 3}),
    case((5, 7), {**CAUSAL, "position_bias": "t5"}),
    case((5, 7), {"window_size": 3, **PREFIX}),
    case(CLIP, {"window_size": (2, 2, 3), **PREFIX}),
    case(CLIP, {"window_size": (2, 1, 4), "overlap": 1}),
]
EFFECTS = {
    **effects({"window_size": 3}, window_size=2, released=True, layout="1d", overlap=1, position_bias="none"),
    **effects({"window_size": 3}, attn_drop=0.5, local=True),
    "causal": ({"window_size": 3, "layout": "1d"}, True),
}
SYMMETRIES = [
    (BLOCKS, {**WINDOW, **FREE}),
    # windows that overlap or do not divide the grid
    *(({"transposed"}, {"window_size": 3, "overlap": x, **FREE}) for x in (0, 1)),
    ({"between"}, WINDOW),  # a bias depends on positions inside a window, not on the window
    (set(), {"layout": "1d", "window_size": 5, **FREE}),
]
REFUSED = [
    ({"overlap": 10**12}, r"attention\(local\).overlap = 1000000000000: larger than .*; at most 14"),
    ({"window_size": 15}, r"attention\(local\).window_size = 15: larger than the 14x14 grid; at most 14"),
    ({"window_size": -1}, r"attention\(local\).window_size = -1 is below the least valid value 1"),
    ({"causal": True, "layout": "2d"}, r"attention\(local\).layout = 2d: causal .* set layout: 1d"),
]
EVERYTHING = [{"window_size": 6, **FREE}, {"causal": True, "layout": "1d", "window_size": 24, **FREE}]
RELEASED = {
    "local_2d_rpe": {"released": True},
    "local_2d_norpe": {"position_bias": "none"},
    "local_1d_overlap_rpe": {"released": True, "layout": "1d", "window_size": 5, "overlap": 2},
}
SYMBOLS = {"|E|": 49}
LEARNED = {"position_bias"}


def run(q, k, v, bias=None, *, grid: Grid, window: Grid, overlap: Grid = (0, 0)) -> Tensor:
    return local(q, k, v, bias, windows=Windows(grid, window, overlap))


def test_by_hand():
    """Blocks of two tokens over three tokens: the third is alone in its block, whose padding has no weight."""
    q, k, v = one_head(0, 1, 2), one_head(0, math.log(2), math.log(3)), one_head(6, 12, 18)
    # weights 1 1 over 6, 12: 9; weights 1 2 over 6, 12: 30 / 3 = 10; 18 alone
    assert_equal(run(q, k, v, grid=(1, 3), window=(1, 2)), one_head(9, 10, 18))
    # keys of one more token on each side, with weights 1 1 1, 1 2 3 and, of the second block, 4 9 over 12, 18
    # 36 / 3 = 12; 84 / 6 = 14; (48 + 162) / 13
    assert_equal(run(q, k, v, grid=(1, 3), window=(1, 2), overlap=(0, 1)), one_head(12, 14, 210 / 13))
    # a bias of log 3 for the key after the query: 1 3 over 6, 12 gives 42 / 4
    bias = torch.tensor([[[0, math.log(3)], [0, 0]]], dtype=torch.float64)
    assert_equal(run(q, k, v, bias, grid=(1, 3), window=(1, 2)), one_head(10.5, 10, 18))


@pytest.mark.parametrize(
    ("grid", "window", "overlap"),
    [
        *((grid, *sizes) for grid in GRIDS for sizes in [((2, 2), (0, 0)), ((3, 3), (0, 0)), ((3, 2), (1, 1))]),
        (CLIP, (2, 1, 4), (0, 0, 0)),
        (CLIP, (2, 2, 4), (1, 0, 1)),
    ],
)
def test_local_is_softmax_under_a_dense_mask(grid, window, overlap):
    q, k, v = tokens(grid)
    N = math.prod(grid)
    mask = torch.zeros(N, N, dtype=torch.bool)
    for n in range(N):
        mask[n, Windows(grid, window, overlap).attended(n)[0]] = True
    if not any(overlap):
        assert torch.equal(mask, mask.mT)  # blocks: who attends to whom is mutual
    assert_equal(run(q, k, v, grid=grid, window=window, overlap=overlap), under_mask(q, k, v, mask))
