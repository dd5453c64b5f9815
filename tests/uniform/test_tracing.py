"""Graphs that torch.jit.trace records, which fvcore counts and TensorBoard draws: of torch's own operators."""

import math

import pytest
import torch
from torch import Tensor, nn

from models.costs import costs_of
from tests.support.cases import Case
from tests.support.facts import CASES, ORDINARY
from tests.support.partition import ONE_OF_A_KIND, chosen

CAUSAL = {case.name: case for case in reversed(CASES) if case.options.get("causal")}
TRACED = [*ORDINARY, *CAUSAL.values(), Case("eva", (5, 7), {"window_size": 3, "num_landmarks": 6, "partition": "mask"})]


class OfImage(nn.Module):
    """A layer on images (B, H, W, C) or clips: as in a network, tracing records the sides of its grid as tensors."""

    def __init__(self, attn: nn.Module):
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x.flatten(1, -2), x.shape[1:-1])


def traced_macs(graph: torch._C.Graph) -> int:
    """MACs of the graph's matrix products: elements of each product times the length of their sums."""
    products = [node for node in graph.nodes() if node.kind() in ("aten::linear", "aten::matmul")]
    return sum(math.prod(n.output().type().sizes()) * next(n.inputs()).type().sizes()[-1] for n in products)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
@pytest.mark.parametrize("case", chosen(TRACED, lambda case: case.name in ONE_OF_A_KIND), ids=str)
def test_layers_are_traced(case):
    layer = OfImage(case.build(torch.float32).eval())
    x = case.tokens(torch.float32, batch=1).unflatten(1, case.grid)
    traced = torch.jit.trace(layer, x, check_trace=False)
    torch.testing.assert_close(traced(x), layer(x))
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "prim::PythonOp" not in kinds  # a Python function, which cannot be counted
    others = {"aten::scaled_dot_product_attention", "aten::einsum", "aten::_convolution", "aten::fft_rfft2"}
    if not kinds & others:  # than matrix products, which alone are counted here
        layer, x = layer.to("meta"), x.to("meta")
        assert traced_macs(traced.inlined_graph) == costs_of(layer, x).macs
