"""Operators of a call: their bytes and their arithmetic equal counts by hand, and views count nothing."""

import pytest
import torch
import torch.nn.functional as F

from attention.ops import memory
from bench.operators import Operator, OperatorCounter, count_operators, searches
from bench.workload import Workload, attention_layer

CPU = torch.device("cpu")
B, N, C, H = 2, 12, 6, 3


def counted(call) -> list[tuple[str, int, int, int]]:
    return [each[:4] for each in count_operators(call)]


def test_what_is_read_and_written():
    x, y = torch.randn(4, 6), torch.randn(6, 5)
    out = torch.empty(4, 5)
    assert counted(lambda: x @ y) == [("mm", 4 * (24 + 30 + 20), 2 * 4 * 6 * 5, 30)]
    assert counted(lambda: torch.mm(x, y, out=out)) == [("mm", 4 * (24 + 30 + 20), 2 * 4 * 6 * 5, 30)]
    assert counted(lambda: x.exp()) == [("exp", 4 * 48, 0, 24)]
    assert counted(lambda: x.mul_(2)) == [("mul_", 4 * 48, 0, 24)]  # reads and writes the same memory
    assert counted(lambda: x.copy_(x.T.reshape(4, 6)))[-1] == ("copy_", 4 * 48, 0, 24)
    assert counted(lambda: x.zero_()) == [("zero_", 4 * 24, 0, 24)]
    assert counted(lambda: x.bfloat16()) == [("_to_copy", 6 * 24, 0, 24)]
    assert counted(lambda: x + y[0, 0].expand(4, 6)) == [("add", 4 * (24 + 1 + 24), 0, 24)]
    assert counted(lambda: x[torch.tensor([1, 1])])[-1] == ("index", 4 * 12 + 8 * 2 + 4 * 12, 0, 24)


def test_views_and_allocations_count_nothing():
    x = torch.randn(4, 6)
    assert not counted(lambda: [x.T, x.view(2, 12), x[1:], x.expand(2, 4, 6), x.detach(), x.unflatten(1, (2, 3))])
    assert not counted(lambda: [torch.empty(3), x.new_empty(5), torch.empty_like(x)])


def test_constants_count_nothing():
    """Fake tensors make the tables anew that layers keep."""
    x = torch.randn(4)
    assert not counted(lambda: [torch.arange(6).mul(2).view(2, 3), torch.zeros(3) + 1])
    assert [name for name, *_ in counted(lambda: x + torch.arange(4).mul_(2))] == ["add"]
    assert [name for name, *_ in counted(lambda: torch.rand(3).exp())] == ["rand", "exp"]
    assert [name for name, *_ in counted(lambda: torch.ones(4).add_(x).exp_().exp())] == ["add_", "exp_", "exp"]


def test_grouped_convolutions_and_fused_attention():
    x, weight = torch.randn(B, C, 5, 7, requires_grad=True), torch.randn(C, 1, 3, 3, requires_grad=True)
    forward, *_, backward = count_operators(lambda: F.conv2d(x, weight, padding=1, groups=C).sum().backward())
    assert (forward.name, forward.flops) == ("convolution", 2 * B * C * 35 * 9)
    assert (backward.name, backward.flops) == ("convolution_backward", 2 * forward.flops)
    q, k = (torch.randn(B, H, n, 8, requires_grad=True) for n in (5, 9))
    found = count_operators(lambda: F.scaled_dot_product_attention(q, k, k).sum().backward())
    forward, backward = (each for each in found if each.is_fused_attention)
    assert (forward.elements, forward.flops) == (B * H * 5 * 9, 2 * B * H * 5 * 9 * 16)
    assert (backward.elements, backward.flops) == (forward.elements, 5 * forward.flops // 2)


def test_products_in_place_count_as_products():
    x, y = torch.randn(B, 5, 7), torch.randn(B, 7, 6)
    z, total = torch.empty(B, 5, 6), torch.zeros(5, 6)
    found = count_operators(
        lambda: [torch.bmm(x, y), torch.bmm(x, y, out=z), z.baddbmm_(x, y), total.addmm_(x[0], y[0])]
    )
    assert [each.flops for each in found] == [2 * B * 5 * 7 * 6] * 3 + [2 * 5 * 7 * 6]


def test_a_layer_equals_its_count_by_hand():
    """Softmax attention in evaluation: two projections, and one operator between them, of 4-byte numbers."""
    workload = Workload(attention_layer("softmax", C, H), (3, 4), B, "inference", "fp32", "eager", CPU)
    tokens, weights = B * N * C, B * H * N * N
    qkv, attended, proj = (each for each in count_operators(workload.call) if each.flops)
    assert qkv[1:4] == (4 * (tokens + 3 * C * C + 3 * C + 3 * tokens), 2 * 3 * tokens * C, 3 * tokens)
    assert attended[1:4] == (4 * (4 * tokens + B * H * N), 4 * weights * C // H, weights)  # and logsumexp
    assert proj[1:4] == (4 * (tokens + C * C + C + tokens), 2 * tokens * C, tokens)


def test_memory_of_results_has_the_peak_of_the_profiler():
    workload = Workload(
        attention_layer("local:window_size=2", C, H), (4, 6), B, "forward+backward", "fp32", "eager", CPU
    )
    with OperatorCounter() as counter:
        workload.call()
    assert counter.peak_bytes == pytest.approx(workload.counts()["peak_bytes"], rel=0.05)


def counts(name: str, batch: int, mode: str = "inference") -> dict:
    return Workload(attention_layer(name, 12, 3), (28, 28), batch, mode, "fp32", "eager", CPU).counts()


def test_chunks_for_a_cache_are_no_operators(monkeypatch):
    whole = counts("eva", 4)["operators"]
    monkeypatch.setattr(memory, "CACHE", 1)
    assert counts("eva", 4)["operators"] == whole


@pytest.mark.complete
def test_mechanisms_that_sort_or_compare_are_marked():
    for name in ("smyrf", "eva_lsh", "orthoformer", "ra", "bilevel_routing", "clustered", "eva_clustered"):
        assert counts(name, 1, "forward")["searches"], name
    for name in ("softmax", "eva", "neighborhood"):
        assert not counts(name, 1, "forward")["searches"], name
    sort = Operator("sort", 0, 0, 10, torch.float32)
    assert searches([sort], 10)
    assert not searches([sort, sort], 11)
