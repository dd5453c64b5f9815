"""Magnitude-aware linear attention."""

from functools import partial

import torch

from attention.mechanisms.mala import mala
from tests.mechanisms.test_rala import EFFECTS, LEARNED, SYMMETRIES, UNSIZED, ours  # noqa: F401  # facts
from tests.support.cases import PREFIX, Case
from tests.support.inputs import B, h, identity, one_head, tokens

case = partial(Case, "mala", (5, 7), mixes_values=False, positive_weights=False, bounded=False)

CASES = [case(), case({"local": False}), case(PREFIX)]
VISION = {"mala_6x9": ({}, ours)}

GRID, N = (6, 4), 24
Q, K, V = tokens(GRID)
UNTURNED = partial(mala, grid=(1, 1))  # all tokens but one are prefix tokens


def close(x, y):
    torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


def test_by_hand():
    """Features 1 and 3 of queries, 1 and 2 of keys, so that z is 1.5 and 4.5. One channel does not turn."""
    y = mala(one_head(0, 2), one_head(0, 1), one_head(10, 20), grid=(1, 2))
    first = (1 + 1 / 1.5) * (1 * 10 + 2 * 20) / 2 - 1.5 * 15
    second = (1 + 1 / 4.5) * (3 * 10 + 6 * 20) / 2 - 4.5 * 15
    close(y, one_head(first, second))


def test_weights_sum_to_one_and_a_constant_value_is_kept():
    close(UNTURNED(Q, K, identity(N)).sum(-1), torch.ones(B, h, N, dtype=torch.float64))
    close(UNTURNED(Q, K, V[:, :, :1].expand_as(V)), V[:, :, :1].expand_as(V))


def test_the_weights_of_a_longer_query_are_further_apart():
    """In linear attention they are the same."""
    short, long = (one_head(s, s) for s in (1, 9))  # features 2 and 10
    keys = one_head(0, 4)
    spread = [UNTURNED(q, keys, identity(2)[:1, :1]).diff().abs()[0, 0, 0, 0] for q in (short, long)]
    # halves of (1 + 1/z) w for w = (2, 10), of mean z = 6, and for w = (10, 50), of mean 30
    close(torch.stack(spread), torch.tensor([4 + 4 / 6, 20 + 20 / 30], dtype=torch.float64))


def test_keys_that_are_all_the_same_weigh_the_same():
    close(UNTURNED(Q, K[:, :, :1].expand_as(K), V), V.mean(2, keepdim=True).expand_as(V))
