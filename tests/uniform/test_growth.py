"""How multiply-accumulates and memory grow with the number of tokens N.

One layer with one head of 8 channels C is run forward and backward at N = 784, 3136 and 12544. What counts is the
mechanism's own part: MACs beyond the 4 N C^2 of the projections, and bytes saved for backward beyond the 5 N C numbers
of these (input, queries, keys, values, mixed values). Few channels, because terms with C^2 or d C hide those that grow
faster. The slope of log cost over log N is the order.
"""

import math
from collections.abc import Callable
from statistics import linear_regression
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from attention import ATTENTION, create_attention

SIDES = 28, 56, 112
C = 8


class Growth(NamedTuple):
    """Orders of a mechanism, 1.5 for N^1.5; `options` for a grid of some side."""

    name: str
    macs: float
    saved_bytes: float
    options: Callable[[int], dict] = lambda side: {}


GROWTH = [
    Growth("softmax", 2, 2),  # by its definition; fused kernels save less, see below
    Growth("local", 1, 1),
    Growth("performer", 1, 1),
    Growth("ra", 2, 2),
    Growth("ra", 2, 2, lambda side: {"proposal": "biased"}),
    Growth("lara", 1, 1),
    Growth("eva", 1, 1),
    # Every window has groups of its own: N/w^2 windows pool N tokens each, the most with small windows and few groups.
    Growth("eva", 2, 2, lambda side: {"partition": "complement", "window_size": 4, "num_landmarks": 1}),
    Growth("sra", 1, 1),  # shrunk to 49 keys
    Growth("sra", 2, 2, lambda side: {"reduction": 2}),
    # Spans of u = sqrt(N) tokens; beside u + N/u weights a token has copies and summaries, which are linear. At a fixed
    # u, 2 N^2 C / u is most of 2 N (u + N/u) C: more clearly so with spans of 4 than with the usual 49.
    Growth("combiner", 1.5, 1.5, lambda side: {"layout": "1d", "window_size": side}),
    Growth("combiner", 2, 2, lambda side: {"window_size": 2}),
    Growth("transformer_ls", 1, 1),
    Growth("smyrf", 1, 1),  # sorting, N log N, is no MAC and saves N indices
    Growth("scatterbrain", 1, 1),
    Growth("scatterbrain", 1, 1, lambda side: {"support": "lsh", "position_bias": "none"}),
    Growth("linear", 1, 1),
    Growth("xca", 1, 1),
    Growth("cosformer", 1, 1),
    Growth("transnormer", 1, 1),  # a Norm layer
    Growth("transnormer", 1, 1, lambda side: {"layer": 0, "depth": 2}),  # a Diag layer
    Growth("t2r", 1, 1),
    Growth("rfa", 1, 1),
    Growth("dpfp", 1, 1),
    Growth("linear_sra", 1, 1),
    # The iterations for the inverse, 24 h c^3, do not grow; with 49 landmarks they are nearly half the MACs at N = 784.
    Growth("nystrom", 1, 1, lambda side: {"num_landmarks": 9}),
    Growth("linformer", 1, 1),
    Growth("abc", 1, 1),
    Growth("synthesizer", 2, 2),
    Growth("orthoformer", 1, 1),
    Growth("longformer", 1, 1),
    Growth("sparse_transformer", 1.5, 1.5),  # blocks of a row, b = sqrt(N)
    Growth("sparse_transformer", 2, 2, lambda side: {"block_size": 4}),
    Growth("bigbird", 1, 1),
    Growth("clustered", 1, 1),
    Growth("reformer", 1, 1),  # as SMYRF; of the hash, N^2 C / c up to N = c^2, little is left beside 4 l N c C
]


def own_costs(name: str, side: int, options: dict, device: str) -> tuple[float, int]:
    """MACs and bytes saved for backward, beyond those of the projections, of a layer in training on one image."""
    N = side * side
    with torch.device(device):
        attn = create_attention(name, dim=C, num_heads=1, grid=(side, side), **options)
        x = torch.randn(1, N, C, requires_grad=True)
    parameters = {parameter.untyped_storage()._cdata for parameter in attn.parameters()}
    saved = {}  # holds the storages, lest an address be used twice

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = storage
        return tensor

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        y = attn(x, (side, side))
    macs = counter.get_total_flops() / 2
    y.backward(torch.ones_like(y))
    assert x.grad.shape == x.shape
    return macs - 4 * N * C * C, sum(storage.nbytes() for storage in saved.values()) - 4 * 5 * N * C


def order(costs: list[float]) -> float:
    """Slope of log cost over log N."""
    return linear_regression([2 * math.log(side) for side in SIDES], list(map(math.log, costs))).slope


def label(growth: Growth) -> str:
    return "-".join([growth.name, *(f"{key}={value}" for key, value in growth.options(SIDES[0]).items())])


@pytest.mark.parametrize("growth", GROWTH, ids=label)
def test_costs_grow_as_stated(growth):
    """Counted on the meta device, where nothing is computed or stored."""
    with sdpa_kernel(SDPBackend.MATH):
        macs, saved_bytes = zip(*(own_costs(growth.name, s, growth.options(s), "meta") for s in SIDES), strict=True)
    assert order(macs) == pytest.approx(growth.macs, abs=0.15)
    assert order(saved_bytes) == pytest.approx(growth.saved_bytes, abs=0.15)


def test_every_mechanism_is_measured():
    assert {growth.name for growth in GROWTH} == set(ATTENTION)


def test_fused_softmax_saves_no_weights():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        saved_bytes = [own_costs("softmax", side, {}, "cpu")[1] for side in SIDES]
    assert order(saved_bytes) == pytest.approx(1, abs=0.15)
