"""The paths that avoid a mechanism's kernels, or save its memory, agree with the path "auto"."""

import pytest
import torch

from attention import ATTENTION, create_attention, kernels
from attention.ops.memory import by_parts
from engine.runtime.memory import peak_bytes
from tests.support.calls import assert_paths_agree
from tests.support.facts import CASES


@pytest.mark.parametrize("path", ["plain", "lean"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths_agree_in_value_and_all_gradients(case, path):
    assert_paths_agree(case, path)


LARGEST_PEAKS = {"clustered": 2.3, "reformer": 2.2}
"""Peaks above 1.6, because a single image needs that much."""


@pytest.fixture(scope="module")
def softmax_peak():
    return peak("softmax", "auto")


@pytest.mark.parametrize("name", ATTENTION)
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
