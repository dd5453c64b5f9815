"""analyze.py weighting: LARA's weights, and the optimal ones of appendix D, by quadrature in one dimension."""

import csv
import math

import pytest
import torch

import analyze
from analysis import weighting
from analysis.weighting import (
    WEIGHTS,
    evaluate_at,
    fit_optimal,
    outputs_error,
    sample_proposals,
    sampled_variance,
    variance,
    weights,
)
from tests.analysis.models import save_model, save_pyramid
from tests.support.comparisons import assert_equal

OPTIONS = ["model.depth=1", "model.embed_dim=24", "model.img_size=16", "model.stem=linear"]
Q = torch.tensor([[0.4], [-0.7]], dtype=torch.float64)
K = torch.tensor([[0.5], [-0.3], [0.9], [-0.8]], dtype=torch.float64)
CENTRE = torch.tensor([[0.6], [-0.9], [0.1]], dtype=torch.float64)
R = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.7, 0.2]], dtype=torch.float64)


def values(channels: int) -> torch.Tensor:
    return torch.randn(4, channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def quadrature(channels: int):
    """Samples on a fine grid, whose sums times its step are integrals to rounding; densities, the grid and its step."""
    v, omega = values(channels), torch.linspace(-12, 12, 4001, dtype=torch.float64)[:, None]
    mu = (Q @ K.mT).softmax(-1) @ v
    densities = torch.exp(-(omega - CENTRE.mT).square() / 2) / math.sqrt(2 * math.pi)
    step = (omega[1] - omega[0]).item()
    return evaluate_at(omega, Q, K, v, CENTRE, mu, densities.sum(-1) * step), densities, omega, step


@pytest.mark.parametrize("channels", [1, 3])
def test_densities_and_outputs_are_those_of_the_paper(channels):
    samples, densities, omega, _ = quadrature(channels)
    assert_equal(samples.balance, densities / densities.sum(-1, keepdim=True))
    centres = Q[:, None] + K[None]  # p_n is a mixture about q_n + k_m
    pi = (Q @ K.mT).softmax(-1)
    p = (pi[:, None] * torch.exp(-(omega[None] - centres.mT).square() / 2)).sum(-1) / math.sqrt(2 * math.pi)
    assert_equal(samples.ratio, p / densities.sum(-1))
    of_one = samples.ratio * samples.measure
    torch.testing.assert_close(of_one.sum(-1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-9)
    mean = (of_one[..., None] * samples.deviation).sum(1)  # f is an unbiased estimate under p_n
    torch.testing.assert_close(mean, torch.zeros(2, channels, dtype=torch.float64), rtol=0, atol=1e-9)


def test_one_channel_has_the_system_that_the_paper_prints():
    """sum_c r_c integral q_c' q_c / Q = integral q_c' p (f - mu) / Q."""
    samples, densities, _, step = quadrature(1)
    total = densities.sum(-1, keepdim=True)
    system = step * densities.mT @ (densities / total)
    right = step * torch.einsum("sc,qs,qs->qc", densities, samples.ratio, samples.deviation[..., 0])
    assert_equal(fit_optimal(samples)[..., 0], torch.linalg.solve(system, right.mT).mT)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_optimal_weights_satisfy_their_own_equations_and_sum_to_one(channels):
    samples, *_ = quadrature(channels)
    rows = fit_optimal(samples)
    alpha = weights("optimal", samples, R, rows)
    torch.testing.assert_close(alpha.sum(-1), torch.ones_like(alpha[..., 0]), rtol=0, atol=1e-9)
    integral = torch.einsum("s,qs,qsc,qsd->qcd", samples.measure, samples.ratio, alpha, samples.deviation)
    torch.testing.assert_close(integral, rows, rtol=0, atol=1e-8)  # r_c = integral alpha_c p (f - mu)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_weights_have_less_variance_than_the_optimal_ones(channels):
    samples, *_ = quadrature(channels)
    rows = fit_optimal(samples)
    least = variance(alpha := weights("optimal", samples, R, rows), samples)
    for name in ("balance", "coupled", "decoupled"):
        other = weights(name, samples, R, rows)
        torch.testing.assert_close(other.sum(-1), torch.ones_like(other[..., 0]), rtol=0, atol=1e-12)
        assert (variance(other, samples) > least + 1e-6).all()
    for seed in range(5):  # any direction that keeps the sum of weights
        step = torch.randn(alpha.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        step = samples.balance * (step - (samples.balance * step).sum(-1, keepdim=True))
        near = [variance(alpha + size * step, samples) for size in (-1e-3, 1e-3)]
        assert (torch.stack(near) >= least).all()
        torch.testing.assert_close(near[0], near[1], rtol=0, atol=1e-7)  # the slope is zero


def test_the_variance_is_that_of_estimates():
    """Eq. 20 is the covariance of sum_c alpha_c p / q_c (f - mu), with a sample of every proposal."""
    torch.manual_seed(0)
    v = values(2)
    mu, passes = (Q @ K.mT).softmax(-1) @ v, 100_000
    samples = sample_proposals(Q, K, v, CENTRE, mu, passes)
    expected, *_ = quadrature(2)
    own = torch.arange(3).repeat_interleave(passes)
    alpha = weights("coupled", samples, R, torch.zeros(2, 3, 2))
    weight = samples.ratio * alpha[:, torch.arange(3 * passes), own] / samples.balance[torch.arange(3 * passes), own]
    estimates = (weight[..., None] * samples.deviation).unflatten(1, (3, passes)).sum(1)
    found, exact = estimates.var(1).sum(-1), variance(weights("coupled", expected, R, torch.zeros(2, 3, 2)), expected)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0)  # Monte Carlo, of heavy tails
    torch.testing.assert_close(variance(alpha, samples), exact, rtol=0.05, atol=0)


@pytest.mark.parametrize("name", ["balance", "optimal"])
def test_two_samples_of_each_proposal_estimate_the_variance_without_bias(name):
    torch.manual_seed(0)
    v = values(2)
    mu, (expected, *_) = (Q @ K.mT).softmax(-1) @ v, quadrature(2)
    rows, found = fit_optimal(expected), []
    for _ in range(2000):
        samples = sample_proposals(Q, K, v, CENTRE, mu, 2)
        alpha = weights(name, samples, R, rows)
        found.append(torch.stack([sampled_variance(alpha, samples), variance(alpha, samples)]))
    estimates, exact = torch.stack(found), variance(weights(name, expected, R, rows), expected)
    unbiased, biased = estimates.mean(0)
    of_unbiased, of_biased = 4 * estimates.std(0) / len(found) ** 0.5
    assert ((unbiased - exact).abs() < of_unbiased).all()
    assert (biased + of_biased < exact).all()  # so many draws tell


def test_one_proposal_has_the_weight_one():
    samples = evaluate_at(
        torch.linspace(-3, 3, 50, dtype=torch.float64)[:, None],
        Q,
        K,
        values(2),
        CENTRE[:1],
        Q.new_zeros(2, 2),
        Q.new_ones(50),
    )
    rows = fit_optimal(samples)
    for name in WEIGHTS:
        assert_equal(weights(name, samples, R[:, :1], rows), torch.ones(2, 50, 1, dtype=torch.float64))


def test_equal_weights_of_proposals_that_are_the_querys_own_density_leave_the_mean_of_f():
    """p = Q / c, so that every sample has the same weight: the error is that of a mean of c samples of f."""
    torch.manual_seed(0)
    samples = sample_proposals(Q[:1], K[:1], values(2)[:1], (Q[:1] + K[:1]).expand(3, 1), values(2)[:1], 10)
    assert_equal(samples.deviation, torch.zeros_like(samples.deviation))  # one key: f = v
    assert outputs_error(weights("balance", samples, R[:1], Q.new_zeros(1, 3, 2)), samples, 3) == 0
    assert_equal(samples.ratio, torch.full_like(samples.ratio, 1 / 3))


def test_on_a_model(tmp_path, capsys):
    checkpoint = save_model(tmp_path, OPTIONS, scale=10)
    sizes = "--images", "2", "--draws", "2", "--queries", "3", "--samples", "64", "--passes", "16"
    analyze.main(["weighting", str(checkpoint), *sizes, "--landmarks", "4", "--output", str(tmp_path)])
    with (tmp_path / "weighting.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["weights"] for row in rows] == list(WEIGHTS)
    assert all(float(row["variance"]) > 0 for row in rows)
    assert all(0 < float(row["error"]) < 5 for row in rows)
    assert "optimal (oracle)" in capsys.readouterr().out


def test_the_variance_is_measured_on_other_samples_than_those_of_the_fit(tmp_path, monkeypatch):
    """Weights, errors and variances are of samples that the fit of the optimal weights has not seen."""
    checkpoint, fitted, measured = save_model(tmp_path, OPTIONS, scale=10), [], []

    def spy(function, places):
        def noted(*args):
            places.extend(each.deviation for each in args if isinstance(each, weighting.Samples))
            return function(*args)

        return noted

    for name, places in ("fit_optimal", fitted), ("sampled_variance", measured), ("outputs_error", measured):
        monkeypatch.setattr(weighting, name, spy(getattr(weighting, name), places))
    sizes = "--images", "1", "--draws", "1", "--queries", "2", "--samples", "8", "--passes", "5", "--landmarks", "4"
    analyze.main(["weighting", str(checkpoint), *sizes, "--output", str(tmp_path)])
    assert {x.shape[1] for x in fitted} == {4 * 8}
    assert {x.shape[1] for x in measured} == {4 * 5}
    assert len(measured) == 2 * len(WEIGHTS) * len(fitted)


def test_a_lack_of_memory_is_one_line(monkeypatch, capsys):
    def main(args):
        raise MemoryError

    monkeypatch.setattr(weighting, "main", main)
    with pytest.raises(SystemExit, match="2"):
        analyze.main(["weighting", "runs/eva"])
    assert capsys.readouterr().err == "error: out of memory; give smaller numbers, or a smaller model\n"


def test_too_few_samples_are_refused(tmp_path, capsys):
    checkpoint = save_model(tmp_path, OPTIONS, scale=10)
    with pytest.raises(SystemExit) as ended:
        analyze.main(["weighting", str(checkpoint), "--samples", "7", "--output", str(tmp_path)])
    assert ended.value.code == 2
    problem = "error: --samples 7: the optimal weights have 8 unknowns for each proposal; give at least 8"
    assert capsys.readouterr().err.strip().splitlines()[-1] == problem


def test_samples_lie_on_the_device_of_their_proposals():
    """Whatever torch's default device is, nothing else than the inputs decides."""
    v = values(2)
    mu = (Q @ K.mT).softmax(-1) @ v
    with torch.device("meta"):
        samples = sample_proposals(Q, K, v, CENTRE, mu, 5)
        alpha = weights("optimal", samples, R, fit_optimal(samples))
        found = outputs_error(alpha, samples, 3), sampled_variance(alpha, samples).sum()
    assert all(x.device.type == "cpu" and x.isfinite() for x in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_on_a_gpu_is_measured_on_the_cpu(tmp_path):
    checkpoint = save_model(tmp_path, OPTIONS, scale=10)
    sizes = "--images", "1", "--draws", "1", "--samples", "16", "--passes", "8", "--landmarks", "4"
    analyze.main(["weighting", str(checkpoint), "train.device=cuda", *sizes, "--output", str(tmp_path)])
    assert (tmp_path / "weighting.csv").stat().st_size > 100


def test_numbers_of_landmarks_are_checked_for_every_grid_before_any_work(tmp_path, monkeypatch, capsys):
    """The nearest number is one that all of them have."""
    checkpoint = save_pyramid(tmp_path)
    monkeypatch.setattr(weighting, "measure", lambda *args: pytest.fail("work"))
    with pytest.raises(SystemExit) as ended:
        analyze.main(["weighting", str(checkpoint), "--landmarks", "1", "16", "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--landmarks = 16 does not divide the 2x2 grid" in (problem := capsys.readouterr().err)
    assert problem.strip().endswith("nearest valid: 4")


def test_a_pyramid_has_segments_of_each_layers_own_grid(tmp_path):
    checkpoint = save_pyramid(tmp_path)
    sizes = "--images", "1", "--draws", "1", "--samples", "16", "--passes", "4", "--landmarks", "4"
    analyze.main(["weighting", str(checkpoint), *sizes, "--output", str(tmp_path)])
    with (tmp_path / "weighting.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows[:: len(WEIGHTS)]] == ["1", "2", "3", "4"]


def test_numbers_of_landmarks_are_checked_before_any_work(tmp_path, capsys):
    checkpoint = save_model(tmp_path, OPTIONS, scale=10)
    with pytest.raises(SystemExit) as ended:
        analyze.main(["weighting", str(checkpoint), "--landmarks", "5", "--output", str(tmp_path)])
    assert ended.value.code == 2
    assert "--landmarks = 5" in capsys.readouterr().err
