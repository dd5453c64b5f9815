"""EVA with clusters of keys as groups."""

from functools import partial

import pytest
import torch

from attention.mechanisms.clustered import cluster_mean
from attention.mechanisms.eva import eva
from attention.mechanisms.eva_clustered import eva_clustered, one_set_of_means
from attention.mechanisms.softmax import softmax
from attention.parts.geometry import Windows
from attention.parts.groups import bins, group_mean
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal
from tests.support.inputs import CPU, B, d, draw, every_grid, h, layer, shuffled, tokens

case = partial(Case, "eva_clustered", (3, 5), stochastic=True, well_conditioned=False)
SMALL = {"window_size": 2, "num_landmarks": 4, "num_iterations": 2}

CASES = [case({**SMALL, "overlap": 1}), case({**SMALL, **PREFIX, "position_bias": "none"})]
EFFECTS = {
    **effects(SMALL, window_size=3, num_landmarks=3, released=True, layout="1d", overlap=1, position_bias="none"),
    **effects(SMALL, num_bits=3, num_iterations=0, landmark_transform="linear", mu="q", mu_scale=0.5, noise="released"),
    "local": (SMALL, True),
}
SYMMETRIES = [(set(), {**SMALL, "position_bias": "none"})]  # the first centroids depend on positions; see below
REFUSED = [
    ({"num_landmarks": 197}, r"attention\(eva_clustered\).num_landmarks = 197: more than the tokens .*; at most 196"),
    ({"window_size": 15}, r"attention\(eva_clustered\).window_size = 15: larger than the 14x14 grid; at most 14"),
    ({"num_bits": 64}, r"num_bits = 64 is above the largest valid value 63"),
    ({"num_samples": 2}, r"attention\(eva_clustered\).num_samples: unknown option"),
]
SYMBOLS = {"|E|": 49, "c": 49, "bits": 63}
LEARNED = {"landmarks", "position_bias"}


@every_grid
def test_clusters_that_are_bins_are_groups_of_eva_and_empty_ones_are_not_attended_to(grid):
    (q, k, v), windows, groups = tokens(grid), Windows(grid, (2, 2)), bins(grid, (2, 2), CPU)
    cluster = torch.empty(q.shape[2], dtype=torch.long)
    for c in range(4):
        cluster[groups.members[0, c][groups.valid[0, c]]] = c
    k_tilde, omega = draw(B, h, 6, d, seed=7), draw(B, h, 6, d, seed=8)  # the last two have no keys
    y = eva_clustered(q, k, v, cluster.expand(B, h, -1), k_tilde, omega, windows=windows)
    of_groups = k_tilde[:, :, None, :4], omega[:, :, None, :4], omega[:, :, None, :4, None]
    assert_equal(y, eva(q, k, v, *of_groups, groups=groups, windows=windows))
    assert_equal(cluster_mean(q, cluster.expand(B, h, -1), 4), group_mean(q, groups)[:, :, 0])


@every_grid
def test_clusters_of_one_key_alone_are_softmax(grid):
    q, k, v = tokens(grid)
    alone = shuffled(q.shape[2]).expand(B, h, -1)
    own = torch.empty_like(k).scatter(2, alone[..., None].expand_as(k), k)
    y = eva_clustered(q, k, v, alone, own, draw(*k.shape, seed=8), windows=Windows(grid, (0, 0)))
    assert_equal(y, softmax(q, k, v))


def test_it_commutes_with_permutations_given_the_assignment():
    (q, k, v), order = tokens((4, 6)), shuffled(24)
    cluster, k_tilde, omega = torch.arange(24).remainder(4).expand(B, h, -1), draw(B, h, 4, d), draw(B, h, 4, d, seed=5)
    results = [
        eva_clustered(*(x[:, :, moved] for x in (q, k, v, cluster)), k_tilde, omega, windows=Windows((4, 6), (0, 0)))
        for moved in (torch.arange(24), order)
    ]
    assert_equal(results[1], results[0][:, :, order])


def test_far_keys_of_a_cluster_neither_overflow_nor_vanish():
    """Features with the factor exp(-||k||^2 / 2) are divided by the largest feature of their cluster."""
    q, k, v = tokens((4, 6))
    cluster = torch.arange(24).remainder(4).expand(B, h, -1)
    moved = k + 1e3 * cluster[..., None]
    y = eva_clustered(q, moved, v, cluster, 0 * q[:, :, :4], 0 * q[:, :, :4], windows=Windows((4, 6), (0, 0)))
    assert y.isfinite().all()
    assert (y.amax(2) <= v.amax(2)).all()
    assert y.abs().max() > 0


def test_means_of_large_clusters_are_exact_in_half_types():
    x = draw(1, 1, 2000, d).bfloat16()
    means = one_set_of_means(x, torch.arange(2000).remainder(2)[None, None], 2)
    assert means.dtype == torch.bfloat16
    expected = x.float().unflatten(2, (1000, 2)).mean(2)[:, :, None]
    torch.testing.assert_close(means.float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("name", "options"), [("eva_clustered", SMALL), ("eva_lsh", {"cluster_size": 4, "num_landmarks": 3})]
)
def test_training_clusters_anew_and_evaluation_does_not(name, options):
    attn = layer(name, (3, 5), **options, landmark_transform="identity", mu="zero")
    (q, k, v), same = tokens((3, 5)), []
    attn.landmarks.noise = lambda mu: torch.zeros_like(mu)[..., None, :]
    for training in (True, False):
        attn.train(training)
        first, *others = (attn.attend(q, k, v, (3, 5)) for _ in range(4))
        same.append(all(torch.equal(first, other) for other in others))
    assert same == [False, True]
