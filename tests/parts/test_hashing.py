"""Clusters of equal size by asymmetric hashing."""

import pytest
import torch

from attention.parts.geometry import gather_tokens
from attention.parts.hashing import asymmetric_transform, at_ranks, cluster_mask, equal_clusters, ranks
from tests.support.comparisons import assert_equal
from tests.support.inputs import CPU, B, d, draw, every_grid, h, tokens


@every_grid
def test_asymmetric_transform_turns_products_into_distances_on_a_sphere(grid):
    q, k, _ = tokens(grid)
    on_q, on_k = asymmetric_transform(q, k)
    M2 = q.square().sum(-1).amax(-1) + k.square().sum(-1).amax(-1)
    for x in (on_q, on_k):
        assert_equal(x.square().sum(-1), M2[..., None].expand(x.shape[:-1]))
    distance = (on_q[..., :, None, :] - on_k[..., None, :, :]).square().sum(-1)
    assert_equal(distance, 2 * (M2[..., None, None] - q @ k.mT))


@pytest.mark.parametrize("size", [1, 4, 5, 24])
def test_clusters_hold_every_token_once_in_order_of_its_hash(size):
    order, x = draw(B, h, 2, 24), draw(B, h, 24, d)
    clusters = equal_clusters(order, size)
    valid = cluster_mask(24, size, CPU)
    assert valid.sum() == 24
    for index, of in zip(clusters.flatten(0, 2), order.flatten(0, 2), strict=True):
        assert torch.equal(index[valid], of.argsort())
    again = at_ranks(gather_tokens(x, clusters), ranks(clusters, 24))
    assert torch.equal(again, x[:, :, None].expand(-1, -1, 2, -1, -1))
