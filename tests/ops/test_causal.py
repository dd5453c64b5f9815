"""Causal attention by features: its dense matrix, precision and cost."""

import pytest
import torch

from attention.ops.random_features.causal import running_logits, running_mass
from attention.ops.random_features.op import (
    linear_attention,
    linear_attention_reference,
    mix_features,
    mix_features_reference,
)
from attention.parts import chunks
from tests.support.comparisons import FP64, FP64_GRADIENT, rms_ratio
from tests.support.inputs import draw

NORMALISERS = ("floor", 1e-6), ("floor", 3.0), ("clamp", 1e-2), ("sum", 0.5), ("none", 0.0)
every_length = pytest.mark.parametrize("N", [1, 8, 35, 67])
"""Lengths of sequences in chunks of 8."""


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 8)


def assert_agree(function, twin, *inputs, **options):
    """Asserts that values and all gradients agree."""
    inputs = [x.requires_grad_() for x in inputs]
    y, expected = function(*inputs, **options), twin(*inputs, **options)
    torch.testing.assert_close(y, expected, rtol=FP64, atol=FP64)
    probe = draw(*y.shape, seed=9)
    gradients = (torch.autograd.grad((z * probe).sum(), inputs) for z in (y, expected))
    for gradient, of_twin in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, of_twin, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)


@every_length
@pytest.mark.parametrize(("normaliser", "eps"), NORMALISERS)
def test_linear_attention_is_the_masked_matrix_of_its_kernel(normaliser, eps, N):
    phi_q, phi_k, v = draw(2, 3, N, 5), draw(2, 3, N, 5, seed=1), draw(2, 3, N, 4, seed=2)
    options = {"normaliser": normaliser, "eps": eps, "causal": True}
    assert_agree(linear_attention, linear_attention_reference, phi_q, phi_k, v, **options)


@every_length
def test_features_kept_as_logarithms_are_the_masked_matrix_of_their_kernel(N):
    log_q, log_k, v = 3 * draw(2, 3, N, 5), 3 * draw(2, 3, 5, N, seed=1), draw(2, 3, N, 4, seed=2)
    assert_agree(mix_features, mix_features_reference, log_q, log_k, v, causal=True)


@every_length
def test_running_logits_are_those_on_means_of_the_prefix(N):
    def twin(q, k, log_k):
        weights = log_k[:, :, None].expand(-1, -1, N, -1, -1)
        weights = weights.masked_fill(torch.ones(N, N).triu(1)[..., None] > 0, -torch.inf).softmax(3)
        return torch.einsum("bhnd,bhnms,bhmd->bhns", q, weights, k)

    q, k, log_k = draw(2, 3, N, 4), draw(2, 3, N, 4, seed=1), 3 * draw(2, 3, N, 5, seed=2)
    assert_agree(lambda q, k, log_k: running_logits(q, k, log_k, running_mass(log_k)), twin, q, k, log_k)


@pytest.mark.parametrize("later", [1e3, 1e30])
def test_the_largest_of_later_keys_rounds_nothing_earlier_to_zero(later):
    """Tests positions within a span, within a chunk and across chunks: a common maximum would give 0 / 0."""
    log_q, log_k, v = draw(1, 1, 35, 5).float(), draw(1, 1, 5, 35, seed=1).float(), draw(1, 1, 35, 4, seed=2).float()
    expected = mix_features(log_q, log_k, v, causal=True)
    for n in (1, 2, 5, 8, 20, 34):
        large = log_k.clone()
        large[..., n:] += later
        assert torch.equal(mix_features(log_q, large, v, causal=True)[:, :, :n], expected[:, :, :n])


def test_float32_is_as_precise_as_without_a_mask():
    """Logarithms differ by hundreds in a sequence of many chunks."""
    log_q, log_k, v = 30 * draw(1, 2, 515, 6), 30 * draw(1, 2, 6, 515, seed=1), draw(1, 2, 515, 4, seed=2)
    y = mix_features(log_q.float(), log_k.float(), v.float(), causal=True)
    assert rms_ratio(y.double(), mix_features(log_q, log_k, v, causal=True)) < 1e-5
    phi = draw(1, 2, 515, 6).abs()
    y = linear_attention(phi.float(), phi.float(), v.float(), causal=True)
    assert rms_ratio(y.double(), linear_attention(phi, phi, v, causal=True)) < 1e-6
