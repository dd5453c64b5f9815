"""Layers built on the meta device: their state is all that they need."""

import pytest
import torch
from torch import nn

from tests.support.facts import CASES, light


def fill_with_garbage(module: nn.Module) -> None:
    """Fills parameters and buffers with numbers that fresh memory might hold."""
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data.fill_(torch.nan if tensor.is_floating_point() else 123_456_789)


@pytest.mark.parametrize("case", light(CASES, "position_bias"))
def test_layers_of_the_meta_device_take_their_state_and_nothing_else(case):
    attn, x = case.build().eval(), case.tokens()
    expected, state = attn(x, case.grid), attn.state_dict()
    with torch.device("meta"):
        layers = [case.build().eval() for _ in range(2)]
    fill_with_garbage(layers[0].to_empty(device="cpu"))
    for layer, assign in zip(layers, (False, True), strict=True):
        layer.load_state_dict(state, strict=True, assign=assign)
        assert torch.equal(layer(x, case.grid), expected)
