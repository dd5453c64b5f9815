"""Sparse Transformer."""

import math
from functools import partial

import pytest
import torch

from attention import OptionError
from attention.mechanisms.sparse_transformer import sparse_transformer
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal, under_mask
from tests.support.growth import Growth
from tests.support.inputs import B, d, draw, every_grid, h, layer, tokens

case = partial(Case, "sparse_transformer", (5, 7))

CASES = [case({"num_summary": 2}), case({"block_size": 8, "num_summary": 3}), case({"num_summary": 2, **PREFIX})]
EFFECTS = {"block_size": ({}, 5), "num_summary": ({}, 2), "attn_drop": ({}, 0.5), "local": ({}, True)}
SYMMETRIES = [(set(), {})]
GROWTH = [
    Growth(1.5, 1.5),  # blocks of a row, b = sqrt(N)
    Growth(2, 2, lambda side: {"block_size": 4}),
]
REFUSED = [
    ({"block_size": 197}, r"block_size = 197: larger than the 196 tokens .*; at most 196"),
    ({"num_summary": 15}, r"num_summary = 15: a block has 14 tokens; at most 14"),
]
EVERYTHING = [{"block_size": 24}, {"block_size": 4, "num_summary": 4}]
SYMBOLS = {"b": math.isqrt, "c": 1}


@every_grid
@pytest.mark.parametrize(("b", "c"), [(4, 1), (4, 3), (6, 2)])
def test_sparse_transformer_is_the_union_of_both_fixed_patterns(grid, b, c):
    q, k, v = tokens(grid)
    n = torch.arange(q.shape[2])
    own, summary = n[:, None] // b == n // b, (n % b >= b - c).expand(len(n), -1)
    assert_equal(sparse_transformer(q, k, v, block_size=b, num_summary=c), under_mask(q, k, v, own | summary))


def test_a_grid_of_rows_shorter_than_their_summary_is_refused_when_it_comes():
    attn = layer("sparse_transformer", (6, 4), num_summary=4)
    with pytest.raises(OptionError, match=r"sparse_transformer\).num_summary = 4: a block has 3 tokens; at most 3"):
        attn(draw(B, 24, h * d), (8, 3))
