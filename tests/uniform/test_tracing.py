"""Graphs that torch.jit.trace records, which fvcore counts and TensorBoard draws: of torch's own operators."""

import math

import pytest
import torch
from torch import Tensor, nn

from attention import ATTENTION, Grid
from models.costs import costs_of
from tests.support.cases import Case
from tests.support.facts import FACTS

CASES = [FACTS[name].CASES[0] for name in ATTENTION]
UNCOUNTED = {"aten::scaled_dot_product_attention", "aten::einsum", "aten::_convolution"}
"""Operators of multiply-accumulates other than matrix products, which are not counted here."""


class OnGrid(nn.Module):
    """A layer with its grid, because traced functions take only tensors."""

    def __init__(self, attn: nn.Module, grid: Grid):
        super().__init__()
        self.attn, self.grid = attn, grid

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, self.grid)


def traced_macs(graph: torch._C.Graph) -> int:
    """MACs of the graph's matrix products: elements of each product times the length of their sums."""
    products = [node for node in graph.nodes() if node.kind() in ("aten::linear", "aten::matmul")]
    return sum(math.prod(n.output().type().sizes()) * next(n.inputs()).type().sizes()[-1] for n in products)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
@pytest.mark.parametrize(
    "case", [*CASES, Case("eva", (5, 7), {"window_size": 3, "num_landmarks": 6, "partition": "mask"})], ids=str
)
def test_layers_are_traced(case):
    layer, x = OnGrid(case.build(torch.float32).eval(), case.grid), case.tokens(torch.float32, batch=1)
    traced = torch.jit.trace(layer, x, check_trace=False)
    torch.testing.assert_close(traced(x), layer(x))
    kinds = {node.kind() for node in traced.inlined_graph.nodes()}
    assert "prim::PythonOp" not in kinds  # a Python function, which cannot be counted
    if not kinds & UNCOUNTED:
        layer, x = layer.to("meta"), x.to("meta")
        assert traced_macs(traced.inlined_graph) == costs_of(layer, x).macs
