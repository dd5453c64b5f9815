"""Scatterbrain on windows; and, apart, on clusters of hashed tokens."""

from functools import partial

import pytest
import torch
from torch import Tensor

from attention import Grid
from attention.mechanisms.scatterbrain import merge_others, scatterbrain, scatterbrain_lsh
from attention.mechanisms.softmax import softmax
from attention.ops.joint_softmax.op import exact_set
from attention.ops.random_features.op import random_feature_attention
from attention.parts.features import log_features, scale
from attention.parts.geometry import window_indices
from tests.support.cases import PREFIX, Case
from tests.support.comparisons import assert_equal, assert_mean, same_cluster, standard_errors
from tests.support.growth import Growth
from tests.support.inputs import CPU, B, d, draw, every_grid, h, tokens
from tests.support.symmetry import ALL, BLOCKS

case = partial(Case, "scatterbrain", stochastic=True)
SAMPLES, SMALL = {"num_samples": 10}, {"window_size": 3}
WINDOW, FREE = {"window_size": 2}, {"position_bias": "none"}

CASES = [
    case((5, 7), {**SAMPLES, **SMALL}),
    case((6, 8), {**SAMPLES, **WINDOW, **FREE, "features": "hyperbolic", "sampling": "fixed"}, stochastic=False),
    case((5, 7), {**SAMPLES, "window_size": 8, "layout": "1d", "draws": "orthogonal"}),
    case((5, 7), {**SAMPLES, **SMALL, "complement": "subtract", "overlap": 1}),
    case((5, 7), {**SAMPLES, **SMALL, "complement": "released"}, mixes_values=False),  # where its floors act
    case((5, 7), {**SAMPLES, **SMALL, **PREFIX}),
]
EFFECTS = {
    "num_samples": (SMALL, 10),
    "window_size": (SMALL, 2),
    "layout": (SMALL, "1d"),
    "overlap": ({**SMALL, "complement": "subtract"}, 1),
    "position_bias": (SMALL, "none"),
    "complement": (SMALL, "released"),
    "features": (SMALL, "hyperbolic"),
    "draws": (SMALL, "orthogonal"),
    "sampling": (SMALL, "fixed"),
}
SYMMETRIES = [
    *((BLOCKS, {**WINDOW, **FREE, "complement": x}) for x in ("merge", "subtract", "released")),
    # windows that overlap or do not divide the grid
    ({"transposed"}, {"window_size": 3, **FREE}),
    ({"transposed"}, {**WINDOW, "overlap": 1, "complement": "subtract", **FREE}),
    ({"between"}, WINDOW),  # a bias knows positions inside a window, not which window it is
]
GROWTH = [Growth(1, 1)]
REFUSED = [
    ({"overlap": 1}, r"scatterbrain\).overlap = 1: .* set complement: subtract"),
    ({"num_rounds": 3}, r"scatterbrain\).num_rounds = 3: .* leave it out"),
]
EVERYTHING = [{"window_size": 6, **FREE}]
RELEASED = {"scatterbrain_2d_norpe_64": {"num_samples": 64, "complement": "released", **FREE}}

S = 5


def run(q, k, v, omega, bias=None, *, grid: Grid, window: Grid, overlap: Grid = (0, 0), complement="merge") -> Tensor:
    return scatterbrain(q, k, v, omega, bias, grid=grid, window=window, overlap=overlap, complement=complement)


def features(x: Tensor, omega: Tensor) -> Tensor:
    """phi(x), such that phi(q) . phi(k) estimates exp(q . k / sqrt(d))."""
    return log_features(scale(x), omega).exp() / S**0.5


def corrected(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, support: Tensor) -> Tensor:
    """(phi phi^T v + (A - phi phi^T)_E v) / row sums."""
    estimate = features(q, omega) @ features(k, omega).mT
    correction = torch.where(support, (q @ k.mT * d**-0.5).exp() - estimate, 0)
    return (estimate @ v + correction @ v) / (estimate.sum(-1, keepdim=True) + correction.sum(-1, keepdim=True))


def rows(y: Tensor, logits: Tensor, support: Tensor) -> Tensor:
    """Unnormalised rows A from rows that sum to one, by an entry of the support each, which is exact."""
    anchor = support.double().argmax(-1, keepdim=True).expand(*y.shape[:-1], 1)
    return y / y.gather(-1, anchor) * logits.gather(-1, anchor).exp()


@every_grid
def test_everything_in_the_support_is_softmax(grid):
    q, k, v = tokens(grid)
    omega, expected = draw(h, S, d, seed=3), softmax(q, k, v)
    for complement in ("merge", "subtract"):
        assert_equal(run(q, k, v, omega, grid=grid, window=grid, complement=complement), expected)
    everything = {"window": (2, 2), "overlap": grid, "complement": "subtract"}
    assert_equal(run(q, k, v, omega, grid=grid, **everything), expected)


@every_grid
@pytest.mark.parametrize("complement", ["merge", "subtract"])
def test_scatterbrain_with_nothing_in_the_support_is_random_feature_attention(grid, complement):
    """A bias takes the exact part away; the first window's keys are so long that their features vanish."""
    q, k, v = tokens(grid)
    omega, nothing = draw(h, S, d, seed=3), torch.full((h, 4, 4), -1e6, dtype=torch.float64)
    first = window_indices(grid, (2, 2), (0, 0), CPU)[0]
    k[:, :, first] *= 1e3
    y = run(q, k, v, omega, nothing, grid=grid, window=(2, 2), complement=complement)
    expected = random_feature_attention(scale(q), scale(k), v, omega)
    assert_equal(y[:, :, first], expected[:, :, first])


@every_grid
@pytest.mark.parametrize(
    ("window", "overlap", "complement"),
    [
        ((2, 2), (0, 0), "merge"),
        ((3, 2), (0, 0), "merge"),
        ((2, 2), (0, 0), "subtract"),
        ((3, 3), (1, 1), "subtract"),
    ],
)
def test_scatterbrain_corrects_the_estimate_on_windows(grid, window, overlap, complement):
    q, k, v = tokens(grid)
    omega, N = draw(h, S, d, seed=3), q.shape[2]
    support = torch.zeros(N, N, dtype=torch.bool)
    for n in range(N):
        support[n, exact_set(n, grid, window, overlap)[0]] = True
    options = {"grid": grid, "window": window, "overlap": overlap, "complement": complement}
    assert_equal(run(q, k, v, omega, **options), corrected(q, k, v, omega, support))


def assert_exact_on_support_and_unbiased_off_it(op, support: Tensor, q: Tensor, k: Tensor):
    """Values one-hot make the output the matrix; `op` takes samples in the place of heads."""
    draws = 4000
    logits, omega = (q @ k.mT * d**-0.5).expand(1, draws, -1, -1), draw(draws, 4, d, seed=4)
    y = op(*(x.expand(1, draws, -1, -1) for x in (q, k, torch.eye(16, dtype=torch.float64))), omega)
    A = rows(y, logits, support)[0]
    assert_equal(A[:, support], logits[0, :, support].exp())
    assert_mean(A[:, ~support], logits[0, 0, ~support].exp())
    expected = logits[0, 0].softmax(-1)
    assert standard_errors(y[0], expected).max() > 10  # normalised, it is biased


def test_scatterbrain_is_exact_on_its_windows_and_unbiased_off_them_before_normalisation():
    q, k = (0.5 * draw(1, 1, 16, d, seed=seed) for seed in (0, 1))
    windows = torch.arange(16).view(4, 4) // 8 * 2 + torch.arange(4) // 2
    local = windows.flatten()[:, None] == windows.flatten()
    assert_exact_on_support_and_unbiased_off_it(partial(run, grid=(4, 4), window=(2, 2)), local, q, k)


@pytest.mark.parametrize("parts", range(1, 8))
def test_merging_the_others_sums_all_parts_but_one(parts):
    log_mass, mean = 3 * draw(B, parts, S), draw(B, parts, S, d, seed=1)
    log_others, others = merge_others(log_mass, mean)
    if parts == 1:
        assert (log_others.exp() == 0).all()
        return
    for g in range(parts):
        rest = [i for i in range(parts) if i != g]
        assert_equal(log_others[:, g], log_mass[:, rest].logsumexp(1))
        assert_equal(others[:, g], (log_mass[:, rest].softmax(1)[..., None] * mean[:, rest]).sum(1))


def test_merging_keeps_the_digits_that_subtraction_loses():
    """A window that holds nearly all of the samples' mass, in float32: what is left is less than rounding."""
    grid, omega = (6, 4), 3 * draw(h, S, d, seed=3)
    q, k, v = tokens(grid)
    k[:, :, window_indices(grid, (2, 2), (0, 0), CPU)[0]] += omega.mean(1)[:, None] * d**0.25
    expected = run(q, k, v, omega, grid=grid, window=(2, 2))
    single, errors = [x.float() for x in (q, k, v, omega)], {}
    for complement in ("merge", "subtract", "released"):
        y = run(*single, grid=grid, window=(2, 2), complement=complement)
        errors[complement] = (y - expected).abs().max()
    assert errors["merge"] < 1e-5
    assert min(errors["subtract"], errors["released"]) > 1e-2


# With support: lsh

lsh = partial(Case, "scatterbrain", (5, 7), op="scatterbrain_lsh", stochastic=True, well_conditioned=False)
LSH = {"support": "lsh", "position_bias": "none"}

CASES += [
    lsh({**SAMPLES, "window_size": 3, **LSH, "num_rounds": 1}),
    lsh({**SAMPLES, "window_size": 8, **LSH, "layout": "1d", "num_rounds": 3}),
    lsh({**SAMPLES, "window_size": 3, **PREFIX, **LSH}),
]
EFFECTS |= {
    "support": ({**SMALL, **FREE}, "lsh"),
    "num_rounds": ({**SMALL, **LSH}, 1),
}
SYMMETRIES += [(ALL, {**LSH, **WINDOW})]
GROWTH += [Growth(1, 1, lambda side: LSH)]
REFUSED += [({"support": "lsh"}, r"position_bias = table: .* set position_bias: none")]
EVERYTHING += [{"layout": "1d", "window_size": 24, **LSH}]


@every_grid
def test_everything_in_one_cluster_is_softmax(grid):
    q, k, v = tokens(grid)
    omega, directions = draw(h, S, d, seed=3), draw(h, 2, d + 2, seed=4)
    assert_equal(scatterbrain_lsh(q, k, v, omega, directions, cluster_size=q.shape[2]), softmax(q, k, v))


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


@every_grid
def test_rounds_of_scatterbrain_with_one_direction_are_one_round(grid):
    """A pair that meets in every round counts once."""
    q, k, v = tokens(grid)
    omega, direction = draw(h, S, d, seed=3), draw(h, 1, d + 2, seed=4)
    once, thrice = (
        scatterbrain_lsh(q, k, v, omega, directions, cluster_size=5)
        for directions in (direction, direction.expand(-1, 3, -1))
    )
    assert_equal(thrice, once)
