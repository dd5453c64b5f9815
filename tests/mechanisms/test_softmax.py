"""Softmax attention."""

import math
from functools import partial

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.mechanisms.softmax import softmax
from tests.support.cases import Case
from tests.support.comparisons import assert_equal
from tests.support.growth import SIDES, Growth, order, own_costs
from tests.support.inputs import one_head
from tests.support.symmetry import ALL

case = partial(Case, "softmax")

CASES = [case((5, 7)), case((5, 7), {"causal": True})]
EFFECTS = {"causal": ({}, True), "attn_drop": ({}, 0.5), "local": ({}, True)}
SYMMETRIES = [
    (ALL, {}),
    (set(), {"causal": True}),  # the order of the raster matters
]
GROWTH = [Growth(2, 2)]  # by its definition; fused kernels save less, see below
RELEASED = {"softmax_2d": {}}
UNSIZED = True


def test_by_hand():
    """Three tokens of one channel; their logits are logarithms of whole numbers."""
    q, k, v = one_head(0, 1, 2), one_head(0, math.log(2), math.log(3)), one_head(6, 12, 18)
    # weights of the queries: 1 1 1, 1 2 3, 1 4 9
    # 0: (6 + 12 + 18) / 3 = 12; 1: (6 + 24 + 54) / 6 = 14; 2: (6 + 48 + 162) / 14 = 108 / 7
    assert_equal(softmax(q, k, v), one_head(12, 14, 108 / 7))
    # later tokens hidden, 0: 6; 1: (6 + 24) / 3 = 10
    assert_equal(softmax(q, k, v, causal=True), one_head(6, 10, 108 / 7))


def test_logits_are_divided_by_the_root_of_the_channels():
    """d = 4: q . k = 2 log 3, and 2 log 3 / sqrt(4) = log 3; weights 1, 3."""
    q, k = one_head((1, 1, 1, 1)), one_head((0, 0, 0, 0), (math.log(3), math.log(3), 0, 0))
    v = one_head((0, 1, 2, 3), (4, 5, 6, 7))
    assert_equal(softmax(q, k, v), one_head((3, 4, 5, 6)))  # (0 + 3 * 4) / 4 = 3, and so on


def test_fused_softmax_saves_no_weights():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        saved_bytes = [own_costs("softmax", side, {}, "cpu")[1] for side in SIDES]
    assert order(saved_bytes) == pytest.approx(1, abs=0.15)
