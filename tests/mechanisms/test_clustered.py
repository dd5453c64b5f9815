"""Clustered attention."""

import math
from functools import partial

import pytest
import torch

from attention.mechanisms.clustered import clustered, hamming_clusters, hash_bits
from attention.mechanisms.softmax import softmax
from tests.support.cases import Case, effects
from tests.support.comparisons import assert_equal
from tests.support.inputs import B, draw, every_grid, h, shuffled, tokens
from tests.support.symmetry import GRID

case = partial(Case, "clustered", (5, 7), stochastic=True, well_conditioned=False)
SMALL = {"num_clusters": 5, "num_top_keys": 3, "num_iterations": 2}

CASES = [case({"num_clusters": 5, "num_top_keys": 6}), case({"num_clusters": 5, "num_top_keys": 0})]
EFFECTS = effects(SMALL, num_clusters=4, num_top_keys=0, num_bits=8, num_iterations=0, local=True)
SYMMETRIES = [(set(), {"num_clusters": 4, "num_top_keys": 5})]  # the first centroids depend on positions; see below
REFUSED = [
    ({"num_clusters": 197}, r"num_clusters = 197: more than the tokens .*; at most 196"),
    ({"num_top_keys": 197}, r"num_top_keys = 197: more than the tokens .*; at most 196"),
    ({"num_bits": 64}, r"num_bits = 64 is above the largest valid value 63"),
]
EVERYTHING = [{"num_clusters": 5, "num_top_keys": 24}]
SYMBOLS = {"J": 49, "k": 32, "bits": 63}


@every_grid
@pytest.mark.parametrize("k_top", [0, 3])
def test_clusters_of_one_query_or_of_equal_queries_are_softmax(grid, k_top):
    q, k, v = tokens(grid)
    N = q.shape[2]
    alone = shuffled(N).expand(B, h, N)
    assert_equal(clustered(q, k, v, alone, num_clusters=N, num_top_keys=k_top), softmax(q, k, v))
    cluster = torch.randint(4, (B, h, N), generator=torch.Generator().manual_seed(0))
    equal = q[:, :, :4].gather(2, cluster[..., None].expand_as(q))
    assert_equal(clustered(equal, k, v, cluster, num_clusters=7, num_top_keys=k_top), softmax(equal, k, v))


@pytest.mark.parametrize("num_top_keys", [0, 3])
def test_clustered_commutes_with_permutations_given_the_assignment(num_top_keys):
    q, k, v = tokens(GRID)
    cluster, order = torch.arange(24).remainder(4).expand(B, h, -1), shuffled(24)
    options = {"num_clusters": 4, "num_top_keys": num_top_keys}
    moved = clustered(*(x[:, :, order] for x in (q, k, v, cluster)), **options)
    assert_equal(moved, clustered(q, k, v, cluster, **options)[:, :, order])


@pytest.mark.parametrize(("num_bits", "iterations"), [(63, 0), (63, 3), (5, 1), (5, 4), (2, 3)])
def test_hamming_clusters_are_lloyds(num_bits, iterations):
    N, J = 30, 6
    bits = torch.rand(1, 1, N, num_bits, generator=torch.Generator().manual_seed(0)) > 0.5
    cluster = hamming_clusters(bits, J, iterations)[0, 0].tolist()
    points = [tuple(map(bool, point)) for point in bits[0, 0].tolist()]
    centroids = [points[j * N // J] for j in range(J)]
    for i in range(iterations + 1):
        distances = [[sum(a != b for a, b in zip(p, c, strict=True)) for c in centroids] for p in points]
        expected = [row.index(min(row)) for row in distances]
        if i < iterations:
            for j in range(J):
                if members := [p for p, e in zip(points, expected, strict=True) if e == j]:
                    centroids[j] = tuple(2 * sum(column) > len(members) for column in zip(*members, strict=True))
    assert cluster == expected


def test_hash_distance_grows_with_the_angle():
    """Planes through the origin separate two vectors with the probability angle / pi (4 standard errors)."""
    bits, angles = 40000, torch.linspace(0, math.pi, 7, dtype=torch.float64)
    q = torch.stack([angles.cos(), angles.sin()], -1)[None, None]
    planes = torch.cat([draw(1, bits, 2), torch.zeros(1, bits, 1, dtype=torch.float64)], -1)
    hashed = hash_bits(q, planes)[0, 0]
    p = angles / math.pi
    assert ((hashed ^ hashed[:1]).double().mean(-1) - p <= 4 * (p * (1 - p) / bits).sqrt()).all()
    assert ((hashed ^ hashed[:1]).double().mean(-1) - p >= -4 * (p * (1 - p) / bits).sqrt()).all()
