"""The paths that avoid a mechanism's kernels, or save its memory, and those off a CPU agree with the path "auto"."""

import pytest
import torch

from attention import ATTENTION, create_attention, kernels
from attention.ops.memory import by_parts
from bench.operators import off_cpu
from engine.runtime.memory import peak_bytes
from tests.support.calls import assert_paths_agree, value_and_gradients
from tests.support.comparisons import BF16_RMS, FP64_GRADIENT
from tests.support.facts import CASES
from tests.support.partition import chosen


@pytest.mark.parametrize("path", ["plain", "lean"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths_agree_in_value_and_all_gradients(case, path):
    assert_paths_agree(case, path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_off_a_cpu_have_the_same_values_and_gradients(case):
    attn, x = case.build(), case.tokens()
    expected = value_and_gradients(attn, x, case.grid)
    with off_cpu():
        found = value_and_gradients(attn, x, case.grid)
    for result, other in zip(found, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=FP64_GRADIENT, atol=FP64_GRADIENT)


@pytest.mark.parametrize("case", [case for case in CASES if case.well_conditioned], ids=str)
def test_layers_off_a_cpu_lose_no_more_to_bfloat16(case):
    """Off a CPU, factors of products keep the type of queries, keys and values; sums and logarithms do not."""

    def results(amp: bool, x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return value_and_gradients(attn, x, case.grid)

    attn, x = case.build().float(), case.tokens().float()
    exact, on_cpu = results(False, x), results(True, x)
    with off_cpu():
        off = results(True, x)
    for expected, rounded, other in zip(exact, on_cpu, off, strict=True):
        assert (other - expected).norm() <= 1.5 * (rounded - expected).norm() + BF16_RMS * expected.norm()


LARGEST_PEAKS = {"clustered": 2.3, "reformer": 2.2}
"""Peaks above 1.6, because a single image needs that much."""


@pytest.fixture(scope="module")
def softmax_peak():
    return peak("softmax", "auto")


@pytest.mark.parametrize("name", chosen(ATTENTION, ("eva", "softmax").__contains__))
def test_lean_layers_need_little_more_than_fused_softmax_attention(name, softmax_peak):
    assert peak(name, "lean") <= LARGEST_PEAKS.get(name, 1.6) * softmax_peak


def peak(name: str, path: str) -> int:
    """Bytes at the peak of a layer's forward and backward pass on 8 images of 784 tokens."""
    attn = create_attention(name, dim=192, num_heads=3, grid=(28, 28))
    x = torch.randn(8, 784, 192, requires_grad=True)
    dy = torch.randn(x.shape)
    with kernels.use(path):
        return peak_bytes(lambda: torch.autograd.grad(attn(x, (28, 28)), [x, *attn.parameters()], dy), x.device)


def test_tensors_of_other_batches_are_refused():
    q, other = torch.randn(16, 1, 4, 2), torch.randn(3, 1, 4, 2)
    assert torch.equal(by_parts(lambda q, none: q, q, None), q)
    with pytest.raises(ValueError, match=r"zip\(\)"):
        by_parts(lambda q, other: q, q, other)
