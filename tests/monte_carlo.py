"""Fixed random tensors, and means compared within their standard errors."""

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals in float64, a function of shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def deviation(samples: Tensor, expected: Tensor | float) -> Tensor:
    """Distance of the mean over the first axis from `expected`, in standard errors."""
    error = (samples.mean(0) - expected).abs()
    return torch.where(error == 0, 0.0, error / (samples.std(0) / len(samples) ** 0.5))


def assert_mean(samples: Tensor, expected: Tensor | float):
    """The mean of `samples` over their first axis is `expected`, within four standard errors."""
    assert deviation(samples, expected).max() < 4
