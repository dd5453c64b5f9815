"""Operators of a call: views count nothing, and mechanisms have few."""

import pytest
import torch

from attention import ATTENTION
from attention.ops import memory
from bench.operators import count_operators
from bench.workload import Workload, attention_layer
from tests.support.partition import one_of_a_kind

CPU = torch.device("cpu")


def test_operators_are_noted_by_name():
    x, y = torch.randn(4, 6), torch.randn(6, 5)
    assert count_operators(lambda: (x @ y).exp()).found == ["mm", "exp"]
    assert count_operators(lambda: [x.mul_(2), x.bfloat16()]).found == ["mul_", "_to_copy"]
    assert count_operators(lambda: x + torch.arange(6).mul_(2)).found == ["add"]
    assert count_operators(lambda: torch.rand(3).exp()).found == ["rand", "exp"]
    assert count_operators(lambda: torch.ones(4, 6).add_(x).exp_()).found == ["add_", "exp_"]
    assert not count_operators(lambda: [torch.arange(6).mul(2).view(2, 3), torch.zeros(3) + 1]).found
    assert not count_operators(lambda: [x.T, x.view(2, 12), x[1:], x.expand(2, 4, 6), x.detach(), torch.empty(3)]).found


def test_bytes_are_those_that_operators_read_and_write():
    x, y = torch.randn(4, 6), torch.randn(6, 5)
    assert count_operators(lambda: x @ y + y[0]).nbytes == 4 * (24 + 30 + 20 + 20 + 5 + 20)
    assert count_operators(lambda: x.exp_() + y[:1, :1].expand(4, 6)).nbytes == 4 * (24 + 24 + 24 + 1 + 24)


HASHING = "smyrf", "reformer", "clustered", "scatterbrain_lsh", "eva_lsh", "eva_clustered"
SEQUENTIAL = {"orthoformer": 320, "nystrom": 145}
"""Mechanisms that choose landmarks or approach an inverse step by step -> their bound."""


@pytest.mark.parametrize("name", one_of_a_kind(ATTENTION))
def test_operators_are_few_and_do_not_grow_with_heads(name):
    """Forward and backward at 784 tokens: at most 120, with hashing 160, and 5 more in other versions of torch."""
    counts, gradient = [], torch.ones(1, 784, 192)
    for num_heads in (3, 6):
        layer, x = attention_layer(name, 192, num_heads).build((28, 28)), torch.randn(1, 784, 192, requires_grad=True)

        def call(layer=layer, x=x) -> None:
            torch.autograd.grad(layer(x, (28, 28)), [x, *layer.parameters()], gradient, allow_unused=True)

        call()  # makes the tables that layers keep
        counts.append(len(count_operators(call).found))
    assert counts[0] <= SEQUENTIAL.get(name, 165 if name in HASHING else 125)
    assert counts[1] == counts[0]


def counts(name: str, batch: int, mode: str = "inference") -> dict:
    return Workload(attention_layer(name, 12, 3), (28, 28), batch, mode, "fp32", "eager", CPU).counts()


def test_chunks_for_a_cache_are_no_operators(monkeypatch):
    whole = counts("eva", 4)["operators"]
    monkeypatch.setattr(memory, "CACHE", 1)
    assert counts("eva", 4)["operators"] == whole
