"""HiLo attention."""

import math
from functools import partial

import pytest
import torch

from attention.mechanisms.hilo import hilo
from attention.mechanisms.local import local
from attention.mechanisms.softmax import softmax
from attention.parts.geometry import Windows
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal, weights_of
from tests.support.growth import Growth
from tests.support.inputs import draw, every_grid, h, layer, one_head, tokens
from tests.support.symmetry import BLOCKS

case = partial(Case, "hilo")
HALF = {"window_size": 2, "alpha": 0.5}

CASES = [
    case((5, 7), HALF),
    case((6, 8), {"window_size": 2}),  # two of three heads are low
    case((5, 7), {**HALF, **PREFIX}),
]
EFFECTS = {"window_size": (HALF, 3), "alpha": (HALF, 0.9), "attn_drop": (HALF, 0.5), "local": (HALF, True)}
SYMMETRIES = [(BLOCKS, HALF), ({"transposed"}, {**HALF, "window_size": 3})]
GROWTH = [Growth(1, 1), Growth(2, 2, lambda side: {"alpha": 1.0})]
REFUSED = [
    ({"window_size": 15}, r"attention\(hilo\).window_size = 15: larger than the 14x14 grid; at most 14"),
    ({"alpha": 1.5}, r"attention\(hilo\).alpha = 1.5 is above"),
]
EVERYTHING = [{"window_size": 1}, {"window_size": 6, "alpha": 0.0}]
SYMBOLS = {"w": 2, "L": 128}


def ours(w):
    """Reorders the module's weights: it has a projection per branch, and high heads before low heads."""

    def joined(name: str) -> torch.Tensor:
        (q, k, v), (k_low, v_low) = w[f"h_qkv.{name}"].chunk(3), w[f"l_kv.{name}"].chunk(2)
        return torch.cat([q, w[f"l_q.{name}"], k, k_low, v, v_low])

    return {
        **{f"qkv.{name}": joined(name) for name in ("weight", "bias")},
        "proj.weight": torch.block_diag(w["h_proj.weight"], w["l_proj.weight"]),
        "proj.bias": torch.cat([w["h_proj.bias"], w["l_proj.bias"]]),
    }


VISION = {"hilo_4x6_w2_a05": (HALF, ours)}


def test_by_hand():
    """One head of windows of two tokens, the last token alone; one head of the windows' means, with weights 1 3 2."""
    q, k = one_head(1, 1, 1, 1, 1), one_head(0, math.log(2), math.log(3), math.log(3), math.log(2))
    v = one_head(6, 12, 30, 60, 18)
    q, k, v = (torch.cat([x, x], 1) for x in (q, k, v))
    k[:, 1] = k[:, 1].new_tensor([-1, 1, math.log(3) - 2, math.log(3) + 2, math.log(2)])[None, :, None]
    y = hilo(q, k, v, windows=Windows((1, 5), (1, 2)), num_high=1)
    assert_equal(y[:, :1], one_head(10, 10, 45, 45, 18))
    assert_equal(y[:, 1:], one_head(*[(9 + 3 * 45 + 2 * 18) / 6] * 5))


@every_grid
def test_one_branch_alone_is_local_attention_or_softmax(grid):
    q, k, v = tokens(grid)
    windows = Windows(grid, (3, 3))
    assert_equal(hilo(q, k, v, windows=windows, num_high=h), local(q, k, v, windows=windows))
    pooled = (windows.mean(x) for x in (k, v))
    assert_equal(hilo(q, k, v, windows=windows, num_high=0), softmax(q, *pooled))


@every_grid
def test_weights_are_positive_and_sum_to_one(grid):
    q, k, _ = tokens(grid)
    weights = weights_of(hilo, q, k, windows=Windows(grid, (3, 3)), num_high=1)
    assert (weights >= 0).all()
    assert_equal(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights[:, 0] > 0).sum(-1).max() == 9
    assert (weights[:, 1] > 0).all()


def test_means_are_of_the_tokens_that_a_window_has():
    """A 3 x 5 grid in windows of 2 x 2: windows of four tokens, of two at the sides, and of one in the corner."""
    x = draw(1, 1, 15, 2)
    image, means = x.view(3, 5, 2), Windows((3, 5), (2, 2)).mean(x).view(2, 3, 2)
    for i, j in ((0, 0), (0, 2), (1, 1), (1, 2)):
        assert_equal(means[i, j], image[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((0, 1)))


@pytest.mark.parametrize(
    ("heads", "alpha", "low"), [(4, 0.9, 3), (3, 0.9, 2), (1, 0.9, 0), (1, 1.0, 1), (5, 0.0, 0), (10, 0.7, 7)]
)
def test_part_of_the_heads_is_rounded_down(heads, alpha, low):
    attn = case((4, 6)).build(dim=4 * heads, num_heads=heads, window_size=2, alpha=alpha)
    assert heads - attn.config.num_high(heads) == low
    everything = case((4, 6)).build(dim=4 * heads, num_heads=heads, window_size=1, alpha=alpha)
    assert everything.config.num_high(heads) == 0


def test_high_heads_come_first():
    """High heads alone do not change if another window changes."""
    grid = (4, 6)
    attn, x = layer("hilo", grid, **HALF), draw(1, 24, 16)
    q, k, v = attn.project(x, grid)
    other = [y.clone() for y in (k, v)]
    for y in other:
        y[:, :, -1] += 1
    difference = attn.attend(q, *other, grid) - attn.attend(q, k, v, grid)
    assert not difference[:, 0, 0].any()
    assert (difference[:, 1, 0].abs() > 1e-6).all()
