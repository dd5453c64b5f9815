"""EVA on clusters of hashed tokens, and groups along the order of the hash."""

from functools import partial

import torch

from attention.mechanisms.eva_lsh import eva_lsh, in_order
from attention.parts.features import xi
from attention.parts.geometry import Windows
from attention.parts.groups import bins, group_mean
from attention.parts.hashing import hash_clusters
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal, same_cluster
from tests.support.growth import Growth
from tests.support.inputs import CPU, B, d, draw, every_grid, h, tokens
from tests.support.symmetry import ALL

case = partial(Case, "eva_lsh", (3, 5), stochastic=True, well_conditioned=False)
SMALL = {"cluster_size": 4, "num_landmarks": 3}

CASES = [case(SMALL), case({**SMALL, **PREFIX, "partition": "mask", "num_samples": 2, "pool": "max"})]
EFFECTS = {
    **effects(SMALL, cluster_size=5, num_landmarks=4, released=True, partition="mask", landmark_transform="linear"),
    **effects(SMALL, pool="max", num_samples=2, mu="q", mu_scale=0.5, noise="released", local=True),
}
SYMMETRIES = [(ALL, {"cluster_size": 5, "num_landmarks": 4, "num_samples": 2})]
GROWTH = [Growth(1, 1)]  # sorting, N log N, is no MAC and saves N indices
REFUSED = [
    ({"cluster_size": 197}, r"attention\(eva_lsh\).cluster_size = 197: .* at most 196"),
    ({"num_landmarks": 197}, r"attention\(eva_lsh\).num_landmarks = 197 .* nearest valid: 196"),
    ({"partition": "complement"}, r"attention\(eva_lsh\).partition: 'complement' is not a choice"),
]
EVERYTHING = [
    {"cluster_size": 24, "num_landmarks": 5, "partition": "mask"},
    {"cluster_size": 24, "num_landmarks": 24, "partition": "mask", "num_samples": 2},
]
SYMBOLS = {"|E|": 49, "c": 49}
LEARNED = {"landmarks"}


def hashed(q, k, size, count, partition=lambda groups, windows: groups):
    """Orders of queries and keys by the hash, and clusters and groups along these orders."""
    N = q.shape[2]
    directions, order = draw(h, 1, d + 2, seed=4), (1, N)
    orders = [x.flatten(2) for x in hash_clusters(q, k, directions, 1)]
    windows = Windows(order, (1, size))
    return directions, orders, {"groups": partition(bins(order, (1, count), CPU), windows), "windows": windows}


@every_grid
def test_clusters_are_those_of_the_hash_and_groups_chunks_of_its_order(grid):
    """Computes equation 16 with dense masks from the hash's ranks."""
    q, k, v = tokens(grid)
    directions, orders, options = hashed(q, k, 5, 4)
    mu, omega = draw(B, h, 1, 4, d, seed=7), draw(B, h, 1, 4, 1, d, seed=8)
    k_tilde = draw(B, h, 1, 4, d, seed=9)
    exact = (q @ k.mT * d**-0.5).exp() * same_cluster(q, k, directions, 5)[:, :, 0]
    on_groups = (q @ k_tilde[:, :, 0].mT * d**-0.5).exp()  # (B, h, N, c)
    rank, edges = orders[1].argsort(-1)[:, :, None], torch.arange(5)[:, None] * q.shape[2] // 4
    members = (edges[:-1] <= rank) & (rank < edges[1:])  # (B, h, c, N)
    features = xi(k[:, :, None] * d**-0.25, omega[:, :, 0]) * members
    beta = features @ v / features.sum(-1, keepdim=True)
    expected = (exact @ v + on_groups @ beta) / (exact.sum(-1) + on_groups.sum(-1))[..., None]
    assert_equal(eva_lsh(q, k, v, *orders, k_tilde, mu, omega, **options), expected)


def test_groups_of_hashed_tokens_are_nearer_to_their_means_than_chunks_of_the_raster():
    """Keys of a group are similar, as one summary for all of them requires."""
    k = draw(B, h, 64, d)
    _, (_, order), options = hashed(k, k, 8, 8)
    spread = [
        (x.unflatten(2, (8, 8)) - group_mean(x, options["groups"])[:, :, 0, :, None]).square().mean().item()
        for x in (k, in_order(k, order))
    ]
    assert spread[1] < 0.9 * spread[0]
