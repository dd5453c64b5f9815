"""Shifted windows."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention import Grid, create_attention
from attention.mechanisms.shifted_window import shifted_window
from attention.parts.geometry import Windows
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal, under_mask
from tests.support.growth import Growth
from tests.support.inputs import every_grid, one_head, tokens
from tests.support.symmetry import BLOCKS

case = partial(Case, "shifted_window")
SMALL, FREE = {"window_size": 3}, {"position_bias": "none"}
ODD = {"layer": 1}

CASES = [
    case((5, 7), SMALL),
    case((5, 7), {**SMALL, **ODD}),
    case((4, 7), {"window_size": 4, **ODD}),  # no shift along the rows
    case((6, 8), {"window_size": 2, **FREE, **ODD}),
    case((5, 7), {**SMALL, **ODD, **PREFIX}),
]
EFFECTS = {
    **effects(SMALL, window_size=2, position_bias="none", attn_drop=0.5, local=True),
    "shift": ({**SMALL, **ODD}, False),
}
SYMMETRIES = [
    (BLOCKS, {"window_size": 2, **FREE}),
    ({"between"}, {"window_size": 2}),
    ({"transposed"}, {"window_size": 3, **FREE, **ODD}),
]
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: ODD)]
REFUSED = [({"window_size": 0}, r"attention\(shifted_window\).window_size = 0 is below the least valid value 1")]
EVERYTHING = [{"window_size": 6, **FREE, **ODD}]
SYMBOLS = {"w": 7}
LEARNED = {"position_bias"}


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of Swin Transformer's block in timm, under our names."""
    ours = {key: weights[f"attn.{key}"] for key in ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")}
    return ours | {"position_bias.table": weights["attn.relative_position_bias_table"][None]}


VISION = {
    "shifted_window_4x8_w4_s0": ({"window_size": 4}, renamed),
    "shifted_window_8x8_w4_s2": ({"window_size": 4, **ODD}, renamed),
}


def run(q, k, v, bias=None, *, grid: Grid, window: Grid, shift: Grid = (0, 0)) -> Tensor:
    return shifted_window(q, k, v, bias, windows=Windows(grid, window), shift=shift)


def test_by_hand():
    """Five tokens in windows of two shifted by one: one, then two, then two."""
    q, k = one_head(0, 1, 2, 0, 1), one_head(0, 0, math.log(2), 0, math.log(5))
    v = one_head(1, 6, 12, 30, 60)
    # 1 alone; weights 1 2, then 1 4, over 6, 12; 1 1, then 1 5, over 30, 60
    expected = one_head(1, (6 + 24) / 3, (6 + 48) / 5, 45, (30 + 300) / 6)
    assert_equal(run(q, k, v, grid=(1, 5), window=(1, 2), shift=(0, 1)), expected)


@every_grid
@pytest.mark.parametrize(
    ("window", "shift"), [((2, 3), (0, 0)), ((2, 2), (1, 1)), ((3, 2), (1, 0)), ((3, 3), (1, 1)), ((2, 3), (0, 1))]
)
def test_it_is_softmax_under_the_mask_of_shifted_windows(grid, window, shift):
    """The mask follows the paper's rule: same window of the rolled grid, and same side of the seam."""
    q, k, v = tokens(grid)
    (H, W), seen = grid, []
    for i in range(H * W):
        own = []
        for axis, length, w, s in zip(divmod(i, W), grid, window, shift, strict=True):
            padded = length + -length % w
            rolled = (axis - s) % padded
            region = int(rolled >= padded - w) + int(rolled >= padded - s) if s else 0
            own.append((rolled // w, region))
        seen.append(own)
    mask = torch.tensor([[a == b for b in seen] for a in seen])
    assert_equal(run(q, k, v, grid=grid, window=window, shift=shift), under_mask(q, k, v, mask))


def reach(layers: list[int]) -> Tensor:
    """Mask of the tokens of 8 x 8 that the token (3, 3) depends on after layers of windows of 4."""
    torch.manual_seed(0)
    x = torch.randn(1, 64, 8, dtype=torch.float64, requires_grad=True)
    y = x
    for index in layers:
        attn = create_attention("shifted_window", dim=8, num_heads=2, grid=(8, 8), window_size=4, layer=index)
        y = attn.double()(y, (8, 8))
    y[0, 3 * 8 + 3].sum().backward()
    return x.grad[0].ne(0).any(-1).view(8, 8)


def test_two_layers_cross_the_borders_of_windows():
    even, odd = reach([0]), reach([1])
    assert even[:4, :4].all()
    assert odd[2:6, 2:6].all()
    assert even.sum() == odd.sum() == 16
    assert reach([0, 1]).all()
    assert reach([0, 2]).sum() == 16  # even layers alone never leave the window
