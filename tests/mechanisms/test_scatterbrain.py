"""Scatterbrain on windows."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention import AttentionFactory
from attention.mechanisms.bigbird import bigbird, choose_blocks
from attention.mechanisms.linear import linear
from attention.mechanisms.local import local
from attention.mechanisms.performer import performer
from attention.mechanisms.scatterbrain import scatterbrain
from attention.parts.features import log_features, scale
from attention.parts.geometry import Windows
from attention.parts.leave_one_out import merge_all_but_one, merge_before
from tests.support.cases import PREFIX, Case, effects
from tests.support.comparisons import assert_equal, assert_mean, standard_errors
from tests.support.growth import Growth
from tests.support.inputs import CPU, B, d, draw, every_grid, h, layer, tokens
from tests.support.random_features import random_feature_attention
from tests.support.symmetry import BLOCKS

case = partial(Case, "scatterbrain", stochastic=True)
SAMPLES, SMALL = {"num_samples": 10}, {"window_size": 3}
WINDOW, FREE = {"window_size": 2}, {"position_bias": "none"}

CASES = [
    case((5, 7), {**SAMPLES, **SMALL}),
    case((6, 8), {**SAMPLES, **WINDOW, **FREE, "features": "hyperbolic", "feature_redraw": "fixed"}, stochastic=False),
    case((5, 7), {**SAMPLES, "window_size": 8, "layout": "1d", "omega_sampling": "orthogonal"}),
    case((5, 7), {**SAMPLES, **SMALL, "leave_one_out": "subtract", "overlap": 1}),
    case((5, 7), {**SAMPLES, **SMALL, "leave_one_out": "released"}, mixes_values=False),  # where its floors act
    case((5, 7), {**SAMPLES, **SMALL, **PREFIX}),
    case((5, 7), {**SAMPLES, **SMALL, **PREFIX, "leave_one_out": "none", "overlap": 1}),
    case((5, 7), {**SMALL, **PREFIX, "features": "elu"}, stochastic=False, far_keys_vanish=False),
    case((5, 7), {**SAMPLES, "window_size": 8, "causal": True}),
    case((5, 7), {"window_size": 4, "causal": True, "overlap": 3, "features": "elu"}, stochastic=False),
]
EFFECTS = {
    **effects(SMALL, num_samples=10, window_size=2, layout="1d", released=True, overlap=1, position_bias="none"),
    **effects(SMALL, leave_one_out="released", causal=True, features="hyperbolic", omega_sampling="orthogonal"),
    **effects(SMALL, eval_omega_sampling="orthogonal", feature_redraw="fixed", local=True),
}
SYMMETRIES = [
    *((BLOCKS, {**WINDOW, **FREE, "leave_one_out": x}) for x in ("merge", "subtract", "none", "released")),
    # windows that overlap or do not divide the grid
    ({"transposed"}, {"window_size": 3, **FREE}),
    ({"transposed"}, {**WINDOW, "overlap": 1, **FREE}),
    (set(), {**WINDOW, "causal": True}),
    ({"between"}, WINDOW),  # a bias depends on positions inside a window, not on the window
]
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: {"causal": True})]
REFUSED = [
    (
        {"overlap": 1, "leave_one_out": "merge"},
        r"attention\(scatterbrain\).leave_one_out = merge: .* set leave_one_out: subtract",
    ),
    (
        {"causal": True, "leave_one_out": "none"},
        r"attention\(scatterbrain\).leave_one_out = none: in causal attention .* set leave_one_out: merge",
    ),
    (
        {"features": "elu", "num_samples": 8},
        r"attention\(scatterbrain\).num_samples = 8: the features elu have no samples; set num_samples: 96",
    ),
    (
        {"features": "elu", "eval_omega_sampling": "orthogonal"},
        r"\(scatterbrain\).eval_omega_sampling = orthogonal: the features elu .*; set eval_omega_sampling: iid",
    ),
    (
        {"feature_redraw": "fixed", "eval_omega_sampling": "orthogonal"},
        r"eval_omega_sampling = orthogonal: nothing is redrawn; set eval_omega_sampling: iid",
    ),
    ({"causal": True, "layout": "2d"}, r"attention\(scatterbrain\).layout = 2d: .* set layout: 1d"),
    ({"window_size": 15}, r"attention\(scatterbrain\).window_size = 15: larger than the 14x14 grid; at most 14"),
]
EVERYTHING = [
    {"window_size": 6, **FREE},
    {"window_size": 6, "leave_one_out": "subtract", **FREE},
    {"window_size": 2, "overlap": 6, **FREE},
    {"window_size": 6, **FREE, "features": "elu"},
    {"window_size": 24, "causal": True, **FREE},
]
RELEASED = {"scatterbrain_2d_norpe_64": {"num_samples": 64, "released": True, **FREE}}
SYMBOLS = {"|E|": 49, "s": 96}
LEARNED = {"position_bias"}

S = 5


def features(x: Tensor, omega: Tensor) -> Tensor:
    """phi(x), such that phi(q) . phi(k) estimates exp(q . k / sqrt(d))."""
    return log_features(scale(x), omega).exp() / S**0.5


def corrected(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, support: Tensor) -> Tensor:
    """The output (phi phi^T v + (A - phi phi^T)_E v) / row sums."""
    estimate = features(q, omega) @ features(k, omega).mT
    correction = torch.where(support, (q @ k.mT * d**-0.5).exp() - estimate, 0)
    return (estimate @ v + correction @ v) / (estimate.sum(-1, keepdim=True) + correction.sum(-1, keepdim=True))


def rows(y: Tensor, logits: Tensor, support: Tensor) -> Tensor:
    """Unnormalised rows A from rows that sum to one, scaled by one entry of the support each, which is exact."""
    anchor = support.double().argmax(-1, keepdim=True).expand(*y.shape[:-1], 1)
    return y / y.gather(-1, anchor) * logits.gather(-1, anchor).exp()


@every_grid
@pytest.mark.parametrize("leave_one_out", ["merge", "subtract"])
def test_scatterbrain_with_nothing_in_the_support_is_random_feature_attention(grid, leave_one_out):
    """A bias removes the exact part; the first window's keys are so long that their features vanish."""
    q, k, v = tokens(grid)
    omega, nothing = draw(h, S, d, seed=3), torch.full((h, 4, 4), -1e6, dtype=torch.float64)
    windows = Windows(grid, (2, 2))
    first = windows.indices(CPU)[0]
    k[:, :, first] *= 1e3
    y = scatterbrain(q, k, v, omega, nothing, windows=windows, leave_one_out=leave_one_out)
    expected = random_feature_attention(scale(q), scale(k), v, omega)
    assert_equal(y[:, :, first], expected[:, :, first])


@pytest.mark.parametrize("causal", [False, True])
def test_with_nothing_in_the_support_features_elu_are_linear_attention(causal):
    """Like the test above; the first window's keys, at minus a thousand, have elu + 1 of zero."""
    q, k, v = tokens((6, 4))
    windows, nothing = Windows((1, 24), (1, 4), causal=causal), torch.full((h, 4, 4), -1e6, dtype=torch.float64)
    own = windows.indices(CPU)[2]
    k[:, :, own] = -1e3
    y = scatterbrain(q, k, v, None, nothing, windows=windows)
    assert_equal(y[:, :, own], linear(q, k, v, causal=causal)[:, :, own])


def test_elu_weighs_as_softmax_does_where_queries_and_keys_vanish():
    """At zero, the mean product of features and the exact weight are both 1, so that attention is the mean value."""
    q, k, v = tokens((6, 4))
    y = scatterbrain(0 * q, 0 * k, v, None, windows=Windows((6, 4), (2, 2)))
    assert_equal(y, v.mean(2, keepdim=True).expand_as(v))


def test_global_tokens_for_the_low_rank_part_are_bigbird():
    """Rows and columns of global tokens are exact, a part of low rank; it is corrected on the windows (section 4.2)."""
    q, k, v = tokens((6, 4))
    windows, blocks = Windows((1, 24), (1, 4)), choose_blocks(1, 1, torch.empty(h, 6, 0))
    exact = (q @ k.mT * d**-0.5).exp()
    is_global = torch.arange(24) < 4
    low = exact * (is_global | is_global[:, None])
    assert torch.linalg.matrix_rank(low).max() <= 2 * 4
    A = low + torch.where(support_of(windows), exact - low, 0)
    y = bigbird(q, k, v, blocks, windows=windows, num_global=1)
    assert_equal(y, A @ v / A.sum(-1, keepdim=True))


@every_grid
@pytest.mark.parametrize(
    ("size", "overlap", "leave_one_out"),
    [((2, 2), (0, 0), "merge"), ((3, 2), (0, 0), "merge"), ((2, 2), (0, 0), "subtract"), ((3, 3), (1, 1), "subtract")],
)
def test_scatterbrain_corrects_the_estimate_on_windows(grid, size, overlap, leave_one_out):
    q, k, v = tokens(grid)
    omega, windows = draw(h, S, d, seed=3), Windows(grid, size, overlap)
    y = scatterbrain(q, k, v, omega, windows=windows, leave_one_out=leave_one_out)
    assert_equal(y, corrected(q, k, v, omega, support_of(windows)))


@every_grid
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_naive_sum_counts_windows_twice(grid, overlap):
    """The result is local attention and Performer, weighted by their masses."""
    q, k, v = tokens(grid)
    omega, windows = draw(h, S, d, seed=3), Windows(grid, (3, 2), (overlap, overlap))
    support = support_of(windows)
    exact = ((q @ k.mT * d**-0.5).exp() * support).sum(-1, keepdim=True)
    low = features(q, omega) @ features(k, omega).sum(2)[..., None]
    both = exact * local(q, k, v, windows=windows) + low * performer(q, k, v, omega)
    assert_equal(scatterbrain(q, k, v, omega, windows=windows, leave_one_out="none"), both / (exact + low))


def support_of(windows: Windows) -> Tensor:
    """Mask of the keys that a query attends to in its window, (N, N) bool."""
    N = math.prod(windows.grid)
    support = torch.zeros(N, N, dtype=torch.bool)
    for n in range(N):
        support[n, windows.attended(n)[0]] = True
    return support


def assert_exact_on_support_and_unbiased_off_it(op, support: Tensor, q: Tensor, k: Tensor):
    """Asserts this with one-hot values, which make the output the matrix; `op` takes samples in the place of heads."""
    count = 4000
    logits, omega = (q @ k.mT * d**-0.5).expand(1, count, -1, -1), draw(count, 4, d, seed=4)
    y = op(*(x.expand(1, count, -1, -1) for x in (q, k, torch.eye(16, dtype=torch.float64))), omega)
    A = rows(y, logits, support)[0]
    assert_equal(A[:, support], logits[0, :, support].exp())
    assert_mean(A[:, ~support], logits[0, 0, ~support].exp())
    expected = logits[0, 0].softmax(-1)
    assert standard_errors(y[0], expected).max() > 10  # normalised, it is biased


def test_scatterbrain_is_exact_on_its_windows_and_unbiased_off_them_before_normalisation():
    q, k = (0.5 * draw(1, 1, 16, d, seed=seed) for seed in (0, 1))
    of_token = (torch.arange(16).view(4, 4) // 8 * 2 + torch.arange(4) // 2).flatten()
    local = of_token[:, None] == of_token
    op = partial(scatterbrain, windows=Windows((4, 4), (2, 2)))
    assert_exact_on_support_and_unbiased_off_it(op, local, q, k)


@pytest.mark.parametrize("count", range(1, 8))
def test_merging_sums_all_windows_but_one(count):
    log_mass, mean = 3 * draw(B, count, S), draw(B, count, S, d, seed=1)
    log_left, left = merge_all_but_one(log_mass, mean)
    if count == 1:
        assert (log_left.exp() == 0).all()
        return
    for g in range(count):
        rest = [i for i in range(count) if i != g]
        assert_equal(log_left[:, g], log_mass[:, rest].logsumexp(1))
        assert_equal(left[:, g], (log_mass[:, rest].softmax(1)[..., None] * mean[:, rest]).sum(1))
    log_left, left = merge_before(log_mass, mean)
    assert not log_left[:, 0].exp().any()
    for g in range(1, count):
        assert_equal(log_left[:, g], log_mass[:, :g].logsumexp(1))
        assert_equal(left[:, g], (log_mass[:, :g].softmax(1)[..., None] * mean[:, :g]).sum(1))


def test_merging_keeps_the_digits_that_subtraction_loses():
    """A window holds nearly all of the samples' mass, in float32: the remaining mass is below rounding error."""
    grid, omega = (6, 4), 3 * draw(h, S, d, seed=3)
    windows = Windows(grid, (2, 2))
    q, k, v = tokens(grid)
    k[:, :, windows.indices(CPU)[0]] += omega.mean(1)[:, None] * d**0.25
    expected = scatterbrain(q, k, v, omega, windows=windows)
    single, errors = [x.float() for x in (q, k, v, omega)], {}
    for leave_one_out in ("merge", "subtract", "released"):
        y = scatterbrain(*single, windows=windows, leave_one_out=leave_one_out)
        errors[leave_one_out] = (y - expected).abs().max()
    assert errors["merge"] < 1e-5
    assert min(errors["subtract"], errors["released"]) > 1e-2


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "merge"),
        ({"overlap": 1}, "subtract"),
        ({"released": True}, "released"),
        ({"overlap": 1, "released": True}, "released"),
        ({"overlap": 1, "released": True, "causal": True}, "merge"),
    ],
    ids=str,
)
def test_the_leave_one_out_sums_that_fit_are_chosen(options, chosen):
    assert AttentionFactory.from_options({"name": "scatterbrain", **options}).config.leave_one_out == chosen


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "iid"),
        ({"released": True}, "orthogonal"),
        ({"released": True, "omega_sampling": "orthogonal_sqrt_d", "feature_redraw": "fixed"}, "orthogonal_sqrt_d"),
    ],
    ids=str,
)
def test_the_released_code_evaluates_on_orthogonal_samples(options, chosen, monkeypatch):
    """It trains on independent ones, as its Performer does."""
    assert AttentionFactory.from_options({"name": "scatterbrain", **options}).config.eval_omega_sampling == chosen
    elu = {"name": "scatterbrain", "features": "elu", "released": True}
    assert AttentionFactory.from_options(elu).config.eval_omega_sampling == "iid"
    seen = []
    monkeypatch.setattr(
        "attention.mechanisms.scatterbrain.scatterbrain", lambda q, k, v, omega, *_, **__: seen.append(omega) or q
    )
    attn = layer("scatterbrain", (6, 4), **SMALL, num_samples=d, **options)
    x = draw(B, 24, h * d)
    attn.eval()(x, (6, 4))
    attn.train()(x, (6, 4))
    are_orthogonal = []
    for omega in seen:
        products = omega @ omega.mT
        others = products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))
        are_orthogonal.append(others.abs().max() < 1e-4)  # float32
    assert are_orthogonal == [chosen != "iid", options.get("feature_redraw") == "fixed"]
