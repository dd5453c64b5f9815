"""Limits and identities of Combiner, Transformer-LS, SMYRF and Scatterbrain (float64, 1e-10)."""

import math

import pytest
import torch
from torch import Tensor

from attention.mechanisms.combiner import combiner
from attention.mechanisms.scatterbrain import merge_others, scatterbrain, scatterbrain_lsh
from attention.mechanisms.smyrf import smyrf
from attention.mechanisms.softmax import softmax
from attention.mechanisms.transformer_ls import normalise, transformer_ls
from attention.ops.joint_softmax.op import exact_set
from attention.ops.random_features.op import random_feature_attention
from attention.parts.features import log_features, scale
from attention.parts.geometry import merge_heads, window_indices
from attention.parts.hashing import (
    asymmetric_transform,
    cluster_ids,
    cluster_mask,
    equal_clusters,
    from_clusters,
    hash_clusters,
    to_clusters,
)
from tests.support.identities import (
    CPU,
    B,
    assert_equal,
    assert_mean,
    d,
    deviation,
    draw,
    every_grid,
    h,
    layer,
    shuffled,
    tokens,
)

# Combiner


@every_grid
def test_combiner_with_one_span_is_softmax(grid):
    q, k, v = tokens(grid)
    q_bar, k_bar = draw(B, h, 1, d, seed=3), draw(B, h, 1, d, seed=4)
    assert_equal(combiner(q, k, v, q_bar, k_bar, grid=grid, window=grid), softmax(q, k, v))


@every_grid
def test_combiner_with_spans_of_one_token_is_softmax(grid):
    """The own span's summary would count its token twice, were it not excluded."""
    q, k, v = tokens(grid)
    assert_equal(combiner(q, k, v, q, k, grid=grid, window=(1, 1)), softmax(q, k, v))
    attn = layer("combiner", grid, window_size=1, summary="identity", position_bias="none")
    expected, x = layer("softmax", grid), draw(B, grid[0] * grid[1], h * d)
    expected.load_state_dict(attn.state_dict())
    assert_equal(attn(x, grid), expected(x, grid))


@every_grid
@pytest.mark.parametrize("pool", ["max", "mean"])
def test_combiner_with_equal_tokens_in_a_span_counts_a_span_once(grid, pool):
    """Equal tokens: a summary is the token, and each other span weighs as one."""
    rows, columns = grid[0] // 2, grid[1] // 2
    q, k, v = (
        draw(B, h, rows, columns, d, seed=seed).repeat_interleave(2, 2).repeat_interleave(2, 3).flatten(2, 3)
        for seed in range(3)
    )
    attn = layer("combiner", grid, window_size=2, summary="identity", pool=pool, position_bias="none")
    span = (torch.arange(grid[0])[:, None] // 2 * columns + torch.arange(grid[1]) // 2).flatten()
    own = span[:, None] == span
    logits = q @ k.mT * d**-0.5 - (~own).double() * math.log(4)
    assert_equal(attn.attend(q, k, v, grid), logits.softmax(-1) @ v)


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_combiner_pools_the_tokens_of_the_grid_alone(pool):
    """Spans that reach beyond the grid: the same as those of the tokens they hold."""
    attn, x = layer("combiner", (5, 7), window_size=3, pool=pool), -draw(B, h, 35, d).abs()
    image = x.unflatten(2, (5, 7))
    spans = [image[:, :, i : i + 3, j : j + 3].flatten(2, 3) for i in (0, 3) for j in (0, 3, 6)]
    expected = torch.stack([span.amax(2) if pool == "max" else span.mean(2) for span in spans], 2)
    assert_equal(attn.pool(x, (5, 7)), expected)


# Transformer-LS


@every_grid
def test_transformer_ls_without_averages_is_local_and_softmax(grid):
    window, everything = {"window_size": 2, "overlap": 1}, {"window_size": max(grid), "position_bias": "none"}
    x = draw(B, grid[0] * grid[1], h * d)
    for options, expected in ((window, layer("local", grid, **window)), (everything, layer("softmax", grid))):
        attn = layer("transformer_ls", grid, num_landmarks=0, dual_norm=False, **options)
        expected.load_state_dict(attn.state_dict())
        assert_equal(attn(x, grid), expected(x, grid))


@every_grid
def test_transformer_ls_with_one_average_per_token_is_softmax(grid):
    q, k, v = tokens(grid)
    slots = torch.eye(q.shape[2], dtype=torch.float64).log().clamp(min=-1e3).expand(B, h, -1, -1)
    assert_equal(transformer_ls(q, k, v, slots, grid=grid, window=(0, 0)), softmax(q, k, v))


@every_grid
def test_dual_norm_makes_keys_and_values_as_large_as_their_averages(grid):
    attn, x = layer("transformer_ls", grid, num_landmarks=5, window_size=2), draw(B, grid[0] * grid[1], h * d)
    for norm in (attn.norm_full, attn.norm_slots):
        norm.reset_parameters()
    _, k, v, slots = attn.project(x, grid)
    assert slots.shape == (B, h, 5, x.shape[1])
    averages = normalise(slots.softmax(-1) @ k, attn.norm_slots.weight, attn.norm_slots.bias)
    for y in (k, v, averages):
        all_heads = merge_heads(y)
        assert_equal(all_heads.mean(-1), torch.zeros_like(all_heads[..., 0]))
        torch.testing.assert_close(
            all_heads.var(-1, correction=0), torch.ones_like(all_heads[..., 0]), rtol=0, atol=1e-2
        )


# SMYRF and its hash


def same_cluster(q: Tensor, k: Tensor, directions: Tensor, size: int) -> Tensor:
    """(B, h, r, N, N) bool: which keys each round's hash shows to a query."""
    of_q, of_k = (cluster_ids(clusters, q.shape[2]) for clusters in hash_clusters(q, k, directions, size))
    return of_q[..., None] == of_k[..., None, :]


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
    assert torch.equal(from_clusters(to_clusters(x, clusters), clusters, 24), x[:, :, None].expand(-1, -1, 2, -1, -1))


@every_grid
@pytest.mark.parametrize("rounds", [1, 3])
def test_smyrf_with_one_cluster_is_softmax(grid, rounds):
    q, k, v = tokens(grid)
    directions = draw(h, rounds, d + 2, seed=3)
    assert_equal(smyrf(q, k, v, directions, cluster_size=q.shape[2]), softmax(q, k, v))


@every_grid
@pytest.mark.parametrize("size", [4, 5])
def test_smyrf_is_softmax_under_the_masks_of_its_clusters_weighed_by_their_mass(grid, size):
    q, k, v = tokens(grid)
    directions = draw(h, 2, d + 2, seed=3)
    logits = (q @ k.mT * d**-0.5)[:, :, None].masked_fill(~same_cluster(q, k, directions, size), -torch.inf)
    expected = (logits.logsumexp(-1, keepdim=True).softmax(2) * (logits.softmax(-1) @ v[:, :, None])).sum(2)
    assert_equal(smyrf(q, k, v, directions, cluster_size=size), expected)


@every_grid
def test_rounds_of_smyrf_with_one_direction_are_one_round(grid):
    q, k, v = tokens(grid)
    direction = draw(h, 1, d + 2, seed=3)
    once, thrice = (smyrf(q, k, v, x, cluster_size=4) for x in (direction, direction.expand(-1, 3, -1)))
    assert_equal(thrice, once)


def test_smyrf_clusters_near_tokens():
    """Pairs with large products meet more often than by chance (1 in 8)."""
    q = draw(B, h, 64, d)
    k = q[:, :, shuffled(64)]
    meet = same_cluster(q, k, draw(h, 50, d + 2, seed=3), 8).double().mean(2)
    best = (q @ k.mT).argmax(-1, keepdim=True)
    assert_equal(meet.mean(-1), torch.full_like(meet[..., 0], 1 / 8))
    assert meet.gather(-1, best).mean() > 2 / 8


# Scatterbrain

S = 5


def features(x: Tensor, omega: Tensor) -> Tensor:
    """phi(x), such that phi(q) . phi(k) estimates exp(q . k / sqrt(d))."""
    return log_features(scale(x), omega).exp() / S**0.5


@every_grid
def test_scatterbrain_with_everything_in_the_support_is_softmax(grid):
    q, k, v = tokens(grid)
    omega, expected = draw(h, S, d, seed=3), softmax(q, k, v)
    for complement in ("merge", "subtract"):
        assert_equal(scatterbrain(q, k, v, omega, grid=grid, window=grid, complement=complement), expected)
    everything = {"window": (2, 2), "overlap": grid, "complement": "subtract"}
    assert_equal(scatterbrain(q, k, v, omega, grid=grid, **everything), expected)
    directions = draw(h, 2, d + 2, seed=4)
    assert_equal(scatterbrain_lsh(q, k, v, omega, directions, cluster_size=q.shape[2]), expected)


@every_grid
@pytest.mark.parametrize("complement", ["merge", "subtract"])
def test_scatterbrain_with_nothing_in_the_support_is_random_feature_attention(grid, complement):
    """A bias takes the exact part away; the first window's keys are so long that their features vanish."""
    q, k, v = tokens(grid)
    omega, nothing = draw(h, S, d, seed=3), torch.full((h, 4, 4), -1e6, dtype=torch.float64)
    first = window_indices(grid, (2, 2), (0, 0), CPU)[0]
    k[:, :, first] *= 1e3
    y = scatterbrain(q, k, v, omega, nothing, grid=grid, window=(2, 2), complement=complement)
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
    assert_equal(scatterbrain(q, k, v, omega, **options), corrected(q, k, v, omega, support))


@every_grid
@pytest.mark.parametrize("size", [4, 5])
def test_scatterbrain_corrects_the_estimate_on_hashed_clusters(grid, size):
    q, k, v = tokens(grid)
    omega, directions = draw(h, S, d, seed=3), draw(h, 3, d + 2, seed=4)
    support = same_cluster(q, k, directions, size).any(2)
    y = scatterbrain_lsh(q, k, v, omega, directions, cluster_size=size)
    assert_equal(y, corrected(q, k, v, omega, support))


def corrected(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, support: Tensor) -> Tensor:
    """(phi phi^T v + (A - phi phi^T)_E v) / row sums."""
    estimate = features(q, omega) @ features(k, omega).mT
    correction = torch.where(support, (q @ k.mT * d**-0.5).exp() - estimate, 0)
    return (estimate @ v + correction @ v) / (estimate.sum(-1, keepdim=True) + correction.sum(-1, keepdim=True))


def rows(y: Tensor, logits: Tensor, support: Tensor) -> Tensor:
    """Unnormalised rows A from rows that sum to one, by an entry of the support each, which is exact."""
    anchor = support.double().argmax(-1, keepdim=True).expand(*y.shape[:-1], 1)
    return y / y.gather(-1, anchor) * logits.gather(-1, anchor).exp()


def test_scatterbrain_is_exact_on_its_support_and_unbiased_off_it_before_normalisation():
    """Values one-hot make the output the matrix; samples are drawn in the place of heads."""
    grid, draws = (4, 4), 4000
    q, k = (0.5 * draw(1, 1, 16, d, seed=seed) for seed in (0, 1))
    logits, omega = (q @ k.mT * d**-0.5).expand(1, draws, -1, -1), draw(draws, 4, d, seed=4)
    q, k, v = (x.expand(1, draws, -1, -1) for x in (q, k, torch.eye(16, dtype=torch.float64)))
    windows = torch.arange(16).view(4, 4) // 8 * 2 + torch.arange(4) // 2
    local = windows.flatten()[:, None] == windows.flatten()
    directions = draw(1, 2, d + 2, seed=3)
    hashed = same_cluster(q[:, :1], k[:, :1], directions, 4)[0, 0].any(0)
    cases = [
        (scatterbrain(q, k, v, omega, grid=grid, window=(2, 2)), local),
        (scatterbrain_lsh(q, k, v, omega, directions.expand(draws, -1, -1), cluster_size=4), hashed),
    ]
    for y, support in cases:
        A = rows(y, logits, support)[0]
        assert_equal(A[:, support], logits[0, :, support].exp())
        assert_mean(A[:, ~support], logits[0, 0, ~support].exp())
        expected = logits[0, 0].softmax(-1)
        assert deviation(y[0], expected).max() > 10  # normalised, it is biased


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
    expected = scatterbrain(q, k, v, omega, grid=grid, window=(2, 2))
    single, errors = [x.float() for x in (q, k, v, omega)], {}
    for complement in ("merge", "subtract", "released"):
        y = scatterbrain(*single, grid=grid, window=(2, 2), complement=complement)
        errors[complement] = (y - expected).abs().max()
    assert errors["merge"] < 1e-5
    assert min(errors["subtract"], errors["released"]) > 1e-2


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
