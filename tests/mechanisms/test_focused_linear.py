"""Focused linear attention."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attention.mechanisms.focused_linear import focus, focused_linear
from attention.parts.groups import bins, group_mean
from tests.mechanisms.test_sra import average
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import CPU, B, d, draw, every_grid, h, identity, layer, one_head, tokens

# 1e-6 is added to the mean of a query's weights; powers of rounded channels.
case = partial(Case, "focused_linear", (5, 7), mixes_values=False, well_conditioned=False)

SHRUNK = {"reduction": 2}
CASES = [
    case(),
    case({"local": False, "power": 2.5}),
    case(PREFIX),
    case({**SHRUNK, **PREFIX}, stock_keys=False),
    case({"reduction": 3, "stretch": "raster"}, stock_keys=False),
]
EFFECTS = {"local": ({}, False), "power": ({}, 2.0), "reduction": ({}, 2), "stretch": (SHRUNK, "raster")}
SYMMETRIES = [(set(), {}), (set(), {"local": False})]
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: SHRUNK)]
LEARNED = {"feature_scale", "key_positions", "local_term"}
UNSIZED = True
REFUSED = [
    ({"power": 0.5}, r"attention\(focused_linear\).power = 0.5 is below"),
    ({"reduction": 15}, r"attention\(focused_linear\).reduction = 15: larger than the 14x14 grid; at most 14"),
    ({"stretch": "raster"}, r"stretch = raster: acts with reduction above 1 and local; set stretch: image"),
    ({**SHRUNK, "stretch": "raster", "local": False}, r"stretch = raster: acts with reduction"),
]
VISION = {
    "focused_linear_6x9": (
        {},
        lambda w: {
            "qkv.weight": torch.cat([w["q.weight"], w["kv.weight"]]),
            "qkv.bias": torch.cat([w["q.bias"], w["kv.bias"]]),
            "proj.weight": w["proj.weight"],
            "proj.bias": w["proj.bias"],
            "local_term.weight": w["dwc.weight"],
            "local_term.bias": w["dwc.bias"],
            "key_positions.table": w["positional_encoding"][0].mT,
            "feature_scale": w["scale"].flatten(),
        },
    )
}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
SCALE = draw(h, d, seed=7)
ONE = torch.full((h, d), math.log(math.e - 1), dtype=torch.float64)  # softplus 1
POWERS = pytest.mark.parametrize("power", [1.0, 2.0, 3.0, 8.0, 32.0])


def test_by_hand():
    """Channels 3 and 4, of length 5, have squares 9 and 16, of length sqrt(337), which are rescaled to length 5."""
    y = focus(one_head((3, 4), (0, 7), (-1, 2)), ONE[:1, :2], 2.0)
    factor = 5 / 337**0.5
    torch.testing.assert_close(y, one_head((9 * factor, 16 * factor), (0, 7), (0, 2)), rtol=0, atol=2e-6)


@POWERS
def test_length_is_kept_over_all_heads(power):
    t = (Q.relu() + 1e-6) / torch.nn.functional.softplus(SCALE)[:, None]
    assert_equal(focus(Q, SCALE, power).square().sum((1, 3)), t.square().sum((1, 3)))
    assert_equal(focus(Q, SCALE, 1.0), t)


def test_a_large_power_keeps_the_largest_channel():
    x = focus(Q, ONE, 3000.0)
    flat = x.transpose(1, 2).flatten(2)
    length = (Q.relu() + 1e-6).square().sum((1, 3)).sqrt()
    assert_equal(flat.amax(-1), length)
    assert (flat > 1e-6 * flat.amax(-1, keepdim=True)).sum(-1).eq(1).all()


@POWERS
def test_weights_are_not_negative_and_sum_to_almost_one(power):
    weights = focused_linear(Q, K, identity(N), SCALE, power=power)
    assert (weights >= 0).all()
    kernel = focus(Q, SCALE, power) @ focus(K, SCALE, power).mT
    expected = kernel.mean(-1) / (kernel.mean(-1) + 1e-6)
    assert_equal(weights.sum(-1), expected)


def test_length_of_a_query_has_almost_no_effect():
    difference = focused_linear(5 * Q, K, V, SCALE, power=3.0) - focused_linear(Q, K, V, SCALE, power=3.0)
    assert 0 < difference.abs().max() < 1e-2  # what is added to the mean weight, some of which are tiny


@every_grid
def test_a_reduction_by_averaging_attends_to_averages(grid):
    """Keys and values are those of the 2 x 2 means, and the local term convolves the means on the grid again."""
    small = (grid[0] // 2, grid[1] // 2)
    attn, whole = layer("focused_linear", grid, **SHRUNK), layer("focused_linear", small, local=False)
    average(attn)
    whole.load_state_dict({key: x for key, x in attn.state_dict().items() if key in whole.state_dict()})
    x = draw(B, grid[0] * grid[1], h * d)
    means = group_mean(x[:, None], bins(grid, small, CPU))[:, 0, 0]
    q, k, v = attn.project(x, grid)
    assert_equal(q, whole.project(x, grid)[0])
    assert_equal(torch.cat([k, v]), torch.cat(whole.project(means, small)[1:]))
    y = whole.attend(q, k, v, small)
    image = F.interpolate(v.mT.flatten(0, 1).unflatten(2, small), grid, mode="bilinear").flatten(2).unflatten(0, (B, h))
    assert_equal(attn.attend_all((q, k, v), grid), y + attn.local_term.convolve(image.mT, grid))


def test_the_released_code_stretches_values_along_the_raster_order():
    attn = layer("focused_linear", (4, 8), **SHRUNK, stretch="raster")
    v = draw(B, h, 8, d)
    expected = F.interpolate(v.mT.flatten(0, 1), 32, mode="linear", align_corners=False).unflatten(0, (B, h)).mT
    assert_equal(attn.local_values(v, (4, 8)), expected)


def test_a_key_mask_is_refused_with_a_reduction():
    with pytest.raises(ValueError, match=r"attention\(focused_linear\): takes no key_mask: its convolution"):
        layer("focused_linear", GRID, **SHRUNK)(draw(B, N, h * d), GRID, torch.ones(B, N, dtype=torch.bool))


def test_positions_of_keys_start_at_zero_and_are_resampled_on_another_grid():
    attn, x = layer("focused_linear", GRID), draw(B, 48, h * d)
    with torch.no_grad():
        attn.key_positions.table.copy_(draw(h * d, 1).expand(-1, N))
    bias, (y, same) = attn.key_positions.table[:, 0].detach().clone(), (attn(x, (6, 8)), attn(x, (8, 6)))
    assert (y - same).abs().max() > 1e-6  # the local term
    with torch.no_grad():  # a table of one vector is a bias of keys on any grid
        attn.key_positions.table.zero_()
        attn.qkv.bias[h * d : 2 * h * d] += bias
    assert_equal(attn(x, (6, 8)), y)
