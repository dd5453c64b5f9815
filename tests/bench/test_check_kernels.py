"""The table of the kernels' times."""

import itertools
from functools import partial

import pytest
import torch

from attention.ops.joint_softmax.op import joint_softmax_reference
from bench import check_kernels, flex
from bench.check_kernels import Case
from tests.support.comparisons import assert_equal


@pytest.fixture
def rows(monkeypatch) -> list[dict[str, str]]:
    """Rows for small cases on the CPU, timed by a clock that advances 2 ms at each call."""
    clock = partial(next, itertools.count(step=0.002))
    cases = [Case((4, 6), (2, 3)), Case((4, 6), (2, 6), d=8)]
    monkeypatch.setattr(check_kernels, "TIMED", [case._replace(dtype=torch.bfloat16) for case in cases])
    monkeypatch.setattr(check_kernels, "time_rounds", partial(check_kernels.time_rounds, clock=clock))
    for name, value in {"ROUNDS": 2, "COPIED_BYTES": 2**10, "FLUSHED_BYTES": 2**10, "FLUSHES": 1}.items():
        monkeypatch.setattr(check_kernels, name, value)
    header, line, *lines, noise = check_kernels.table(torch.device("cpu"))
    assert "~ is noisy" in noise
    header, line, *lines = ([text.strip() for text in row[1:-1].split("|")] for row in (header, line, *lines))
    assert len(lines) == 2 * len(cases)
    assert {len(row) for row in (line, *lines)} == {len(header)} == {len(set(header))}
    return [dict(zip(header, row, strict=True)) for row in lines]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_table_of_times(rows):
    for row in rows:
        missing = row["mode"] == "forward+backward"
        flex = row["FlexAttention (ms)"].removeprefix("~")
        assert flex == ("FlexAttention does not support backward on CPU" if missing else "2.000 (2.000–2.000)")
        assert row["plain (ms)"].removeprefix("~") == "2.000 (2.000–2.000)"
        assert row["over plain"].removeprefix("~") == "1.00 (1.00–1.00)"
        assert row["triton launches"] == "None"  # of a GPU


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "case",
    [Case((5, 7), (3, 4), P=2, h=3, log_count=True, leave_one_out=True), Case((3, 5), (2, 3), c=0, B=2, bias=False)],
    ids=str,
)
def test_flex_attention_is_the_joint_softmax(case):
    inputs, options = check_kernels.example(case._replace(dtype=torch.float64), torch.device("cpu"))
    inputs = [x if x is None else x.double() for x in inputs]
    assert_equal(flex.joint_softmax(*inputs, **options), joint_softmax_reference(*inputs, **options))
