"""The table of the kernels' times."""

import itertools
from functools import partial

import pytest
import torch

from bench import check_kernels
from bench.check_kernels import Case, LaraCase, PerformerCase


@pytest.fixture
def rows(monkeypatch) -> list[dict[str, str]]:
    """Without a GPU: of small cases on their paths for a CPU, by a clock that sets itself forward by 2 ms."""
    clock = partial(next, itertools.count(step=0.002))
    cases = [Case((4, 6), (2, 3), d=16), PerformerCase(24, 10), LaraCase(24, 6)]
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


def test_the_table_of_times(rows):
    for row in rows:
        assert row["plain (ms)"].removeprefix("~") == "2.000 (2.000–2.000)"
        assert row["over plain"].removeprefix("~") == "1.00 (1.00–1.00)"
        assert row["triton launches"] == "None"  # of a GPU
