"""SMYRF."""

from functools import partial

import pytest
import torch

from attention.mechanisms.smyrf import smyrf
from tests.support.cases import Case
from tests.support.comparisons import assert_equal, same_cluster
from tests.support.growth import Growth
from tests.support.inputs import B, d, draw, every_grid, h, shuffled, tokens
from tests.support.symmetry import ALL

case = partial(Case, "smyrf", (5, 7), stochastic=True, well_conditioned=False)
SMALL = {"cluster_size": 7}

CASES = [case(SMALL), case({"cluster_size": 8, "num_rounds": 3})]
EFFECTS = {"cluster_size": (SMALL, 8), "num_rounds": (SMALL, 1), "attn_drop": (SMALL, 0.5), "local": (SMALL, True)}
SYMMETRIES = [(ALL, {"cluster_size": 5})]
GROWTH = [Growth(1, 1)]  # sorting, N log N, is no MAC and saves N indices
REFUSED = [({"cluster_size": 197}, r"attention\(smyrf\).cluster_size = 197: .* at most 196")]
EVERYTHING = [{"cluster_size": 24, "num_rounds": 1}, {"cluster_size": 24, "num_rounds": 3}]
SYMBOLS = {"c": 49, "r": 2}


@every_grid
@pytest.mark.parametrize("size", [4, 5])
def test_smyrf_is_softmax_under_the_masks_of_its_clusters_weighed_by_their_mass(grid, size):
    q, k, v = tokens(grid)
    directions = draw(h, 2, d + 2, seed=3)
    logits = (q @ k.mT * d**-0.5)[:, :, None].masked_fill(~same_cluster(q, k, directions, size), -torch.inf)
    expected = (logits.logsumexp(-1, keepdim=True).softmax(2) * (logits.softmax(-1) @ v[:, :, None])).sum(2)
    assert_equal(smyrf(q, k, v, directions, cluster_size=size), expected)


def test_smyrf_clusters_near_tokens():
    """Pairs with large products meet more often than by chance (1 in 8)."""
    q = draw(B, h, 64, d)
    k = q[:, :, shuffled(64)]
    meet = same_cluster(q, k, draw(h, 50, d + 2, seed=3), 8).double().mean(2)
    best = (q @ k.mT).argmax(-1, keepdim=True)
    assert_equal(meet.mean(-1), torch.full_like(meet[..., 0], 1 / 8))
    assert meet.gather(-1, best).mean() > 2 / 8
