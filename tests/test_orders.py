"""How memory and multiply-accumulates of every mechanism grow with the number of tokens, measured."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention import ATTENTION, create_attention

ORDERS = {  # least and largest exponent of N; 1 where not listed
    **dict.fromkeys(("softmax", "ra", "synthesizer"), (2, 2)),  # softmax: without a fused kernel
    "combiner": (1, 1.5),  # N (u + N / u): 1.5 about N = u^2, here 2401
    "sparse_transformer": (1, 1.5),  # N (b + N / b) in blocks of a row, b = sqrt(N)
}


def saved_bytes_and_macs(name: str, side: int) -> tuple[int, int]:
    """What a layer's attention keeps for the backward pass of one image of this side, and its multiply-accumulates."""
    with torch.device("meta"):
        attn = create_attention(name, dim=192, num_heads=3, grid=(side, side))
        tokens = torch.empty(1, side * side, 192, requires_grad=True)
        projected = attn.project(tokens, (side, side))
    saved = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), FlopCounterMode(display=False) as counter:
        attn.attend(*projected, (side, side))
    return sum(storage.nbytes() for storage in saved.values()), counter.get_total_flops() // 2


@pytest.mark.parametrize("name", ATTENTION)
def test_memory_and_macs_grow_as_they_should(name):
    """From 784 to 12544 tokens."""
    low, high = ORDERS.get(name, (1, 1))
    least, most = (saved_bytes_and_macs(name, side) for side in (28, 112))
    for before, after in zip(least, most, strict=True):
        assert low - 0.15 < math.log(after / before, 16) < high + 0.15
