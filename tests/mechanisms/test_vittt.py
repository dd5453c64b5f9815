"""ViT^3's test-time training."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from attention.mechanisms.vittt import vittt
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, h, one_head

# Outputs grow with the square of queries.
case = partial(Case, "vittt", mixes_values=False, bounded=False)

CASES = [case((5, 7)), case((4, 9))]
EFFECTS = {}
SYMMETRIES = [(set(), {})]
LEARNED = {"qkv_conv", "proj_conv", "w", "w_3"}
UNSIZED = True
NO_MATRIX = "not linear"  # norms of gradients


def ours(w):
    """One linear layer projects for all heads, and one the outputs of all."""
    parts = {name: w[f"qkv.{name}"].split([48, 24]) for name in ("weight", "bias")}
    qkv = {f"{layer}.{name}": parts[name][i] for name in parts for i, layer in enumerate(("qkv", "qkv_conv"))}
    proj, proj_conv = w["proj.weight"].split([16, 8], 1)
    outputs = {"proj.weight": proj, "proj.bias": w["proj.bias"], "proj_conv.weight": proj_conv}
    return {**qkv, **outputs, "w": torch.cat([w["w1"], w["w2"]], -1)[0], "w_3": w["w3"].flatten(1).mT}


VISION = {"vittt_6x9": ({}, ours)}

GRID, N = (6, 4), 24
Q, K, V = (draw(B, h + 1, N, d, seed=seed) for seed in range(3))
WEIGHTS = draw(h, d, d, seed=3), draw(h, d, d, seed=4), draw(9, d, seed=5)


def trained(q, k, v, w_1, w_2, w_3, grid=GRID):
    """`vittt` of queries, keys and values of all heads."""
    tokens, last = ([x[:, part] for x in (q, k, v)] for part in (slice(-1), slice(-1, None)))
    return vittt(*tokens, torch.cat(last, 1), torch.cat([w_1, w_2], -1), w_3, grid=grid)


def test_by_hand():
    """Two tokens, one channel. The unit x a * SiLU(x b) has the slopes x SiLU(x b) and x a * SiLU'(x b) x."""
    q, k, v = (torch.stack([one_head(*x)[0, 0]] * 2)[None] for x in ((1, 2), (1, -1), (3, 6)))
    a, b, filters = 2.0, 0.0, torch.arange(9.0, dtype=torch.float64)[:, None]
    y = trained(q, k, v, *(torch.tensor([[[x]]]).double() for x in (a, b)), filters, grid=(1, 2))
    slope_b = (3 * 1 * 2 * 0.5 * 1 + 6 * -1 * 2 * 0.5 * -1) / 2 / 3  # and that of a is 0
    b = slope_b / (1 + slope_b)
    expected = [2 * x * x * b / (1 + math.exp(-x * b)) for x in (1, 2)]
    # the filter's taps on the left, at the token and on the right: sums of products of keys and values
    slopes = torch.tensor([6 * 1, 3 * 1 + 6 * -1, 3 * -1]).double() / 6
    left, own, right = (filters[3:6, 0] + slopes / (1 + slopes.norm())).tolist()
    assert_equal(y[0, :, :, 0], torch.tensor([expected, [own + 2 * right, left + 2 * own]], dtype=torch.float64))


def test_keys_and_values_of_zero_train_nothing():
    y, (w_1, w_2, w_3) = trained(Q, 0 * K, V, *WEIGHTS), WEIGHTS
    assert_equal(y, trained(Q, K, 0 * V, *WEIGHTS))
    assert_equal(y[:, :h], (Q[:, :h] @ w_1) * F.silu(Q[:, :h] @ w_2))
    image = F.conv2d(Q[:, h].mT.unflatten(2, GRID), w_3.mT.reshape(d, 1, 3, 3), padding=1, groups=d)
    assert_equal(y[:, h], image.flatten(2).mT)


def test_a_step_lowers_the_inner_loss_and_is_bounded():
    def loss(y):
        return -(y * V).sum(-1).mean(-1) / 3

    before, after = (loss(trained(K, k, V, *WEIGHTS)) for k in (0 * K, K))
    assert (after < before).all()
    far = trained(Q, K, 1e6 * V, *WEIGHTS)
    assert far.abs().max() < 1e3


def test_units_ignore_the_order_of_tokens_and_the_convolution_does_not():
    order = torch.arange(N).flip(0)
    moved = trained(*(x[:, :, order] for x in (Q, K, V)), *WEIGHTS)[:, :, order]
    y = trained(Q, K, V, *WEIGHTS)
    assert_equal(moved[:, :h], y[:, :h])
    assert (moved[:, h] - y[:, h]).abs().max() > 0.1
