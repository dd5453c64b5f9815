"""Scatterbrain on clusters of hashed tokens."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attention.mechanisms.performer import performer
from attention.mechanisms.scatterbrain_lsh import scatterbrain_lsh
from attention.mechanisms.smyrf import smyrf
from tests.mechanisms.test_scatterbrain import S, assert_exact_on_support_and_unbiased_off_it, corrected, features
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal, same_cluster
from tests.support.inputs import d, draw, every_grid, h, tokens
from tests.support.symmetry import ALL

case = partial(Case, "scatterbrain_lsh", (5, 7), stochastic=True, well_conditioned=False)
SAMPLES, SMALL = {"num_samples": 10}, {"cluster_size": 9}

CASES = [
    case({**SAMPLES, **SMALL, "num_rounds": 1}),
    case({**SAMPLES, "cluster_size": 8, "num_rounds": 3}),
    case({**SAMPLES, **SMALL, "features": "hyperbolic", "feature_redraw": "fixed"}),
    case({**SAMPLES, **SMALL, **PREFIX}),
    case({**SMALL, **PREFIX, "features": "elu"}, far_keys_vanish=False),
    case({**SAMPLES, **SMALL, **PREFIX, "leave_one_out": "average"}),
]
EFFECTS = {
    **effects(SMALL, num_samples=10, cluster_size=8, num_rounds=1, leave_one_out="none", features="hyperbolic"),
    **effects(SMALL, omega_sampling="orthogonal", feature_redraw="fixed", local=True),
}
SYMMETRIES = [(ALL, {"cluster_size": 4, "leave_one_out": x}) for x in ("subtract", "none", "average")]
REFUSED = [
    ({"cluster_size": 197}, r"attention\(scatterbrain_lsh\).cluster_size = 197: .* at most 196"),
    (
        {"features": "elu", "feature_redraw": "fixed"},
        r"attention\(scatterbrain_lsh\).feature_redraw = fixed: the features elu have no samples",
    ),
    ({"position_bias": "table"}, r"attention\(scatterbrain_lsh\).position_bias: unknown option"),
]
EVERYTHING = [{"cluster_size": 24}, {"cluster_size": 24, "features": "elu"}]
SYMBOLS = {"s": 96, "c": 49, "r": 2}


@every_grid
@pytest.mark.parametrize("size", [4, 5])
def test_scatterbrain_corrects_the_estimate_on_hashed_clusters(grid, size):
    q, k, v = tokens(grid)
    omega, directions = draw(h, S, d, seed=3), draw(h, 3, d + 2, seed=4)
    support = same_cluster(q, k, directions, size).any(2)
    y = scatterbrain_lsh(q, k, v, omega, directions, cluster_size=size)
    assert_equal(y, corrected(q, k, v, omega, support))


def test_scatterbrain_is_exact_on_its_clusters_and_unbiased_off_them_before_normalisation():
    q, k = (0.5 * draw(1, 1, 16, d, seed=seed) for seed in (0, 1))
    directions = draw(1, 2, d + 2, seed=3)
    hashed = same_cluster(q, k, directions, 4)[0, 0].any(0)

    def op(q, k, v, omega):
        return scatterbrain_lsh(q, k, v, omega, directions.expand(len(omega), -1, -1), cluster_size=4)

    assert_exact_on_support_and_unbiased_off_it(op, hashed, q, k)


def test_the_variance_of_the_estimate_is_performers_times_the_probability_that_a_pair_does_not_meet():
    """Scatterbrain's Theorem 2, for unit vectors and any hash: no bias, and Var = (1 - p) Var of Performer's estimate.

    The latter is exp(2 q.k) (exp(||q + k||^2) - 1) / s. A prefix token of logit 0 has the unnormalised weight 1.
    """
    draws, N = 20_000, 12
    q, k = (draw(1, 1, N, d, seed=seed) for seed in (5, 6))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    omega, directions = draw(draws, S, d, seed=3), draw(draws, 1, d + 2, seed=4)
    tokens_q, tokens_k = (x.expand(1, draws, N, d) * d**0.25 for x in (q, k))  # logits are q.k
    values = torch.eye(N + 1, dtype=torch.float64).expand(1, draws, -1, -1)
    y = scatterbrain_lsh(tokens_q, F.pad(tokens_k, (0, 0, 1, 0)), values, omega, directions, cluster_size=4)[0]
    kernel, sizes = (q @ k.mT)[0, 0].exp(), (q[0, 0, :, None] + k[0, 0]).square().sum(-1)
    errors = y[..., 1:] / y[..., :1] - kernel
    variance = kernel.square() * (sizes.exp() - 1) / S
    met = same_cluster(tokens_q, tokens_k, directions, 4)[0, :, 0]
    p = met.double().mean(0)
    light = sizes < 1.5  # squared errors of longer sums have too heavy tails for this number of draws
    assert light.sum() > 2 * N
    for deviations in (errors, errors.square() - variance * ~met):
        scores = deviations.mean(0) / deviations.std(0) * draws**0.5
        assert scores[light].abs().max() < 5
    assert errors[met].abs().max() < 1e-9
    assert torch.corrcoef(torch.stack([p.flatten(), kernel.flatten()]))[0, 1] > 0.8  # those that are close meet


@every_grid
def test_without_correction_it_is_smyrf_and_performer_added(grid):
    """With one round, the naive sum weights the two attentions by their masses, the released code by one half each."""
    q, k, v = tokens(grid)
    omega, directions = draw(h, S, d, seed=3), draw(h, 1, d + 2, seed=4)
    clusters, estimate = smyrf(q, k, v, directions, cluster_size=5), performer(q, k, v, omega)
    logits = (q @ k.mT * d**-0.5).masked_fill(~same_cluster(q, k, directions, 5)[:, :, 0], -torch.inf)
    exact, low = logits.exp().sum(-1, keepdim=True), features(q, omega) @ features(k, omega).sum(2)[..., None]
    naive, average = (
        scatterbrain_lsh(q, k, v, omega, directions, cluster_size=5, leave_one_out=x) for x in ("none", "average")
    )
    assert_equal(naive, (exact * clusters + low * estimate) / (exact + low))
    assert_equal(average, (clusters + estimate) / 2)


def test_the_average_is_of_both_where_either_mass_is_beyond_numbers():
    """Large samples overflow the estimate, large queries and keys the exact weights: each is normalised separately."""
    q, k, v = tokens((4, 4))
    omega, directions = draw(h, S, d, seed=3), draw(h, 1, d + 2, seed=4)
    for size, of_samples in ((1.0, 1e4), (100.0, 1.0)):
        arguments = size * q, size * k, v
        y = scatterbrain_lsh(*arguments, of_samples * omega, directions, cluster_size=5, leave_one_out="average")
        clusters = smyrf(*arguments, directions, cluster_size=5)
        assert_equal(y, (clusters + performer(*arguments, of_samples * omega)) / 2)
