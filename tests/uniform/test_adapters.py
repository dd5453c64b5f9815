"""Adapters in the place of linear layers: every mechanism calls its layers as modules."""

import copy

import pytest
import torch
from torch import Tensor, nn

from attention import Attention
from tests.support.comparisons import FP64
from tests.support.facts import CASES, light

every_case = pytest.mark.parametrize("case", light(CASES))
LAYERS = nn.Linear, nn.Conv2d


class LowRank(nn.Module):
    """A layer with a frozen weight W and a trainable low-rank term: W + B A (LoRA, Hu et al. 2021)."""

    def __init__(self, base: nn.Linear | nn.Conv2d):
        super().__init__()
        rows, columns = len(base.weight), base.weight[0].numel()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, columns, dtype=base.weight.dtype) / columns)
        self.b = nn.Parameter(torch.randn(rows, 2, dtype=base.weight.dtype))

    def delta(self) -> Tensor:
        return (self.b @ self.a).view_as(self.base.weight)

    def forward(self, x: Tensor) -> Tensor:
        plain = copy.copy(self.base)
        plain._parameters = {"weight": self.delta(), "bias": None}
        return self.base(x) + plain(x)


def replace_layers(attn: Attention, new) -> dict[str, nn.Module]:
    """Replaces every linear layer and convolution by `new` of it; returns the new ones by name."""
    replaced = {}
    for name, layer in [*attn.named_modules()]:
        if type(layer) in LAYERS:
            parent = attn.get_submodule(name.rpartition(".")[0])
            replaced[name] = new(layer)
            setattr(parent, name.rpartition(".")[2], replaced[name])
    return replaced


@every_case
def test_adapters_act_on_every_part_of_a_layer(case):
    merged, x = case.build().eval(), case.tokens()
    adapted = copy.deepcopy(merged)
    adapters = replace_layers(adapted, LowRank)
    with torch.no_grad():
        for name, adapter in adapters.items():
            merged.get_submodule(name).weight += adapter.delta()
    y = adapted(x, case.grid)
    torch.testing.assert_close(y, merged(x, case.grid), rtol=FP64, atol=FP64)
    (y * torch.randn_like(y)).sum().backward()
    for name, adapter in adapters.items():
        assert adapter.a.grad.abs().sum() > 0, name
        assert adapter.b.grad.abs().sum(1).min() > 0, name


@every_case
def test_every_layer_is_called_as_a_module(case):
    """Hooks of observers, pruning and sharding see every layer."""
    attn, called = case.build().eval(), set()
    layers = {name for name, layer in attn.named_modules() if isinstance(layer, LAYERS)}
    for name in layers:
        attn.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    attn(case.tokens(), case.grid)
    assert called == layers
