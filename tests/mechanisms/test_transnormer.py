"""TransNormer: Norm attention in the second half of the layers, Diag attention, in windows, in the first."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attention.mechanisms.linear import linear
from attention.mechanisms.transnormer import rela, transnormer
from attention.parts.geometry import Windows
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import d, draw, h, layer, tokens
from tests.support.symmetry import ALL, BLOCKS

norm_layer = partial(Case, "transnormer", (5, 7), mixes_values=False, far_keys_vanish=False)  # elu + 1
diag_layer = partial(Case, "transnormer", (5, 7), op="local")
diag_layer_t1 = partial(diag_layer, op="rela", mixes_values=False, positive_weights=False)  # rectified weights
SMALL = {"depth": 2, "window_size": 3}
WINDOW = {"window_size": 2}
CAUSAL = {"causal": True}

CASES = [
    norm_layer(),
    norm_layer({"variant": "t1", "norm": "heads"}),
    diag_layer(SMALL),
    diag_layer_t1({**SMALL, "variant": "t1"}),
    norm_layer(PREFIX),
    diag_layer_t1({**SMALL, "variant": "t1", **PREFIX}),
    norm_layer(CAUSAL),
    diag_layer({**CAUSAL, "depth": 2, "window_size": 8}),
]
EFFECTS = {
    **effects({}, variant="t1", norm="heads", causal=True, local=True),
    **effects(SMALL, window_size=2, layout="1d"),
}
SYMMETRIES = [
    (ALL, {}),
    (ALL, {"variant": "t1"}),
    *((BLOCKS, {**WINDOW, "depth": 2, "variant": x}) for x in ("t1", "t2")),
    (set(), CAUSAL),
]
GROWTH = [
    Growth(1, 1),  # a Norm layer
    Growth(1, 1, lambda side: {"layer": 0, "depth": 2}),  # a Diag layer
    Growth(1, 1, lambda side: {**CAUSAL, "depth": 2}),
]
EVERYTHING = [{"window_size": 6, "depth": 2}, {**CAUSAL, "window_size": 24, "depth": 2}]
REFUSED = [
    ({**CAUSAL, "layout": "2d", "depth": 2}, r"attention\(transnormer\).layout = 2d: .*; set layout: 1d"),
    ({"window_size": 15, "depth": 2}, r"attention\(transnormer\).window_size = 15: larger than the 14x14 grid"),
]
SYMBOLS = {"|E|": 49}
LEARNED = {"gain"}
NO_MATRIX = "not linear"  # LayerNorm of outputs

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)


@pytest.mark.parametrize("norm", ["merged", "heads"])
@pytest.mark.parametrize("variant", ["t1", "t2"])
def test_norm_attention_ignores_the_length_of_values_and_has_unit_mean_square(variant, norm):
    gain = torch.ones(h, d, dtype=torch.float64)
    y, short, long = (transnormer(Q, K, a * V, gain, variant=variant, norm=norm) for a in (1, 0.01, 700))
    assert_equal(short, y)
    assert_equal(long, y)
    mean_square = y.square().mean((1, 3) if norm == "merged" else 3)
    assert_equal(mean_square, torch.ones_like(mean_square))


def test_norm_attention_divides_out_how_many_tokens_came_before():
    """With equal tokens, every prefix gives the output of one token, whatever the sum of its weights."""
    q, k, v = (x[:, :, :1].expand_as(x) for x in (Q, K, V))
    y = transnormer(q, k, v, draw(h, d, seed=7), variant="t2", norm="merged", causal=True)
    torch.testing.assert_close(y, y[:, :, :1].expand_as(y))


def test_both_norms_of_a_single_head_are_one():
    gain = draw(1, d, seed=7)
    a, b = (transnormer(Q[:, :1], K[:, :1], V[:, :1], gain, variant="t2", norm=norm) for norm in ("merged", "heads"))
    assert_equal(a, b)


def test_norm_attention_points_where_linear_attention_does():
    """The normaliser of one query is a positive number, which RMSNorm divides out."""
    gain = torch.ones(h, d, dtype=torch.float64)
    y = transnormer(Q, K, V, gain, variant="t2", norm="heads")
    assert_equal(F.normalize(y, dim=-1), F.normalize(linear(Q, K, V), dim=-1))


def test_diag_attention_of_t1_with_the_grid_as_window_is_dense_relu_attention():
    gain = draw(h, d, seed=7)
    dense = (Q @ K.mT / d**0.5).relu() @ V
    expected = dense * dense.square().mean((1, 3), keepdim=True).rsqrt() * gain[:, None]
    assert_equal(rela(Q, K, V, gain, windows=Windows(GRID, GRID), norm="merged"), expected)


@pytest.mark.parametrize("depth", [1, 2, 3, 12])
def test_diag_attention_stands_in_the_first_half_of_the_layers(depth):
    layers = [layer("transnormer", GRID, layer=i, depth=depth, window_size=3) for i in range(depth)]
    assert [attn.in_windows for attn in layers] == [i + 1 <= depth / 2 for i in range(depth)]
    assert [hasattr(attn, "gain") for attn in layers] == [not attn.in_windows for attn in layers]
