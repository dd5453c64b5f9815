"""The roofline: predictions equal the formula, counts are those of a real call, and tables say what was predicted."""

import csv

import pytest
import torch

from attention import ATTENTION
from attention.ops import memory
from bench import roofline
from bench.devices import DEVICES, Device, count, predict
from bench.generated import Generated, generated
from bench.operators import Operator, OperatorCounter, count_operators, off_cpu
from bench.roofline import counts_table, crossovers
from bench.workload import Workload, attention_layer

SLOW = Device(bandwidth=100.0, half=50.0, single=10.0, elements=20.0, fused=0.5, launch=1.0, source="made up")
F32, F16 = torch.float32, torch.bfloat16


def test_a_prediction_is_the_formula():
    calls = {
        Operator("add", 10, 0, 2, F32): 1,  # its launch
        Operator("copy_", 700, 0, 20, F32): 7,  # 700 bytes / 100
        Operator("mm", 200, 300, 20, F32): 30,  # 300 FLOPs / 10
        Operator("mm", 200, 300, 20, F16): 6,  # 300 / 50
        Operator("exp", 100, 0, 80, F16): 4,  # 80 elements / 20
        Operator("_scaled_dot_product_flash_attention_for_cpu", 200, 300, 20, F16): 12,  # 300 / (50 / 2)
    }
    for operator, seconds in calls.items():
        assert predict([operator], SLOW) == pytest.approx(seconds)
    assert predict(list(calls), SLOW) == pytest.approx(sum(calls.values()))


HASHING = "smyrf", "reformer", "clustered", "scatterbrain_lsh", "eva_lsh", "eva_clustered"
SEQUENTIAL = {"orthoformer": 320, "nystrom": 145}
"""Mechanisms that choose landmarks or approach an inverse step by step -> their bound."""


@pytest.mark.parametrize("name", ATTENTION)
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
    "local": {"joint_softmax"},
    "eva": {"joint_softmax", "tile_values"},
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
    found = {measured: count(*arguments, "bf16", measured=measured).found for measured in (False, True)}
    layers = [attention_layer(f"performer@{path}", 192, 3) for path in ("torch", "triton")]
    assert list(found.values()) == [count(layer, *arguments[1:], "bf16").found for layer in layers]
    assert sum(o.nbytes for o in found[True]) < 0.3 * sum(o.nbytes for o in found[False])
    assert count(*arguments, "fp32", measured=True).found == count(layers[0], *arguments[1:], "fp32").found
    assert {name for name, device in DEVICES.items() if device.measured} == {"h100", "h200"}


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
    assert {each.dtype for each in half if each.flops} == {F16}
    bytes_of_products = [sum(o.nbytes for o in each if o.flops) for each in (single, half)]
    assert bytes_of_products[1] == pytest.approx(bytes_of_products[0] / 2, rel=0.1)


def test_fused_attention_wins_small_grids_and_loses_large_ones():
    calls = {
        (side, name): [Operator(name, nbytes, 0, 1, F32)]
        for side in ((2, 2), (4, 4), (8, 8))
        for name, nbytes in (("softmax", 10 * side[0] ** 4), ("eva", 5000), ("local", 100 * side[0] ** 4), ("mean", 1))
    }
    table = crossovers(calls, {"slow": SLOW})
    for row in ("| eva | 64 |", "| local | above 64 |", "| mean | 4 |"):
        assert row in table
    assert "| 16 | eva | 0.0 | 1 | 50000.00 (0.51) |" in counts_table(calls, {"slow": SLOW})


def test_the_command_predicts_and_validates(tmp_path, capsys, monkeypatch):
    small, file = ("--attention", "mean", "--dim", "12", "--tokens", "16"), tmp_path / "roofline.csv"
    roofline.main([*small, "--batch-tokens", "144", "--csv", str(file)])
    printed = capsys.readouterr().out
    with file.open() as text:
        softmax, mean = csv.DictReader(text)
    assert (softmax["name"], softmax["h100_speedup"], mean["name"]) == ("softmax", "1.00", "mean")
    assert all(f"{mean[f'{name}_ms']} ({mean[f'{name}_speedup']})" in printed for name in DEVICES)
    assert "Predictions, not measurements" in printed
    assert all(f"- {name}: " in printed for name in DEVICES)
    monkeypatch.setattr(roofline, "SAMPLE_SECONDS", 1e-4)
    roofline.main([*small, "--validate"])
    printed = capsys.readouterr().out
    assert "all, 2 layers: rank correlation" in printed
    assert "measured on one core" in printed


def test_bytes_of_compiled_layers():
    """Two projections of 16 tokens an image, and nothing else: inputs, outputs, and once the weights and biases."""
    for batch in (4, 41):
        by_hand = 2 * (2 * 16 * batch * 12 + 12**2 + 12) * 4
        assert generated(attention_layer("identity", 12, 3), (4, 4), batch, "inference", "fp32") == (by_hand, 2)


def test_names_of_results_are_no_kernels():
    """In fp32 softmax attention has a projection, fused attention and a projection; Inductor also lists its results."""
    assert generated(attention_layer("softmax", 12, 3), (4, 4), 5, "inference", "fp32").kernels == 3


def test_the_command_counts_compiled_layers(tmp_path, monkeypatch, capsys):
    file = tmp_path / "compiled.csv"
    monkeypatch.setattr(roofline, "generated", lambda *setting: Generated(1_500_000_000, 7))
    roofline.main(["--compiled", "--attention", "mean", "--dim", "12", "--tokens", "16", "4x5", "--csv", str(file)])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[2:]] == [[n, name] for n in ("16", "20") for name in ("softmax", "mean")]
    assert all(row[4:] == ["1.5", "7"] for row in rows[2:])
    assert [line.split(",") for line in file.read_text().splitlines()] == [rows[0], *rows[2:]]


def test_eager_and_compiled_layers_have_equally_many_images(monkeypatch):
    counted = []
    monkeypatch.setattr(roofline, "count", lambda subject, size, batch, *_: counted.append(batch) or OperatorCounter())
    monkeypatch.setattr(roofline, "generated", lambda subject, size, batch, *_: counted.append(batch) or (0, 0))
    roofline.main(["--compiled", "--attention", "softmax", "--tokens", "16", "4x5", "--batch-tokens", "100"])
    assert counted == [6, 6, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--attention evaa", "did you mean 'eva'?"),
        ("--attention eva@triton --validate", "'eva@triton', path triton: Triton's kernels need a GPU"),
        ("--attention eva@triton --compiled", "'eva@triton', path triton: Triton's kernels need a GPU"),
        ("--on h101", "invalid choice: 'h101'"),
        ("--validate --csv roofline.csv", "leave it out with --validate"),
        ("--validate --compiled", "leave it out with --compiled"),
        ("--validate --on h100", "--on: --validate and --compiled are of this CPU; leave it out"),
        ("--compiled --on h100", "--on: --validate and --compiled are of this CPU; leave it out"),
        ("--validate --batch-tokens 5", "--batch-tokens: --validate times few images of each size; leave it out"),
        ("--tokens 16 12544 --batch-tokens 100", "100 are less than the 12544 of an image; give 12544 or more"),
    ],
)
def test_refuses_with_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        roofline.main(arguments.split())
    assert message in capsys.readouterr().err
