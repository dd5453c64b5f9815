"""Randomized attention: unbiased in the variants that the paper proves unbiased, and the limits of its variants."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from attention import create_attention
from attention.mechanisms.ra import ra
from attention.mechanisms.softmax import softmax
from attention.parts.features import scale
from tests.support.calls import assert_paths_agree
from tests.support.cases import Case, effects
from tests.support.comparisons import assert_equal, assert_mean, standard_errors
from tests.support.growth import Growth
from tests.support.inputs import draw, one_head
from tests.support.random_features import random_feature_attention
from tests.support.symmetry import ALL

drawn = partial(Case, "ra", stochastic=True, well_conditioned=False)  # a key, which rounding may exchange
averaged = partial(Case, "ra", stochastic=True)
cosine = partial(drawn, mixes_values=False, far_keys_vanish=False, bounded=False)

CASES = [
    drawn((3, 5)),
    drawn((3, 5), {"num_samples": 2, "num_eval_samples": 3}),
    drawn((3, 5), {"features": "hyperbolic", "noise": "released"}),
    drawn((3, 5), {"eval_noise": False}),
    cosine((3, 5), {"features": "cosine", "num_samples": 2, "num_eval_samples": 3}),
    averaged((3, 5), {"proposal": "biased"}),
    averaged((3, 5), {"proposal": "biased", "eval_noise": True}),
    averaged((3, 5), {"proposal": "mean_key", "num_samples": 2, "features": "hyperbolic"}),
    averaged((3, 5), {"proposal": "mean_key", "num_samples": 2}),
]
EFFECTS = {
    **effects({}, num_samples=2, num_eval_samples=2, proposal="biased", features="hyperbolic", released=True),
    **effects({}, noise="released", eval_noise=False, local=True),
}
SYMMETRIES = [
    *((ALL, {"proposal": x}) for x in ("biased", "mean_key")),
    (set(), {}),  # random numbers of evaluation depend on positions; see the test in law below
]
SYMMETRIES_IN_LAW = [({"any", "within", "between"}, {}), ({"any", "within", "between"}, {"features": "cosine"})]
GROWTH = [Growth(2, 2), Growth(2, 2, lambda side: {"proposal": "biased"})]
REFUSED = [
    ({"proposal": "biased", "num_eval_samples": 2}, r"attention\(ra\).num_eval_samples = 2: .* set eval_noise: true"),
    ({"features": "cosine", "proposal": "biased"}, r"attention\(ra\).proposal = biased: .* set proposal: unbiased"),
]
RELEASED = {"ra_biased_m1": {"proposal": "biased", "released": True}}
SYMBOLS = {"s": 1}

N, D = 5, 4
Q, K, V = (1.5 * draw(1, 1, N, D, seed=seed) for seed in range(3))


def estimates(noise_std: float = 1.0, **options) -> Tensor:
    """2000 independent estimates of 100 samples each, (2000, N, D): 200,000 draws."""
    shape = (2000, 1, N, 100)
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    q, k, v = (x.expand(shape[0], -1, -1, -1) for x in (Q, K, V))
    return ra(q, k, v, noise_std * draw(*shape, D, seed=4), uniform, **options)[:, 0]


@pytest.mark.parametrize("features", ["positive", "hyperbolic", "cosine"])
def test_the_mean_is_softmax_attention(features):
    assert_mean(estimates(features=features), softmax(Q, K, V)[0, 0])


def test_gradients_of_cosine_features_are_unbiased_and_errors_fall_as_one_over_samples():
    """Samples do not depend on queries and keys, and no normaliser is a sample."""
    few, many = (draw(4000, 1, N, s, D, seed=4) for s in (2, 32))
    turns = [torch.rand(x.shape[:-1], generator=torch.Generator().manual_seed(5)).double() for x in (few, many)]
    inputs = [x.clone().requires_grad_() for x in (Q, K, V)]
    copies = [x.repeat(4000, 1, 1, 1).requires_grad_() for x in (Q, K, V)]
    y, probe = ra(*copies, few, turns[0], features="cosine"), draw(1, 1, N, D, seed=6)
    expected = torch.autograd.grad((softmax(*inputs) * probe).sum(), inputs)
    for gradients, mean in zip(torch.autograd.grad((y * probe).sum(), copies), expected, strict=True):
        assert_mean(gradients[:, 0], mean[0, 0])
    variances = [x.var(0).mean().item() for x in (y, ra(*copies, many, turns[1], features="cosine"))]
    assert variances[0] / variances[1] == pytest.approx(16, rel=0.1)


def test_estimates_beyond_float16_stay_finite():
    torch.manual_seed(0)
    attn = create_attention("ra", dim=64, num_heads=1, grid=(7, 8), features="cosine").half()
    q, k, v = (1.5 * torch.randn(2, 1, 56, 64).half() for _ in range(3))
    torch.manual_seed(0)
    noise, uniform = attn.sample_noise(q)
    assert ra(q, k, v, noise, uniform, features="cosine").abs().max() > torch.finfo(torch.float16).max
    torch.manual_seed(0)
    assert attn.attend(q, k, v, (7, 8)).isfinite().all()


def test_by_hand_with_cosine_features():
    """Two keys of one channel at omega = pi / 2: with b = 0 cosines are 1 at 0 and 0 at 1; with b = pi / 2 they are 0
    and -1. Query 0 has xi = sqrt(2) and 0; exp(q . k) is 1 for both keys. Query 1 has xi = 0 and -sqrt(2 e).
    """
    q, k, v = one_head(0, 1), one_head(0, 1), one_head(3, 5)
    omega, turns = one_head(math.pi / 2, math.pi / 2)[:, :, :, None], torch.tensor([[0], [0.25]]).double()
    # query 0, b = 0: 2 cos(0) cos(0) / 2 of the first key alone; query 1, b = pi / 2: 2 e of the second over 1 + e
    assert_equal(ra(q, k, v, omega, turns, features="cosine"), one_head(3, 2 * math.e * 5 / (1 + math.e)))
    assert_equal(ra(q, k, v, omega, turns.flip(0), features="cosine"), one_head(0, 0))


@pytest.mark.parametrize(
    "options",
    [
        {"noise_std": D**-0.25},
        {"noise_std": 0.0},
        {"noise_std": 0.0, "features": "cosine"},
        {"proposal": "biased"},
        {"proposal": "mean_key"},
    ],
    ids=str,
)
def test_the_mean_is_not_softmax_attention_with(options):
    """The released noise, evaluation without noise, and samples about a mean key are biased."""
    assert standard_errors(estimates(**options), softmax(Q, K, V)[0, 0]).max() > 20


@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
def test_all_proposals_agree_where_all_keys_coincide(features):
    k, noise, uniform = K[:, :, :1].expand_as(K), draw(1, 1, N, 3, D), torch.rand(1, 1, N, 3)
    drawn, by_attention, mean = (
        ra(Q, k, V, noise, uniform, proposal=proposal, features=features)
        for proposal in ("unbiased", "biased", "mean_key")
    )
    assert_equal(drawn, by_attention)
    assert_equal(drawn, mean)


def test_biased_equals_unbiased_where_attention_is_one_hot():
    q, noise, uniform = 1e4 * Q, draw(1, 1, N, 3, D), torch.rand(1, 1, N, 3)
    assert softmax(q, K, torch.eye(N).double()[None, None]).amax(-1).min() == 1
    biased = ra(q, K, V, noise, proposal="biased")
    assert_equal(ra(q, K, V, noise, uniform), biased)


def test_one_sample_shared_by_all_queries_is_random_feature_attention():
    omega = draw(1, 1, 1, 1, D, seed=6)
    noise = omega - (scale(Q) + scale(K).mean(2, keepdim=True))[:, :, :, None]
    expected = random_feature_attention(scale(Q), scale(K), V, omega[:, :, 0])
    assert_equal(ra(Q, K, V, noise, proposal="mean_key"), expected)


def test_noise_and_samples_follow_the_options():
    q = torch.zeros(2, 3, 40, 16)

    def sample_noise(training=True, **options):
        attn = create_attention("ra", dim=48, num_heads=3, grid=(5, 8), num_samples=7, **options)
        return attn.train(training).sample_noise(q)

    noise, uniform = sample_noise()
    assert (noise.shape, uniform.shape) == ((2, 3, 40, 7, 16), (2, 3, 40, 7))
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    assert sample_noise(noise="released")[0].std().item() == pytest.approx(16**-0.25, abs=0.01)
    noise, uniform = sample_noise(training=False, num_eval_samples=4)
    assert (noise.shape, uniform.shape) == ((3, 40, 4, 16), (3, 40, 4))
    assert noise.std().item() == pytest.approx(1, abs=0.03)
    noise, uniform = sample_noise(training=False, eval_noise=False)
    assert not noise.any()
    assert uniform.unique().numel() > 100
    noise, uniform = sample_noise(training=False, proposal="biased")
    assert not noise.any()
    assert uniform is None
    assert sample_noise(training=False, proposal="biased", eval_noise=True)[0].any()


def test_only_random_evaluation_has_a_seed():
    stored = {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    site = {"dim": 8, "num_heads": 2, "grid": (3, 5)}
    assert set(create_attention("ra", **site).state_dict()) == {*stored, "eval_seed"}
    assert set(create_attention("ra", **site, proposal="biased").state_dict()) == stored


def test_paths_agree_where_keys_are_drawn_for_two_heads_at_a_time():
    assert_paths_agree(drawn((20, 25)), "plain")
