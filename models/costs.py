"""Costs of a model: parameters, and multiply-accumulates (MACs) of one image. The papers print MACs as "FLOPs"."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models import create_model


class Costs(NamedTuple):
    """Trainable parameters, and MACs of matrix products and convolutions for one image in evaluation."""

    parameters: int
    macs: int


def _fourier_flops(reals: Sequence[int], axes: Sequence[int]) -> int:
    """FLOPs of Fourier transforms of real numbers by the rule of `attention.costs.fourier_macs`."""
    return 2 * round(5 * math.prod(reals) * math.log2(math.prod(reals[axis] for axis in axes)) / 4)


FOURIER = {
    torch.ops.aten._fft_r2c: lambda reals, axes, *_, **__: _fourier_flops(reals, axes),
    torch.ops.aten._fft_c2r: lambda _, axes, *__, out_shape, **___: _fourier_flops(out_shape, axes),
}
"""Counts of `FlopCounterMode` for operators that it leaves out."""


def count_costs(model: Mapping[str, Any], attention: Any) -> Costs:
    """Costs of the model and attention of a `Run`, counted on the meta device, without memory or arithmetic.

    Softmax, exponentials, normalisations and element-wise products are not counted, as in the papers.
    """
    with torch.device("meta"):
        network = create_model(attention=attention, **model).eval()
        image = torch.empty(1, network.in_chans, *to_2tuple(model["img_size"]))
    return costs_of(network, image)


def costs_of(network: nn.Module, *inputs: Any, **others: Any) -> Costs:
    """Costs of one call of `network` in its present mode."""
    frozen = {name: weight.detach() for name, weight in network.named_parameters()}  # the counter watches gradients
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=FOURIER) as counter:
        torch.func.functional_call(network, frozen, inputs, others)
    return Costs(sum(p.numel() for p in network.parameters()), counter.get_total_flops() // 2)
