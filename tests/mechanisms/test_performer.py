"""Performer: the samples of each pass, the feature maps, and the symmetries."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import create_attention
from attention.mechanisms.performer import performer, performer_reference
from attention.parts.features import scale
from tests.support.cases import Case, effects
from tests.support.comparisons import assert_equal
from tests.support.growth import Growth
from tests.support.inputs import draw, one_head
from tests.support.random_features import random_feature_attention
from tests.support.symmetry import ALL

GRID = (3, 5)


def case(feature_redraw: str = "redraw", **options) -> Case:
    options = {"num_samples": 10, "feature_redraw": feature_redraw, **options}
    return Case("performer", (5, 7), options, stochastic=feature_redraw == "redraw")


CASES = [
    case(),
    case(omega_sampling="orthogonal", local=True),
    case(eval_omega_sampling="orthogonal_sqrt_d"),
    case("fixed", features="hyperbolic"),
    case("learnable"),
    replace(case(features="trigonometric"), well_conditioned=False),
    case(features="relu"),
    case("fixed", causal=True),
    # a floor again, and relative to the largest exp(|q|^2 / 2) among the queries, which has no gradient
    replace(
        case(features="trigonometric", released_clamp=True),
        well_conditioned=False,
        mixes_values=False,
        gradients_are_slopes=False,
    ),
    replace(case(features="relu", released_clamp=True), mixes_values=False),
    # its normaliser has a floor; what is added to its features is relative to a maximum without a gradient, as released
    replace(case(features="favorp"), mixes_values=False, gradients_are_slopes=False),
]
EFFECTS = {
    **effects({}, num_samples=10, released=True, features="hyperbolic", omega_sampling="orthogonal"),
    **effects({}, eval_omega_sampling="orthogonal", feature_redraw="fixed", local=True, causal=True),
    "released_clamp": ({"features": "trigonometric"}, True),
}
SYMMETRIES = [
    *((ALL, {"features": x}) for x in ("positive", "hyperbolic", "trigonometric", "relu", "favorp")),
    (set(), {"local": True}),
    (set(), {"causal": True}),
]
GROWTH = [Growth(1, 1), Growth(1, 1, lambda side: {"causal": True})]
REFUSED = [
    (
        {"feature_redraw": "learnable", "eval_omega_sampling": "orthogonal"},
        r"attention\(performer\).eval_omega_sampling = orthogonal: .*; set eval_omega_sampling: iid",
    ),
    ({"released_clamp": True}, r"released_clamp = True: acts with features .*; set released_clamp: False"),
    *(
        ({"causal": True, "features": x}, rf"features = {x}: not for causal attention; set one of positive")
        for x in ("trigonometric", "favorp")
    ),
    ({"features": "fourier"}, r"attention\(performer\).features: 'fourier' is not a choice"),
]
RELEASED = {
    "performer_favorp_64": {"released": True, "num_samples": 64},
    "performer_fourier_16": {"released": True, "num_samples": 16, "features": "trigonometric"},
    "performer_relu_16": {"released": True, "num_samples": 16, "features": "relu"},
    "performer_favorp_16_learnable": {"released": True, "num_samples": 16, "feature_redraw": "learnable"},
}
SYMBOLS = {"s": 128}


def layer(**options):
    torch.manual_seed(0)
    return create_attention("performer", dim=8, num_heads=2, grid=GRID, num_samples=6, **options)


def samples(attn, monkeypatch) -> Tensor:
    """The omega of one forward pass."""
    used = []
    monkeypatch.setattr(
        "attention.mechanisms.performer.performer", lambda q, k, v, omega, *_, **__: used.append(omega) or q
    )
    attn(torch.zeros(1, 15, 8), GRID)
    monkeypatch.undo()
    return used[0]


def test_by_hand():
    """One sample omega = 1: xi(x) = exp(x - x^2 / 2), which is 1 for x = 0 and for x = 2, and sqrt(e) for x = 1.

    With one sample the feature of a query cancels in the ratio: every query gets the same output.
    """
    q, k, v, omega = one_head(5, -1, 0), one_head(0, 2, 1), one_head(1, 3, 4), torch.ones(1, 1, 1).double()
    root = math.e**0.5
    expected = (1 * 1 + 1 * 3 + root * 4) / (1 + 1 + root)
    assert_equal(performer(q, k, v, omega), one_head(expected, expected, expected))


def test_hyperbolic_features_are_positive_ones_at_mirrored_samples():
    q, k, v, omega = draw(2, 2, 9, 4), draw(2, 2, 9, 4, seed=1), draw(2, 2, 9, 4, seed=2), draw(2, 5, 4, seed=3)
    mirrored = random_feature_attention(scale(q), scale(k), v, torch.cat([omega, -omega], 1))
    assert_equal(performer(q, k, v, omega, features="hyperbolic"), mirrored)


@pytest.mark.parametrize("features", ["hyperbolic", "relu", "relu_released"])
def test_causal_features_are_the_masked_matrix_of_their_kernel(features):
    q, k, v, omega = draw(2, 2, 9, 4), draw(2, 2, 9, 4, seed=1), draw(2, 2, 9, 4, seed=2), draw(2, 5, 4, seed=3)
    y, expected = (f(q, k, v, omega, features=features, causal=True) for f in (performer, performer_reference))
    assert_equal(y, expected)


def test_negative_normalisers_keep_their_sign():
    q, k, v, omega = draw(1, 2, 40, 4), draw(1, 2, 40, 4, seed=1), draw(1, 2, 40, 4, seed=2), draw(2, 1, 4, seed=3)
    y = performer(3 * q, 3 * k, v, omega, features="trigonometric")
    angle = (scale(3 * q) @ omega.mT)[..., :, None, :] - (scale(3 * k) @ omega.mT)[..., None, :, :]
    kernel = angle.cos().mean(-1) * (scale(3 * k).square().sum(-1) / 2).exp()[..., None, :]
    normaliser = kernel.sum(-1, keepdim=True)
    assert 0 < (normaliser < 0).sum() < normaliser.numel()
    assert_equal(y, kernel @ v / normaliser)


def test_a_vanishing_normaliser_is_raised_to_its_floor():
    q, omega = torch.zeros(1, 1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
    k = torch.tensor([-torch.pi / 2, torch.pi / 2], dtype=torch.float64).view(1, 1, 2, 1)  # cosines of 6e-17
    v = torch.tensor([2.0, 0.0], dtype=torch.float64).view(1, 1, 2, 1)
    y = performer(q, k, v, omega, features="trigonometric")
    assert y.abs() < 1e-9  # 1e-16 / 1e-6; the ratio itself is 1


def test_the_released_code_raises_negative_normalisers_too():
    """The kernel exp((|q|^2 - pi^2) / 2) cos(q) of the key 0 is exp(-pi^2 / 2), below the floor, and -1."""
    q, k, v, omega = one_head(0, math.pi), one_head(0), one_head(3), torch.ones(1, 1, 1).double()
    ours = performer(q, k, v, omega, features="trigonometric")
    released = performer(q, k, v, omega, features="trigonometric_released")
    assert_equal(ours, one_head(3, 3))
    assert_equal(released, one_head(3 * math.exp(-(math.pi**2) / 2) / 1e-2, -3 / 1e-2))


@pytest.mark.parametrize("features", ["positive", "trigonometric", "favorp"])
def test_samples_are_all_that_is_stored(features):
    stored = {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias", "omega"}
    assert set(layer(features=features).state_dict()) == stored


def test_orthogonal_evaluation_after_independent_training(monkeypatch):
    """The released code trains on independent samples and evaluates on orthogonal ones."""

    def are_orthogonal(omega):
        return [torch.allclose(b @ b.mT, torch.diag_embed((b @ b.mT).diagonal()), atol=1e-5) for b in omega[:, :4]]

    attn = layer(eval_omega_sampling="orthogonal")
    assert are_orthogonal(samples(attn.eval(), monkeypatch)) == [True, True]
    assert are_orthogonal(samples(attn.train(), monkeypatch)) == [False, False]
    assert are_orthogonal(samples(layer(omega_sampling="orthogonal"), monkeypatch)) == [True, True]
