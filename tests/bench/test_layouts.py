"""Times of memory layouts: operations do what their names say, and each has a row."""

import pytest
import torch

from attention.parts.geometry import Windows
from bench import layouts
from tests.test_results import read

CPU = torch.device("cpu")


def test_operations_move_what_they_are_named_for():
    found = {name: call for name, _, call in layouts.calls(1, CPU)}
    first, *others = (call() for name, call in found.items() if name.startswith("windows of tokens"))
    windows = Windows(layouts.GRID, layouts.WINDOW)
    assert first.shape == windows.view(torch.empty(1, layouts.HEADS, 28 * 28, layouts.WIDTH)).shape
    assert len(others) == len(layouts.WORDS)
    assert all(torch.equal(each.view(torch.bfloat16), first) for each in others)
    for columns in (49, 56):
        assert found[f"logits of windows, {columns} columns"]().shape == (layouts.HEADS * 16, 49, columns)
    softmaxes = [found[f"softmax over samples, {side} side by side"]() for side in ("tokens", "samples")]
    torch.testing.assert_close(softmaxes[0].mT, softmaxes[1])
    assert found.keys() <= {row["operation"] for row in read("layouts.csv")}


def test_the_command_prints_a_row_of_each(monkeypatch, capsys):
    monkeypatch.setattr(layouts, "ROUNDS", 2)
    layouts.main(["--device", "cpu", "--batch-size", "1"])
    printed = capsys.readouterr().out
    assert all(f"| {name} | " in printed for name, _, _ in layouts.calls(1, CPU))


def test_refuses_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        ("--device cuda", "argument --device: cuda is not available here; use auto or cpu\n"),
        (f"--device cpu --batch-size {10**8}", "error: out of memory; give a smaller --batch-size\n"),
    ):
        with pytest.raises(SystemExit, match="2"):
            layouts.main(arguments.split())
        assert capsys.readouterr().err.endswith(message)
