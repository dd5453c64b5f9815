"""Shares of time: every event has one kind, and shares are those of a profile."""

import csv

import pytest
import torch

from attention import ATTENTION
from bench import shares
from bench.operators import count_operators
from bench.shares import COUNTED, KINDS, kind_of
from bench.workload import Workload, attention_layer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("aten::baddbmm_", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "products"),
        ("aten::convolution_backward", "convolutions"),
        ("aten::_softmax_backward_data", "exponentials"),
        ("aten::_index_put_impl_", "gathers"),
        ("aten::unfold_backward", "gathers"),
        ("aten::argmin", "searches"),
        ("aten::copy_", "copies"),
        ("aten::add_", "other"),
        ("autograd::engine::evaluate_function: IndexBackward0", "other"),
        ("index", "other"),  # not of torch
    ],
)
def test_kinds_of_events(event, kind):
    assert kind_of(event) == kind


def test_no_operator_has_two_kinds():
    names = [name for kind in KINDS.values() for name in kind]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ATTENTION)
def test_operators_with_flops_are_those_that_macs_count(name):
    """The counter's products and convolutions, and no other operator, are of these kinds."""
    workload = Workload(attention_layer(name, 12, 3), (14, 14), 1, "forward+backward", "fp32", "eager", CPU)
    for operator in count_operators(workload.call):
        empty = operator.name == "bmm" and not operator.flops  # Reformer's second set of buckets
        assert (kind_of(f"aten::{operator.name}") in COUNTED) == (operator.flops > 0) or empty, operator


def test_shares_follow_the_work_and_add_up_to_one():
    x, index = torch.randn(400, 400), torch.randint(400, (400,))

    def work(products, gathers):
        found = shares.shares(lambda: ([x @ x for _ in range(products)], [x[index] for _ in range(gathers)]), 3)
        assert sum(found.values()) == pytest.approx(1)
        return found

    assert work(8, 0)["products"] > 0.5 > work(8, 0)["gathers"]
    assert work(0, 8)["gathers"] > 0.5 > work(0, 8)["products"]


def test_command(tmp_path, capsys):
    file = tmp_path / "shares.csv"
    shares.main(["--attention", "softmax", "eva", "--tokens", "196", "--dim", "12", "--calls", "1", "--csv", str(file)])
    with file.open() as text:
        rows = list(csv.DictReader(text))
    assert [row["name"] for row in rows] == ["softmax", "eva"]
    assert all(sum(float(row[kind]) for kind in (*KINDS, "other")) == pytest.approx(1, abs=0.005) for row in rows)
    printed = capsys.readouterr().out
    assert all(value in printed for value in rows[1].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "evaa"], "did you mean 'eva'?"),
        (["--attention", "eva:num_landmarks=53"], "num_landmarks"),
        (["--attention", "eva@triton"], "Triton's kernels need a GPU; use the path auto"),
        (["--tokens", "200"], "nearest: 196"),
        (["--csv", "none/shares.csv"], "none/shares.csv: no directory"),
        (["--csv", "shares.txt"], "--csv writes .csv"),
    ],
)
def test_bad_input_ends_with_a_line_before_any_work(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shares, "Workload", None)
    with pytest.raises(SystemExit, match="2"):
        shares.main(arguments)
    assert message in capsys.readouterr().err


def test_what_does_not_fit_into_memory_ends_with_a_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        shares.main(["--attention", "softmax@plain", "--tokens", str(2**22), "--dim", "3", "--mode", "inference"])
    assert capsys.readouterr().err.endswith("error: out of memory; give fewer --tokens\n")
