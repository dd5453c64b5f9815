"""Hydra attention."""

from functools import partial

import torch
import torch.nn.functional as F

from attention.mechanisms.hydra import hydra
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, d, draw, h, layer, one_head, tokens
from tests.support.symmetry import ALL

case = partial(Case, "hydra", (5, 7), mixes_values=False)

CASES = [case(), case({"local": True}), case(PREFIX)]
EFFECTS = {"local": ({}, True)}
SYMMETRIES = [(ALL, {}), (set(), {"local": True})]
UNSIZED = True
NO_MATRIX = "channels"  # each has weights of its own
VISION = {"hydra_7x10_cls": ({}, lambda w: {k.replace("out.", "proj."): x for k, x in w.items() if k != "in.x"})}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)


def test_by_hand():
    """Unit queries and keys, channel by channel, and no normaliser."""
    q, k, v = one_head((3, 4), (0, -2)), one_head((0, 5), (6, 8)), one_head((10, 20), (30, -40))
    # keys (0, 1) and (0.6, 0.8): state 0 * 10 + 0.6 * 30 = 18 and 1 * 20 - 0.8 * 40 = -12
    assert_equal(hydra(q, k, v), one_head((0.6 * 18, 0.8 * -12), (0, 12)))


def test_it_is_the_cosine_kernel_with_heads_of_one_channel():
    q, k = (F.normalize(x.transpose(1, 2).flatten(2), dim=-1) for x in (Q, K))  # (B, N, C)
    kernel = q[:, :, None] * k[:, None]  # (B, N, N, C)
    y = torch.einsum("bnmc,bmc->bnc", kernel, V.transpose(1, 2).flatten(2))
    assert_equal(hydra(Q, K, V).transpose(1, 2).flatten(2), y)


def test_lengths_have_no_effect_and_twice_the_tokens_double_the_output():
    lengths = draw(B, 1, N, 1, seed=7).exp()
    assert_equal(hydra(lengths * Q, K / lengths, V), hydra(Q, K, V))
    twice = hydra(*(torch.cat([x, x], 2) for x in (Q, K, V)))
    assert_equal(twice[:, :, :N], 2 * hydra(Q, K, V))


def test_the_number_of_heads_has_no_effect():
    attn, x = layer("hydra", GRID), draw(B, N, h * d)
    y, attn.num_heads, attn.head_dim = attn(x, GRID), 2 * h, d // 2
    assert_equal(attn(x, GRID), y)


def test_zero_vectors_are_finite():
    y = hydra(0 * Q, torch.cat([0 * K[:, :, :1], K[:, :, 1:]], 2), V)
    assert not y.any()
