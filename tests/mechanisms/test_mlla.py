"""Mamba-like linear attention."""

from functools import partial

import torch

from attention.mechanisms.mlla import mlla, turn
from attention.parts.features import elu_plus_one
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, h, identity, layer, one_head, tokens

case = partial(Case, "mlla", (5, 7), mixes_values=False)

CASES = [case(), case({"block": False, "local": False})]
EFFECTS = {"block": ({}, False), "local": ({}, False)}
SYMMETRIES = [(set(), {}), (set(), {"block": False, "local": False})]
LEARNED = {"convolution", "gate", "local_term"}
UNSIZED = True


def ours(w):
    """Weights of the attention without the block: values are the input, and no gate follows."""
    one = torch.eye(16, dtype=torch.float64)
    return {
        "qkv.weight": torch.cat([w["qk.weight"], one]),
        "qkv.bias": torch.cat([w["qk.bias"], 0 * one[0]]),
        **{"proj.weight": one, "proj.bias": 0 * one[0]},
        **{"local_term.weight": w["lepe.weight"], "local_term.bias": w["lepe.bias"]},
    }


VISION = {"mlla_attn_6x9": ({"block": False}, ours)}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)


def test_by_hand():
    """A single channel does not rotate: features 1 and 3, and 1 and 2."""
    y = mlla(one_head(0, 2), one_head(0, 1), one_head(10, 22), grid=(1, 2))
    torch.testing.assert_close(y, one_head(18, 18), rtol=0, atol=2e-5)


def test_heads_of_the_first_half_turn_by_rows_and_the_others_by_columns():
    x = torch.ones(1, 2, N, d, dtype=torch.float64)
    by_row, by_column = turn(x, GRID).unflatten(2, GRID)[0]
    assert_equal(by_row, by_row[:, :1].expand_as(by_row))
    assert_equal(by_column, by_column[:1].expand_as(by_column))
    assert_equal(by_row[0], x[0, 0, :4])
    assert (by_row[1:] - 1).abs().amin((0, 1, 2)) > 1e-4


def test_without_rotation_it_is_linear_attention():
    """All tokens but one are prefix tokens, which are not rotated."""
    kernel = elu_plus_one(Q) @ elu_plus_one(K).mT
    weights = mlla(Q, K, identity(N), grid=(1, 1))
    assert_equal(weights, kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * N))


def test_rotated_weights_may_be_negative_and_do_not_sum_to_one():
    weights = mlla(Q, K, identity(N), grid=GRID)
    assert (weights < 0).any()
    assert (weights.sum(-1) < 1).all()


def test_the_block_is_that_of_its_parts():
    attn, x = layer("mlla", GRID), draw(B, N, h * d)
    of_q, of_k, of_x = zip(attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3), strict=True)

    def linear(x, of):
        return x @ of[0].mT + of[1]

    def image(x):
        return x.mT.unflatten(2, GRID)

    z = attn.convolution(image(linear(x, of_x))).flatten(2).mT
    z = z * z.sigmoid()
    heads = [y.unflatten(2, (h, d)).transpose(1, 2) for y in (linear(z, of_q), linear(z, of_k), z)]
    y = mlla(*heads, grid=GRID).transpose(1, 2).flatten(2)
    y = y + attn.local_term(image(z)).flatten(2).mT
    gate = linear(x, (attn.gate[0].weight, attn.gate[0].bias))
    assert_equal(attn(x, GRID), attn.proj(y * gate * gate.sigmoid()))
