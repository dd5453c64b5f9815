"""LARA: multiple importance sampling as the paper derives it, its limits, and the effects of its options."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention import create_attention
from attention.mechanisms.lara import lara
from attention.mechanisms.performer import performer
from attention.mechanisms.ra import ra
from attention.ops.random_features.proposals import log_weights, own_ratio, propose, query_weights
from attention.parts.features import log_features, scale
from attention.parts.groups import group_mean
from tests.support.cases import CLIP, PREFIX, Case, effects
from tests.support.comparisons import assert_equal, assert_mean, standard_errors
from tests.support.inputs import draw, one_head
from tests.support.random_features import random_feature_attention
from tests.support.symmetry import BLOCKS

case = partial(Case, "lara", (5, 7), stochastic=True)
FEW = {"num_landmarks": 6}

CASES = [
    case(FEW),
    case({**FEW, "landmark_transform": "dense", "beta": 1.0}),
    case({**FEW, "landmark_transform": "none", "noise": "released"}),
    case({**FEW, "proposal": "pool", "weighting": "balance"}),
    case({**FEW, "proposal": "attended_keys", "weighting": "coupled"}),
    case({**FEW, "proposal": "mixture", "weighting": "coupled_density"}),
    case({**FEW, "proposal": "mixture", "samples_per_proposal": 2}),
    case({**FEW, "samples_per_proposal": 2, "antithetic": True, "local": True}),
    case({**FEW, "features": "hyperbolic"}),
    case({**FEW, "features": "hyperbolic", "proposal": "mixture", "weighting": "coupled_density"}),
    case({**FEW, "proposal": "single"}, well_conditioned=False),  # draws a key
    case({**FEW, "proposal": "single", "features": "hyperbolic"}, well_conditioned=False),
    case({**FEW, **PREFIX}),
    Case("lara", CLIP, {**FEW, **PREFIX}, stochastic=True),
]
EFFECTS = {
    **effects(FEW, num_landmarks=4, landmark_transform="none", proposal="pool", weighting="coupled", beta=1.0),
    **effects(FEW, samples_per_proposal=2, features="hyperbolic", released=True, noise="released", released_pools=True),
    "local": (FEW, True),
    "antithetic": ({**FEW, "samples_per_proposal": 2}, True),
}
SYMMETRIES = [
    *((BLOCKS, {**FEW, "proposal": x}) for x in ("pool", "pool_mixed", "attended_keys", "mixture")),
    *((BLOCKS, {**FEW, "weighting": x}) for x in ("balance", "coupled", "coupled_density")),
    (BLOCKS, {**FEW, "features": "hyperbolic"}),
    (set(), {**FEW, "local": True}),
]
SYMMETRIES_IN_LAW = [(BLOCKS, FEW)]
REFUSED = [
    ({"grid": (4, 6), "num_landmarks": 23}, r"attention\(lara\).num_landmarks = 23 .* 4x6 .* nearest valid: 24"),
    ({"grid": (4, 6), "num_landmarks": 25}, r"attention\(lara\).num_landmarks = 25 .* 4x6 .* nearest valid: 24"),
    ({"weighting": "balance", "beta": 1.0}, r"attention\(lara\).beta = 1.0: .* set beta: 2.0"),
    ({"antithetic": True}, r"attention\(lara\).antithetic = True: .* set antithetic: False"),
    ({"proposal": "single", "weighting": "decoupled"}, r"\(lara\).weighting = decoupled: .* set weighting: balance"),
    ({"proposal": "single", "landmark_transform": "light"}, r"transform = light: .* set landmark_transform: none"),
    ({"proposal": "single", "samples_per_proposal": 2}, r"samples_per_proposal = 2: .* set samples_per_proposal: 1"),
    ({"proposal": "single", "beta": 1.0}, r"attention\(lara\).beta = 1.0: .* set beta: 2.0"),
    ({"proposal": "single", "released_pools": True}, r"released_pools = True: .* set released_pools: False"),
    ({"samples_per_proposal": 3}, r"attention\(lara\).samples_per_proposal: 3 is not a choice"),
]
RELEASED = {
    "lara_poolmixed_light_opt": {"released": True},
    "lara_poolmixed_dense_opt": {"released": True, "landmark_transform": "dense"},
    "train_lara_poolmixed_opt": {"released": True, "num_landmarks": 16},
    "lara_poolmixed_light_opt_12x4": {"released": True, "num_landmarks": 16},
    "lara_pool_bh_8x11": {"released": True, "num_landmarks": 9, "proposal": "pool", "weighting": "balance"},
}
SYMBOLS = {"c": 49}
LEARNED = {"landmark_k", "landmark_q"}

N, C, D = 6, 3, 4
Q, K, V = (0.8 * draw(2, 2, N, D, seed=seed) for seed in range(3))
Q_BAR, K_BAR = 0.8 * draw(2, 2, C, D, seed=3), 0.8 * draw(2, 2, C, D, seed=4)
NOISE = draw(2, 2, C, 1, D, seed=5)
UNIFORM = torch.rand(2, 2, C, 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
EXPLICIT = {name: {"weighting": name, "beta": 2.0} for name in ("coupled", "coupled_density", "decoupled")}
EXPLICIT["balance"] = {"weighting": "decoupled", "beta": 0.0}
every_weighting = pytest.mark.parametrize("weighting", EXPLICIT)


@pytest.mark.parametrize(
    ("grid", "count"), [((12, 16), 49), ((12, 16), 64), ((24, 24), 49), ((8, 5), 9), ((12, 4), 16)]
)
def test_released_pools_are_those_of_adaptive_average_pooling(grid, count):
    attn = create_attention("lara", dim=8, num_heads=2, grid=grid, num_landmarks=count, released=True)
    x, side = draw(2, 3, math.prod(grid), D, seed=11), math.isqrt(count)
    pooled = torch.nn.functional.adaptive_avg_pool2d(x.mT.unflatten(3, grid).flatten(0, 1), side)
    means = group_mean(x, attn.segments(grid, x.device))[:, :, 0]
    assert_equal(means, pooled.flatten(2).mT.unflatten(0, (2, 3)))


def layer(grid=(4, 6), **options):
    torch.manual_seed(0)
    attn = create_attention("lara", dim=8, num_heads=2, grid=grid, **{"num_landmarks": 4, **options})
    torch.nn.init.normal_(attn.qkv.weight, std=0.5)  # larger queries and keys, for uneven attention
    torch.nn.init.normal_(attn.proj.weight, std=0.5)
    return attn


# Limits


@every_weighting
@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
def test_proposals_at_the_origin_are_random_feature_attention(weighting, features):
    """Also with corollary C.1's mapping, because a proposal at the origin is even by itself."""
    zero = torch.zeros_like(Q_BAR)
    y = lara(Q, K, V, zero, zero, NOISE, proposal="pool", weighting=weighting, features=features)
    assert_equal(y, performer(Q, K, V, NOISE[:, :, :, 0], features=features))


def test_by_hand_with_hyperbolic_features():
    """One proposal about 2 at omega = 1; its weight cancels, and cosh(q + k) exp(-k^2 / 2) weighs the keys."""
    q, k, v = one_head(0, 1), one_head(0, 1), one_head(2, 5)
    y = lara(
        q, k, v, one_head(2), one_head(0), -torch.ones(1, 1, 1, 1, 1).double(), proposal="pool", features="hyperbolic"
    )
    first, second = (math.cosh(x) for x in (0, 1)), (math.cosh(x) / math.e**0.5 for x in (1, 2))
    assert_equal(y, one_head(*((2 * a + 5 * b) / (a + b) for a, b in zip(first, second, strict=True))))


@pytest.mark.parametrize("proposal", ["pool", "mixture"])
def test_an_even_proposal_is_the_same_at_mirrored_samples(proposal):
    """Either half of it may be sampled: omega and -omega give equal outputs."""
    uniform = UNIFORM if proposal == "mixture" else None
    both = []
    for sign in (1, -1):
        mean = propose(scale(Q_BAR), scale(K), scale(K_BAR), uniform, proposal).mean
        noise = sign * (mean + NOISE) - mean
        options = {"proposal": proposal, "weighting": "coupled_density", "features": "hyperbolic"}
        both.append(lara(Q, K, V, Q_BAR, K_BAR, noise, uniform, **options))
    assert_equal(*both)


@pytest.mark.parametrize(("features", "signs"), [("positive", (1,)), ("hyperbolic", (1, -1))])
def test_one_proposal_per_query_without_normalisation_is_randomized_attention(features, signs):
    """q_c = p_n, which is even in corollary C.1, and alpha_nc = delta_nc: softmax's numerator over its denominator."""
    q, k = scale(Q), scale(K)
    noise, uniform = draw(2, 2, N, 1, D, seed=7), torch.rand(2, 2, N, 1).double()
    pi = (q @ k.mT).softmax(-1)
    z = (pi.cumsum(-1) <= uniform).sum(-1)
    omega = q + k.gather(2, z[..., None].expand(-1, -1, -1, D)) + noise[:, :, :, 0]
    centre = q[:, :, :, None] + k[:, :, None]
    density = sum(
        (pi * torch.exp(-(sign * omega[:, :, :, None] - centre).square().sum(-1) / 2)).sum(-1) for sign in signs
    )
    ratio = torch.exp(-omega.square().sum(-1) / 2) / density  # N(omega; 0, I) / p_n(omega), but for the number of signs
    numerator = 0
    for sign in signs:
        xi_q = torch.exp(sign * (q * omega).sum(-1) - q.square().sum(-1) / 2)
        numerator = numerator + (ratio * xi_q)[..., None] * (log_features(k, sign * omega).mT.exp() @ V)
    expected = ra(Q, K, V, noise, uniform, features=features)
    assert_equal(numerator / (q @ k.mT).exp().sum(-1, keepdim=True), expected)


@every_weighting
def test_identical_proposals_are_self_normalised_importance_sampling(weighting):
    q_bar, k_bar = Q_BAR[:, :, :1].expand_as(Q_BAR), K_BAR[:, :, :1].expand_as(K_BAR)
    mean = scale(q_bar + k_bar)
    omega = mean + NOISE[:, :, :, 0]
    log_weight = -(mean * omega).sum(-1) + mean.square().sum(-1) / 2  # log N(omega; 0, I) / N(omega; mean, I)
    expected = random_feature_attention(scale(Q), scale(K), V, omega, log_weight[:, :, None])
    assert_equal(lara(Q, K, V, q_bar, k_bar, NOISE, proposal="pool", weighting=weighting), expected)


@pytest.mark.parametrize("proposal", ["mixture", "attended_keys", "pool", "pool_mixed"])
def test_the_balance_heuristic_cancels_the_proposals_own_density(proposal):
    """exp(-LSE) equals b_c N(omega; 0, I) / q_c(omega)."""
    arguments = (Q, K, V, Q_BAR, K_BAR, NOISE, UNIFORM if proposal == "mixture" else None)
    explicit = lara(*arguments, proposal=proposal, weighting="decoupled", beta=0.0)
    assert_equal(lara(*arguments, proposal=proposal, weighting="balance"), explicit)


def test_a_single_proposal_compares_queries_with_their_mean():
    """LARA paper, Table 10: y_n = sum_s softmax_s(omega_s . (q_n - q_bar)) F_s."""
    q_bar, noise, uniform = Q.mean(2, keepdim=True), draw(2, 2, 1, 5, D, seed=8), torch.rand(2, 2, 1, 5).double()
    pi = (scale(q_bar) @ scale(K).mT).softmax(-1)
    z = (pi.cumsum(-1) <= uniform.mT).sum(-1)
    omega = scale(q_bar) + scale(K).gather(2, z[..., None].expand(-1, -1, -1, D)) + noise[:, :, 0]
    values = log_features(scale(K), omega).mT.softmax(-1) @ V
    expected = (scale(Q - q_bar) @ omega.mT).softmax(-1) @ values
    assert_equal(lara(Q, K, V, q_bar, None, noise, uniform, proposal="mixture", weighting="balance"), expected)


def test_mixed_landmarks_are_the_landmarks_where_these_coincide():
    k_bar = K_BAR[:, :, :1].expand_as(K_BAR)
    pool, mixed = (lara(Q, K, V, Q_BAR, k_bar, NOISE, proposal=proposal) for proposal in ("pool", "pool_mixed"))
    assert_equal(pool, mixed)


def test_every_token_a_segment():
    attn = layer(num_landmarks=24, landmark_transform="none", proposal="pool").double().eval()
    assert attn(3 * draw(2, 24, 8), (4, 6)).isfinite().all()


# The estimator


@every_weighting
def test_weights_sum_to_one_at_any_sample(weighting):
    omega = draw(2, 2, 1, D, seed=9).expand(-1, -1, C, -1)  # one sample, seen as every proposal's own
    q, q_bar = scale(Q), scale(Q_BAR)
    log_ratio = log_features(q_bar, omega).mT
    own = log_ratio.diagonal(dim1=2, dim2=3)
    alpha = query_weights(q, q_bar, omega, log_ratio, own, **EXPLICIT[weighting])
    assert_equal(alpha.sum(-1), torch.ones(2, 2, N, dtype=torch.float64))
    assert (alpha.std(2).max() > 1e-4) == (weighting != "balance")  # True if weights differ among queries


def kernel_entries(weighting: str, noise_std: float = 1.0, signs: tuple[int, ...] = (1,)) -> tuple[Tensor, Tensor]:
    """200,000 estimates of exp(q_n . k_m) with unclamped weights, (200000, N, M); and the exact entries.

    signs: (1, -1) for hyperbolic features.
    """
    q, k, q_bar, k_bar = (scale(x[0, 0]) / 2 for x in (Q, K, Q_BAR, K_BAR))
    mean = q_bar + k_bar
    omega = mean + noise_std * draw(200_000, 1, C, D, seed=10)
    log_ratio = sum(log_features(mean, sign * omega).exp() for sign in signs).log().mT - math.log(len(signs))
    own = log_ratio.diagonal(dim1=2, dim2=3)
    alpha = query_weights(q[None, None], q_bar[None, None], omega, log_ratio, own, **EXPLICIT[weighting])
    kernel = 0
    for sign in signs:
        weight = alpha * (-own[:, :, None] + log_features(q, sign * omega)).exp() / len(signs)
        kernel = kernel + weight @ log_features(k, sign * omega).exp().mT
    return kernel[:, 0], (q @ k.mT).exp()


@every_weighting
@pytest.mark.parametrize(
    "signs", [pytest.param((1,), id="positive"), pytest.param((1, -1), id="hyperbolic", marks=pytest.mark.complete)]
)
def test_kernel_entries_are_unbiased(weighting, signs):
    assert_mean(*kernel_entries(weighting, signs=signs))


@pytest.mark.complete
@every_weighting
def test_kernel_entries_are_biased_under_the_released_noise(weighting):
    """The released densities assume unit covariance, which the released samples do not have."""
    assert standard_errors(*kernel_entries(weighting, noise_std=D**-0.25)).max() > 20


# Options


def captured(attn, monkeypatch) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """q_bar, k_bar, noise and uniform of one forward pass."""
    calls = []
    monkeypatch.setattr("attention.mechanisms.lara.lara", lambda q, k, v, *rest, **_: calls.append(rest) or q)
    attn(torch.randn(3, 24, 8), (4, 6))
    monkeypatch.undo()
    return calls[0]


def test_noise_follows_the_options(monkeypatch):
    _, _, noise, uniform = captured(layer(), monkeypatch)
    assert noise.shape == (3, 2, 4, 1, 4)
    assert uniform is None
    first, second = captured(layer(samples_per_proposal=2), monkeypatch)[2].unbind(3)
    assert (first + second).abs().min() > 0
    _, _, noise, uniform = captured(layer(samples_per_proposal=2, antithetic=True, proposal="mixture"), monkeypatch)
    assert torch.equal(noise[:, :, :, 0], -noise[:, :, :, 1])
    assert uniform.shape == (3, 2, 4, 1)
    many = captured(layer(num_landmarks=24, samples_per_proposal=2, noise="released"), monkeypatch)[2]
    assert many.std().item() == pytest.approx(4**-0.25, abs=0.05)
    single = layer(proposal="single", num_landmarks=7)
    q_bar, k_bar, noise, uniform = captured(single, monkeypatch)
    assert (q_bar.shape, k_bar) == ((3, 2, 1, 4), None)
    assert (noise.shape, uniform.shape) == ((3, 2, 1, 7, 4), (3, 2, 1, 7))
    _, _, noise, uniform = captured(single.eval(), monkeypatch)
    assert (noise.shape, uniform.shape) == ((2, 1, 7, 4), (2, 1, 7))
    _, _, noise, uniform = captured(layer(proposal="mixture").eval(), monkeypatch)
    assert not noise.any()
    assert uniform is None


def test_a_second_sample_acts_in_training_only():
    one, two = layer().eval(), layer(samples_per_proposal=2).eval()
    x = torch.randn(2, 24, 8)
    assert torch.equal(one(x, (4, 6)), two(x, (4, 6)))


def test_the_released_floor_of_two_samples_is_that_of_two_proposals():
    """The released code counts 2 c proposals: its alpha, of at least 1e-8, is half of ours."""
    queries, landmarks, noise = 9 * draw(1, 1, N, D, seed=7), draw(1, 1, C, D, seed=9), draw(1, 1, C, 2, D, seed=8)
    omega = (landmarks[:, :, :, None] + noise).flatten(2, 3)
    log_ratio = log_features(landmarks, omega).mT
    own = own_ratio(log_ratio)
    released = (own - log_ratio.repeat_interleave(2, -1).logsumexp(-1)).exp()[:, :, None]
    r = (queries @ landmarks.mT).softmax(-2).repeat_interleave(2, -1)
    released = (released + 1.0 * (r - r.mean(-1, keepdim=True))).clamp(min=1e-8)
    assert (released == 1e-8).any()

    ours = log_weights(queries, landmarks, omega, log_ratio, "decoupled", 2.0)
    assert_equal(ours, (2 * released).log() - own[:, :, None])


def test_a_single_proposal_tells_queries_apart_in_evaluation():
    attn = layer(proposal="single").eval()
    assert attn(torch.randn(2, 24, 8), (4, 6)).std(1).min() > 1e-3


def test_landmarks_are_transformed_segment_means(monkeypatch):
    """Mean, then Linear and LayerNorm: per head (light), or over all channels before the heads are split (dense)."""
    x = torch.randn(1, 24, 8)
    monkeypatch.setattr(
        "attention.mechanisms.lara.lara", lambda q, k, v, q_bar, *_, **__: means.append((q, q_bar)) or q
    )
    for kind in ("light", "dense", "none"):
        attn, means = layer(landmark_transform=kind), []
        attn(x, (4, 6))
        q, q_bar = means[0]
        segment = q.view(1, 2, 2, 2, 2, 3, 4).mean((3, 5)).flatten(2, 3)  # 2 x 2 segments of 2 x 3 tokens
        if kind == "light":
            segment = attn.landmark_q.norm(attn.landmark_q.linear(segment))
        elif kind == "dense":
            whole = attn.landmark_q.norm(attn.landmark_q.linear(segment.transpose(1, 2).flatten(2)))
            segment = whole.view(1, 4, 2, 4).transpose(1, 2)
        torch.testing.assert_close(q_bar, segment)
