"""Spatial-reduction attention."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from attention.mechanisms.softmax import softmax
from attention.mechanisms.sra import shrunk, stretched
from attention.parts.groups import bins, group_mean
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import CPU, B, d, draw, every_grid, h, layer

case = partial(Case, "sra", mixes_values=False, stock_keys=False)  # its keys and values are convolved

CASES = [case((6, 8), {"reduction": 2}), case((5, 7), {"reduction": 3}), case((6, 8), {"reduction": 2, **PREFIX})]
EFFECTS = {"reduction": ({"reduction": 2}, 3), "attn_drop": ({"reduction": 2}, 0.5)}
SYMMETRIES = [({"between"}, {"reduction": 2})]  # the keys of a strided convolution have no order
GROWTH = [
    Growth(1, 1),  # shrunk to 49 keys
    Growth(2, 2, lambda side: {"reduction": 2}),
]
REFUSED = [({"reduction": 15}, r"attention\(sra\).reduction = 15: larger than the 14x14 grid; at most 14")]
EVERYTHING = [{"reduction": 1}]
SYMBOLS = {"R": lambda N: math.isqrt(N // 49)}
LEARNED = {"norm", "sr"}


def average(attn):
    """Makes the convolution of a layer the mean of 2 x 2 tokens, without LayerNorm."""
    attn.norm = nn.Identity()
    with torch.no_grad():
        attn.sr.weight.copy_(torch.eye(h * d)[:, :, None, None] / 4)
        attn.sr.bias.zero_()


@every_grid
def test_sra_by_averaging_is_softmax_over_averages(grid):
    attn, expected, x = layer("sra", grid, reduction=2), layer("softmax", grid), draw(B, grid[0] * grid[1], h * d)
    average(attn)
    expected.qkv.load_state_dict(attn.qkv.state_dict())
    q, *keys_and_values = expected.project(x, grid)
    groups = bins(grid, (grid[0] // 2, grid[1] // 2), CPU)
    averages = (group_mean(y, groups)[:, :, 0] for y in keys_and_values)
    assert_equal(attn.attend(*attn.project(x, grid), grid), softmax(q, *averages))


def test_without_a_reduction_there_are_no_modules_for_it():
    attn = layer("sra", (4, 6), reduction=1)
    assert attn.sr is attn.norm is None


@pytest.mark.parametrize(("grid", "R"), [((8, 12), 4), ((10, 9), 4), ((15, 7), 2), ((20, 20), 8)])
def test_shrunk_tokens_are_stretched_from_the_middle_of_the_tokens_that_they_cover(grid, R):
    """A ramp of the middles is the ramp of the rows and columns again, between the first middle and the last."""
    rows, columns = (R * torch.arange(side, dtype=torch.float64) + (R - 1) / 2 for side in shrunk(grid, R))
    ramp = torch.stack([rows[:, None].expand(-1, len(columns)), columns.expand(len(rows), -1)], -1)  # (H/R, W/R, 2)
    found = stretched(ramp.flatten(0, 1)[None, None], grid, R)[0, 0].unflatten(0, grid)
    y, x = (torch.arange(side, dtype=torch.float64) for side in grid)
    assert_equal(found[..., 0], y.clamp(rows[0], rows[-1])[:, None].expand(grid))
    assert_equal(found[..., 1], x.clamp(columns[0], columns[-1]).expand(grid))
