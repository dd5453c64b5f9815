"""The paths that avoid a mechanism's kernels, or save its memory, agree with the path "auto"."""

import pytest
import torch

from attention import ATTENTION, create_attention, kernels
from bench.operators import OperatorCounter
from tests.support.calls import assert_paths_agree
from tests.support.facts import CASES


@pytest.mark.parametrize("path", ["plain", "lean"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_paths_agree_in_value_and_all_gradients(case, path):
    assert_paths_agree(case, path)


LARGEST_PEAKS = {"clustered": 2.3, "reformer": 1.7, "mlla": 1.7}
"""Peaks above 1.6: sorted copies of each image, and what mlla keeps beside its attention."""


@pytest.fixture(scope="module")
def softmax_peak():
    return peak_bytes("softmax", "auto")


@pytest.mark.parametrize("name", ATTENTION)
def test_lean_layers_need_little_more_than_fused_softmax_attention(name, softmax_peak):
    assert peak_bytes(name, "lean") <= LARGEST_PEAKS.get(name, 1.6) * softmax_peak


def peak_bytes(name: str, path: str) -> int:
    """Peak of a layer's forward and backward pass on 8 images of 784 tokens."""
    attn = create_attention(name, dim=192, num_heads=3, grid=(28, 28))
    x = torch.randn(8, 784, 192, requires_grad=True)
    dy = torch.randn(x.shape)
    with kernels.use(path), OperatorCounter() as counter:
        attn(x, (28, 28)).backward(dy)
    return counter.peak_bytes
