"""Random features and their samples: unbiased kernels, the variances of theory, generators with the laws they claim.

Monte-Carlo comparisons allow four standard errors, with fixed seeds.
"""

import pytest
import torch
from torch import Tensor

from attention.parts.features import log_features, trigonometric
from attention.parts.sampling import counter_normal, counter_uniform, gaussian, mixture_noise, sample_indices
from tests.support.comparisons import assert_mean
from tests.support.inputs import draw

FP64 = torch.zeros((), dtype=torch.float64)


def kernel_estimates(features: str, x: Tensor, y: Tensor, omega: Tensor) -> Tensor:
    """Estimates of exp(x . y) from samples (R, s, d): (R,)."""
    x, y = x.expand(len(omega), 1, -1), y.expand(len(omega), 1, -1)
    if features == "trigonometric":
        phi_x, phi_y = trigonometric(x, y, omega)
        return (phi_x * phi_y).sum((1, 2)) * (x.square().sum(-1)[:, 0] / 2 + y.square().sum(-1)[:, 0] / 2).exp()
    omega = torch.cat([omega, -omega], 1) if features == "hyperbolic" else omega
    return (log_features(x, omega) + log_features(y, omega)).exp().mean((1, 2))


@pytest.mark.parametrize("features", ["positive", "hyperbolic", "trigonometric"])
def test_kernel_estimates_are_unbiased_with_the_known_variance(features):
    S, d = 3, 4
    x, y = (0.8 * z / z.norm() for z in (draw(d, seed=1), draw(d, seed=2)))
    estimates = kernel_estimates(features, x, y, draw(400_000, S, d))
    kernel, plus, minus = (x @ y).exp(), (x + y).square().sum(), (x - y).square().sum()
    positive = plus.exp() * kernel**2 * (1 - (-plus).exp()) / S
    variance = {
        "positive": positive,
        "hyperbolic": positive * (1 - (-plus).exp()) / 2,
        "trigonometric": plus.exp() / kernel**2 * (1 - (-minus).exp()) ** 2 / (2 * S),
    }[features]
    assert_mean(estimates, kernel)
    assert_mean((estimates - kernel) ** 2, variance)


@pytest.mark.parametrize("sampling", ["orthogonal", "orthogonal_sqrt_d"])
def test_orthogonal_rows_are_orthogonal_in_blocks(sampling):
    torch.manual_seed(1)
    h, s, d = 2, 11, 4
    omega = gaussian(sampling, (h, s, d), FP64)
    assert omega.shape == (h, s, d)
    for start in range(0, s, d):
        block = omega[:, start : start + d]
        products = block @ block.mT
        off_diagonal = products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))
        torch.testing.assert_close(off_diagonal, torch.zeros_like(products), rtol=0, atol=1e-12)
    norms = omega.norm(dim=-1)
    assert torch.allclose(norms, torch.full_like(norms, d**0.5)) == (sampling == "orthogonal_sqrt_d")


@pytest.mark.parametrize("sampling", ["iid", "orthogonal"])
def test_each_row_alone_is_standard_normal(sampling):
    torch.manual_seed(2)
    omega = gaussian(sampling, (40_000, 6, 4), FP64)  # independent over the first axis only
    assert_mean(omega, 0.0)
    assert_mean(omega**4, 3.0)
    assert_mean(omega[..., :, None] * omega[..., None, :], torch.eye(4, dtype=torch.float64))
    assert_mean(omega.square().sum(-1).square(), 4.0 * (4 + 2))  # chi^2_d: E = d (d + 2)
    x, y = draw(4, seed=1) / 3, draw(4, seed=2) / 3
    assert_mean(kernel_estimates("positive", x, y, omega), (x @ y).exp())


def test_orthogonal_directions_are_uniform_over_rotations():
    torch.manual_seed(3)
    omega = gaussian("orthogonal_sqrt_d", (40_000, 4, 4), FP64)
    assert_mean(omega, 0.0)
    assert_mean(omega[..., :, None] * omega[..., None, :], torch.eye(4, dtype=torch.float64))


def test_counter_samples_follow_their_law():
    count = 400_000
    u, other = (counter_uniform(torch.tensor(seed), (count,)).double() for seed in (0, 2**32 - 1))
    assert u.min() > 0
    assert u.max() < 1
    assert_mean(u, 0.5)
    assert_mean((u - 0.5) ** 2, 1 / 12)
    assert_mean((u - 0.5) * (other - 0.5), 0.0)
    for lag in (1, 64, 1024):
        assert_mean((u[lag:] - 0.5) * (u[:-lag] - 0.5), 0.0)
    z = counter_normal(torch.tensor(5), (count,)).double()
    for power, moment in enumerate((0, 1, 0, 3), start=1):
        assert_mean(z**power, moment)


def test_counter_samples_depend_on_seed_and_position_only():
    seed = torch.tensor(7)
    state = torch.get_rng_state()
    assert torch.equal(counter_uniform(seed, (5, 3)).flatten(), counter_uniform(seed, (20,))[:15])
    assert not torch.equal(counter_uniform(seed, (20,)), counter_uniform(seed + 1, (20,)))
    assert torch.equal(torch.get_rng_state(), state)
    noise, uniform = mixture_noise((5, 2), FP64.expand(3), torch.tensor([7, 7]))
    assert noise.shape == (5, 2, 3)
    assert uniform.shape == (5, 2)
    assert noise.dtype == uniform.dtype == torch.float64


def test_indices_are_drawn_with_their_probabilities():
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.2, 0.3], [1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    index = sample_indices(probabilities, counter_uniform(torch.tensor(1), (1, 200_000)).double())
    assert_mean(torch.nn.functional.one_hot(index, 5).double().transpose(0, 1), probabilities)
    edges = torch.tensor([2**-24, 0.5, 0.7, 1 - 2**-24], dtype=torch.float64)
    assert sample_indices(probabilities[0], edges).tolist() == [1, 3, 4, 4]
    assert sample_indices(probabilities[1].float(), torch.ones(1)).tolist() == [4]  # never past the end
    sums = probabilities[0].cumsum(0)
    assert sample_indices(probabilities[0], edges, out=probabilities[0]).tolist() == [1, 3, 4, 4]
    assert probabilities[0].equal(sums)
