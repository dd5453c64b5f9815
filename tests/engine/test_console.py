"""The console log of a run."""

import sys
from contextlib import suppress
from pathlib import Path

import pytest

from engine.runtime.terminal import ConsoleLog, progress_bar
from tests.engine.test_recorder import record_run, terminal


def test_it_has_what_is_printed_from_the_beginning(tmp_path: Path, capsys: pytest.CaptureFixture):
    streams = sys.stdout, sys.stderr
    with ConsoleLog() as console:
        print("weights")
        print("warning: é", file=sys.stderr)
        console.keep(tmp_path)
        print("one\ntwo", end="")
        print(" words")
    assert (tmp_path / "console.log").read_text() == "weights\nwarning: é\none\ntwo words\n"
    assert capsys.readouterr() == ("weights\none\ntwo words\n", "warning: é\n")
    assert (sys.stdout, sys.stderr) == streams


def test_another_launch_goes_on_and_a_bug_leaves_its_traceback(tmp_path: Path):
    for error in ("first", "second"):
        with suppress(KeyError), ConsoleLog() as console:
            console.keep(tmp_path)
            raise KeyError(error)
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert [line for line in lines if line.startswith("KeyError")] == ["KeyError: 'first'", "KeyError: 'second'"]
    assert lines.count("Traceback (most recent call last):") == 2


def test_no_file_no_log(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A launch that was refused before it had a directory leaves no log, and a full disk does not stop the console."""
    with ConsoleLog() as console:
        print("shown")
        console.keep(tmp_path / "absent")
        print("too")
    assert capsys.readouterr().out == "shown\ntoo\n"


def test_a_progress_bar_leaves_its_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with terminal(80, monkeypatch), ConsoleLog() as console:
        console.keep(tmp_path)
        with progress_bar("epoch 1/1", 3) as bar:
            bar.mininterval = 0
            bar.update(1)
            bar.write("a message")
            bar.update(2)
    first, last = (tmp_path / "console.log").read_text().splitlines()
    assert first == "a message"
    assert last.startswith("epoch 1/1: 100%|")


def test_on_a_terminal_it_has_the_lines_that_the_bar_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with terminal(80, monkeypatch):
        record_run(tmp_path)
    assert (tmp_path / "console.log").read_text().startswith("train  epoch 1/2  step 1/1  loss 2.5000  ")
