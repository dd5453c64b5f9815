"""What a model costs: parameters, and multiply-accumulates (MACs) of one image. The papers print MACs as "FLOPs"."""

from collections.abc import Mapping
from functools import partial
from operator import add, sub
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attention import ATTENTION, AttentionFactory, LayerContext
from models import create_model, parse_model


class Costs(NamedTuple):
    """Trainable parameters, and MACs of matrix products and convolutions for one image in evaluation."""

    parameters: int
    macs: int


def count_costs(model: Mapping[str, Any], attention: Any) -> Costs:
    """Costs of the model and attention of a `Run`, counted on the meta device: no memory, no arithmetic.

    Softmax, exponentials, normalisations and element-wise products are not counted, as in the papers.
    """
    with torch.device("meta"):
        network = create_model(attention=attention, **model).eval()
        image = torch.empty(1, network.in_chans, *to_2tuple(model["img_size"]))
    return costs_of(network, image)


def costs_of(network: nn.Module, *inputs: Any) -> Costs:
    """Costs of one call of `network`, in the mode that it is in."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(*inputs)
    return Costs(sum(p.numel() for p in network.parameters()), counter.get_total_flops() // 2)


def stated_costs(model: str) -> dict[str, Costs]:
    """Costs of the DeiT `model` with every mechanism at its defaults: what is counted with softmax attention, and the
    difference that `Attention.cost` makes.
    """
    config = parse_model(model, {})
    side = config.img_size // config.patch_size
    context = partial(
        LayerContext, dim=config.embed_dim, num_heads=config.num_heads, grid=(side, side), depth=config.depth
    )

    def of_layers(name: str) -> Costs:
        mechanism, options = ATTENTION[name], AttentionFactory.from_options(name).config
        costs = (mechanism.cost(context(layer=layer), options) for layer in range(config.depth))
        return Costs(*map(sum, zip(*costs, strict=True)))

    counted = count_costs({"name": model, "img_size": config.img_size}, "softmax")
    backbone = Costs(*map(sub, counted, of_layers("softmax")))
    return {name: Costs(*map(add, backbone, of_layers(name))) for name in ATTENTION}
