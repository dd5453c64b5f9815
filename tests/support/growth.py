"""Growth of a mechanism's multiply-accumulates and memory with the number of tokens N.

One layer with one head of 8 channels C is run forward and backward at N = 784, 3136 and 12544. Only the mechanism's own
part counts: MACs beyond the 4 N C^2 of the projections, and bytes saved for backward beyond the 5 N C numbers of the
projections (input, queries, keys, values, mixed values). Channels are few, because terms with C^2 or d C would hide
terms that grow faster. The slope of log cost over log N is the order.
"""

import math
from collections.abc import Callable
from statistics import linear_regression
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from attention import create_attention
from models.costs import FOURIER

SIDES = 28, 56, 112
C = 8


class Growth(NamedTuple):
    """Orders of a mechanism's costs, 1.5 for N^1.5; `options` is a function of the grid's side."""

    macs: float
    saved_bytes: float
    options: Callable[[int], dict] = lambda side: {}


def own_costs(name: str, side: int, options: dict, device: str) -> tuple[float, int]:
    """MACs and bytes saved for backward of a layer in training on one image, beyond those of the projections."""
    N = side * side
    with torch.device(device):
        attn = create_attention(name, dim=C, num_heads=1, grid=(side, side), **options)
        x = torch.randn(1, N, C, requires_grad=True)
    parameters = {parameter.untyped_storage()._cdata for parameter in attn.parameters()}
    saved = {}  # keeps the storages alive, so that no address is reused

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage
        return tensor

    with (
        FlopCounterMode(display=False, custom_mapping=FOURIER) as counter,
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        y = attn(x, (side, side))
    macs = counter.get_total_flops() / 2
    y.backward(torch.ones_like(y))
    assert x.grad.shape == x.shape
    return macs - 4 * N * C * C, sum(storage.nbytes() for storage in saved.values()) - 4 * 5 * N * C


def order(costs: list[float]) -> float:
    """Slope of log |cost| over log N; costs are negative where queries and keys, or parts of them, do not exist."""
    return linear_regression([2 * math.log(side) for side in SIDES], [math.log(abs(cost)) for cost in costs]).slope
