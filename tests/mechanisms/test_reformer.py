"""Reformer."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention.mechanisms.reformer import hash_buckets, reformer, rotation_counts
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal, under_mask, weights_of
from tests.support.growth import Growth
from tests.support.inputs import B, d, draw, every_grid, h, tokens

# its keys are unit queries
case = partial(Case, "reformer", (5, 7), stochastic=True, well_conditioned=False, stock_keys=False)
SMALL = {"chunk_size": 8}

CASES = [case(SMALL), case({"chunk_size": 4, "num_rounds": 2}), case({**SMALL, **PREFIX})]
EFFECTS = {"chunk_size": (SMALL, 6), "num_rounds": (SMALL, 1), "local": (SMALL, True)}
SYMMETRIES = [(set(), {"chunk_size": 4})]
GROWTH = [Growth(1, 1)]  # as SMYRF; of the hash, N^2 C / c up to N = c^2, little is left beside 4 l N c C
SYMBOLS = {"l": 4, "c": 49}


def buckets(q: Tensor, rounds: int, half: int) -> Tensor:
    return hash_buckets(q, draw(h, rounds, d, half, seed=9))


@every_grid
@pytest.mark.parametrize("rounds", [1, 3])
def test_reformer_in_one_or_two_chunks_is_softmax_over_the_others(grid, rounds):
    q, _, v = tokens(grid)
    N, k = q.shape[2], torch.nn.functional.normalize(q, dim=-1)
    expected = under_mask(q, k, v, ~torch.eye(N, dtype=torch.bool))
    for c in (N, N + 5, math.ceil(N / 2)):  # of two chunks each sees the other as the one before
        assert_equal(reformer(q, k, v, buckets(q, rounds, 3), chunk_size=c), expected)


def test_reformer_is_blind_to_equal_rounds():
    q, _, v = tokens((5, 7))
    k, once = torch.nn.functional.normalize(q, dim=-1), buckets(q, 1, 3)
    assert_equal(reformer(q, k, v, once.repeat(1, 1, 3, 1), chunk_size=6), reformer(q, k, v, once, chunk_size=6))


def test_reformer_attends_to_itself_only_when_alone():
    q, _, v = tokens((3, 4))
    k, each = torch.nn.functional.normalize(q, dim=-1), torch.arange(12).expand(B, h, 2, 12)
    assert_equal(reformer(q[:, :, :1], k[:, :, :1], v[:, :, :1], each[..., :1], chunk_size=4), v[:, :, :1])
    assert weights_of(reformer, q, k, each, chunk_size=4).diagonal(dim1=-2, dim2=-1).abs().max() == 0


def test_reformer_hashes_near_queries_alike():
    """Queries of equal direction always share a bucket; opposite queries never do."""
    q = draw(1, 1, 500, d)
    R, other = draw(1, 4, d, 8, seed=1), draw(1, 4, d, 3, seed=2)
    bucket = hash_buckets(q, R)
    assert torch.equal(bucket, hash_buckets(3 * q, R))
    assert torch.equal((bucket + 8) % 16, hash_buckets(-q, R))
    assert bucket.unique().tolist() == list(range(16))
    assert torch.equal(hash_buckets(q, R, other), 6 * bucket + hash_buckets(q, other))


@pytest.mark.parametrize(("chunks", "size", "counts"), [(16, 49, (16,)), (49, 49, (49,)), (64, 49, (6, 6))])
def test_reformer_has_twice_as_many_buckets_as_chunks(chunks, size, counts):
    assert rotation_counts(chunks, size) == counts
    assert math.prod(2 * count for count in counts) >= 2 * chunks
