"""Counts of a layer's operators, bytes and arithmetic are those of a real call, and of Triton's kernels by hand."""

import pytest
import torch

from attention import ATTENTION
from attention.ops import memory
from bench import traffic
from bench.operators import OperatorCounter, count_operators, off_cpu
from bench.traffic import count
from bench.workload import Workload, attention_layer
from tests.support.partition import one_of_a_kind

HASHING = "smyrf", "reformer", "clustered", "scatterbrain_lsh", "eva_lsh", "eva_clustered"
SEQUENTIAL = {"orthoformer": 320, "nystrom": 145}
"""Mechanisms that choose landmarks or approach an inverse step by step -> their bound."""


@pytest.mark.parametrize("name", one_of_a_kind(ATTENTION))
def test_operators_are_few_and_do_not_grow_with_heads(name):
    """Forward and backward at 784 tokens: at most 120, with hashing 160, and 5 more in other versions of torch."""
    counts = [len(count(attention_layer(name, 192, h), (28, 28), 1, "forward+backward", "fp32").found) for h in (3, 6)]
    assert counts[0] <= SEQUENTIAL.get(name, 165 if name in HASHING else 125)
    assert counts[1] == counts[0]


@pytest.mark.parametrize("name", ["softmax", "eva", "performer"])
def test_nothing_is_allocated_and_the_count_is_that_of_a_real_call(name):
    subject = attention_layer(name, 12, 3)
    workload = Workload(subject, (14, 14), 2, "forward+backward", "fp32", "eager", torch.device("cpu"))
    counter = count(subject, (14, 14), 2, "forward+backward", "fp32")
    found = counter.found
    assert len(found) == workload.counts()["operators"]
    with off_cpu(), OperatorCounter() as real:
        workload.call()
    assert counter.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    large = count(subject, (14, 14), 2_000_000, "forward+backward", "fp32").found  # hundreds of gigabytes
    assert len(large) == len(found)
    assert sum(each.nbytes for each in large) == pytest.approx(1e6 * sum(each.nbytes for each in found), rel=0.1)


def test_kernels_of_triton_equal_their_count_by_hand():
    """Two images of 4 x 6 tokens in windows of 2 x 2, three heads of four channels, in bf16."""
    tokens, numbers, bias = 2 * 24 * 12, 2 * 3 * 24, 3 * 4 * 4
    found = count(attention_layer("local@triton:window_size=2", 12, 3), (4, 6), 2, "forward+backward", "bf16").found
    forward, backward = (each for each in found if each.name.startswith("joint_softmax"))
    assert forward == (
        "joint_softmax",
        2 * 4 * tokens + 4 * numbers + 4 * bias,
        2 * 2 * tokens * 4,
        tokens,
        torch.bfloat16,
    )
    assert backward == (
        "joint_softmax_backward",
        2 * 8 * tokens + 4 * numbers + 2 * 4 * bias,
        5 * 2 * tokens * 4,
        tokens,
        torch.bfloat16,
    )


KERNELS = {
    "local": {"packed_attention"},
    "eva": {"packed_attention"},
    "performer": {"feature_values", "mix_values"},
    "lara": {"feature_values", "mix_values"},
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_triton_have_the_products_of_the_fast_path(name):
    """With windows that fill the grid: other windows have products of padding on the fast path."""
    fast, kernels = (
        count(attention_layer(f"{name}@{path}", 192, 3), (28, 28), 8, "forward", "bf16").found
        for path in ("torch", "triton")
    )
    assert {each.name for each in kernels} >= KERNELS[name]
    assert len(kernels) < len(fast)
    products = [sum(each.flops for each in found) for found in (kernels, fast)]
    again = 2 * 8 * 784 * 192 * 49 if name == "lara" else 0  # LARA's r, twice
    assert products[0] - again == pytest.approx(
        products[1], rel=0.03
    )  # of group values, which a kernel sums by elements
    assert sum(each.nbytes for each in kernels) < sum(each.nbytes for each in fast)


def test_the_default_path_is_counted_as_on_the_device():
    arguments = attention_layer("performer", 192, 3), (28, 28), 8, "forward+backward"
    found = {kernels: count(*arguments, "bf16", has_kernels=kernels).found for kernels in (False, True)}
    layers = [attention_layer(f"performer@{path}", 192, 3) for path in ("torch", "triton")]
    assert list(found.values()) == [count(layer, *arguments[1:], "bf16").found for layer in layers]
    assert sum(o.nbytes for o in found[True]) < 0.3 * sum(o.nbytes for o in found[False])
    assert count(*arguments, "fp32", has_kernels=True).found == count(layers[0], *arguments[1:], "fp32").found


@pytest.mark.parametrize("name", ["longformer", "bigbird", "neighborhood", "rala", "mlla"])
def test_what_every_call_computes_with_kept_tables_counts(name):
    subject = attention_layer(name, 12, 3)
    workload = Workload(subject, (7, 14), 2, "forward+backward", "fp32", "eager", torch.device("cpu"))
    assert count(subject, (7, 14), 2, "forward+backward", "fp32").found == count_operators(workload.call)


def test_the_path_off_a_cpu_has_no_chunks(monkeypatch):
    subject = attention_layer("local:window_size=2", 12, 3)
    monkeypatch.setattr(memory, "CACHE", 1)
    whole, chunked = (count(subject, (4, 6), 5, "inference", "fp32", on_cpu).found for on_cpu in (False, True))
    assert len(chunked) > len(whole)
    assert sum(o.flops for o in chunked) == sum(o.flops for o in whole)


def test_paths_are_counted_as_they_are_named():
    moved = {}
    for name in ("softmax", "softmax@plain", "eva", "eva@plain"):
        counter = count(attention_layer(name, 12, 3), (14, 14), 2, "inference", "fp32")
        moved[name] = sum(each.nbytes for each in counter.found)
    assert moved["softmax@plain"] > moved["softmax"] + 2 * 2 * 3 * 196**2 * 4  # writes and reads the matrix
    assert moved["eva@plain"] != moved["eva"]


def test_half_precision_moves_less():
    subject = attention_layer("softmax", 12, 3)
    single, half = (count(subject, (8, 8), 64, "inference", dtype).found for dtype in ("fp32", "bf16"))
    assert {each.dtype for each in half if each.flops} == {torch.bfloat16}
    bytes_of_products = [sum(o.nbytes for o in each if o.flops) for each in (single, half)]
    assert bytes_of_products[1] == pytest.approx(bytes_of_products[0] / 2, rel=0.1)


def test_the_command_prints_the_count(capsys):
    traffic.main(
        ["--attention", "mean", "eva@triton", "--dim", "12", "--tokens", "196", "--batch-size", "2", "--dtype", "bf16"]
    )
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 196")]
    for row, (name, path) in zip(
        rows, {"softmax": "torch", "mean": "torch", "eva@triton": "triton"}.items(), strict=True
    ):
        counter = count(attention_layer(name, 12, 3, path), (14, 14), 2, "forward+backward", "bf16")
        assert row[:2] == ["196", name]
        assert row[2] == f"{sum(each.nbytes for each in counter.found) / 1e9:.2f}"
        assert float(row[3]) + float(row[4]) == pytest.approx(sum(o.flops for o in counter.found) / 1e9, abs=0.11)
        assert row[5:] == [str(len(counter.found)), f"{counter.peak_bytes / 2**20:.0f}"]


def test_refuses_with_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        traffic.main(["--attention", "evaa"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean 'eva'?" in line
