"""Random feature attention: its definition, precision, and the rate at which it approaches softmax."""

import math

import pytest
import torch

from attention.mechanisms.softmax import softmax
from attention.parts.features import log_features
from attention.parts.sampling import gaussian
from tests.support.comparisons import assert_equal
from tests.support.inputs import draw
from tests.support.random_features import random_feature_attention

FP64 = torch.zeros((), dtype=torch.float64)


def test_two_nested_softmaxes_are_the_ratio_of_sums():
    q, k, v, omega, weight = (
        draw(2, 3, 5, 4),
        draw(2, 3, 7, 4, seed=1),
        draw(2, 3, 7, 6, seed=2),
        draw(3, 8, 4),
        draw(5, 8),
    )
    phi_q, phi_k = (log_features(q, omega) + weight).exp(), log_features(k, omega).exp()
    kernel = phi_q @ phi_k.mT
    expected = kernel @ v / kernel.sum(-1, keepdim=True)
    assert_equal(random_feature_attention(q, k, v, omega, weight), expected)


def test_large_inputs_do_not_overflow():
    q, k, v, omega = (300 * draw(6, 4, seed=seed).float() for seed in range(4))
    y = random_feature_attention(q, k, v, omega)
    assert y.isfinite().all()
    assert (y <= v.amax(0)).all()
    assert (y >= v.amin(0)).all()


@pytest.mark.parametrize("sampling", ["iid", "orthogonal"])
def test_error_falls_with_the_root_of_the_number_of_samples(sampling):
    """Mean squared error ~ 1/S."""
    torch.manual_seed(0)
    q, k, v = (0.3 * draw(1, 6, 4, seed=seed) for seed in range(3))
    exact = softmax(q * 2, k, v)  # the factor sqrt(d) = 2 undoes softmax's scale: q and k count as scaled already
    few, many = (
        (random_feature_attention(q, k, v, gaussian(sampling, (1000, samples, 4), FP64)) - exact).square().mean((1, 2))
        for samples in (64, 16 * 64)
    )
    ratio = few.mean() / many.mean()
    relative = sum((error.std() / error.mean()) ** 2 / len(error) for error in (few, many)) ** 0.5
    # Beside the variance, of order 1/S, stand terms of order 1/S^2: a twentieth at S = 64.
    assert abs(ratio / 16 - 1) < 4 * relative + 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_features_are_computed_in_full_precision(dtype):
    q, k, v, omega = (draw(6, 4, seed=seed).to(dtype) for seed in range(4))
    with torch.autocast("cpu", torch.bfloat16):
        y = random_feature_attention(q, k, v, omega)
    full = torch.float64 if dtype == torch.float64 else torch.float32
    assert y.dtype == full
    assert torch.equal(y, random_feature_attention(*(z.to(full) for z in (q, k, v, omega))))
    assert math.isfinite(y.sum())
