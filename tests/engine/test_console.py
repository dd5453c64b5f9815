"""The console log of a run."""

import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tqdm import tqdm

from engine.runtime import terminal as runtime_terminal
from engine.runtime.terminal import ConsoleLog, print_fields, progress, progress_bar
from tests.engine.test_recorder import terminal


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


def screen(drawn: bytes, rows: int = 24) -> list[str]:
    """The lines that a terminal shows in the end of what was `drawn` on it."""
    lines, row, column = [""] * rows, 0, 0
    for part in re.split(r"(\r|\n|\x1b\[A)", drawn.decode()):
        if part in ("\n", "\x1b[A"):
            row += 1 if part == "\n" else -1
        elif part == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("width", [80, 200])
def test_nested_bars_leave_lines_alone(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither the file nor, in the end, the screen has anything of a bar, whoever prints and whoever draws one."""
    with terminal(width, monkeypatch) as drawn, ConsoleLog() as console:
        console.keep(tmp_path)
        with progress_bar("epoch 1/1", 9) as bar:
            for number in range(3):
                with progress_bar("evaluation", 3) as inner:
                    inner.mininterval = bar.mininterval = 0
                    inner.update(2)
                    print("warning: one", "word", number, file=sys.stderr)
                    print_fields(f"train  loss {number}  " + "  ".join(["0123456789"] * 8))
                bar.update(3)
        with tqdm(total=2, desc="download") as foreign:  # on sys.stderr, as a library draws one
            foreign.update(2)
    lines = (tmp_path / "console.log").read_text().splitlines()
    text = "  ".join(["0123456789"] * 8)
    assert lines == [line for n in range(3) for line in (f"warning: one word {n}", f"train  loss {n}  {text}")]
    *shown, download = screen(drawn.content)
    assert download.startswith("download: 100%|")
    assert "evaluation" in drawn.content.decode()
    assert " ".join(" ".join(shown).split()) == " ".join(" ".join(lines).split())
    assert len(shown) == (9 if width == 80 else 6)


@pytest.mark.parametrize("is_pipe", [True, False])
def test_no_bar_where_tee_shows_the_lines(is_pipe: bool, monkeypatch: pytest.MonkeyPatch):
    """`train.py | tee file` writes on the terminal that stderr is, too."""
    read, write = os.pipe()
    with terminal(80, monkeypatch), os.fdopen(write, "w") as pipe, monkeypatch.context() as patch:
        if is_pipe:
            patch.setattr(sys, "stdout", pipe)
        with progress_bar("epoch 1/1", 9) as bar:
            assert bool(bar.disable) == is_pipe
    os.close(read)


def test_a_log_has_lines_of_progress_even_during_one_long_update(monkeypatch, capsys):
    monkeypatch.setattr(runtime_terminal, "LINE_SECONDS", 0.05)
    with progress("search", 4, "assignments") as bar:
        bar.update()
        bar.set_postfix_str("eva")
        tqdm.write("skipped: one", file=sys.stderr)
        assert "\r" not in capsys.readouterr().err
        lines = []
        while len(lines) < 2:
            time.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"search: 1 of 4 assignments in 00:00, \d\d:\d\d left, eva", lines[0])
    with terminal(80, monkeypatch):
        assert type(progress("search", 4, "assignments")) is tqdm


def test_a_line_that_is_not_complete_is_shown_once_it_is_flushed(tmp_path: Path, capsys: pytest.CaptureFixture):
    with ConsoleLog() as console:
        console.keep(tmp_path)
        print("a question", end="")
        assert capsys.readouterr().out == ""
        print("?", end=" ", flush=True)
        assert capsys.readouterr().out == "a question? "
        print("an answer")
    assert capsys.readouterr().out == "an answer\n"
    assert (tmp_path / "console.log").read_text() == "a question? an answer\n"
