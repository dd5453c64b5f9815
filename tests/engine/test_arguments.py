"""Whole numbers on command lines: one type with a range, refused in one line before anything else is read."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import analyze
import eav
from bench.arguments import image_size, token_grid
from engine.runtime import arguments
from engine.runtime.arguments import Count
from tests.support.refusals import refusal

ROOT = Path(__file__).parents[2]
WITHOUT = {"engine.runtime.arguments", "engine.config.option_pages"}
"""Modules that have a parser and take no number."""

PATHS = [
    *ROOT.glob("*.py"),
    *(path for room in ("analysis", "bench", "engine") for path in (ROOT / room).rglob("*.py")),
]
FOUND = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in PATHS if " ArgumentParser(" in p.read_text()}
PARSERS = {parser.partition(":")[0] for *_, parser in eav.COMMANDS.values()}
SCRIPTS = sorted({module for module, *_ in eav.COMMANDS.values()} | FOUND - PARSERS - WITHOUT)


class Caught(Exception):
    """Carries the parser of a script."""


def run(script: str) -> Callable[[list[str]], object]:
    return import_module(script).main


def parser_of(script: str) -> argparse.ArgumentParser:
    def catch(parser, *_):
        raise Caught(parser)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(arguments.ArgumentParser, name, catch)
        with pytest.raises(Caught) as caught:
            run(script)([*analyze.QUESTIONS] if script == "analyze" else [])
    return caught.value.args[0]


def actions(parser: argparse.ArgumentParser, *before: str) -> Iterator[tuple[tuple[str, ...], argparse.Action]]:
    """The commands before an argument on the line, and the argument: of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from actions(command, *before, name)
        else:
            yield before, action


def is_whole(kind: object) -> bool:
    """True for the type of an argument that makes whole numbers."""
    try:
        return type(kind("16")) is int
    except (TypeError, ValueError, argparse.ArgumentTypeError, SystemExit):
        return isinstance(kind, Count)


NUMBERS = [
    pytest.param(script, before, action, id=" ".join((script, *before, *action.option_strings)))
    for script in SCRIPTS
    for before, action in actions(parser_of(script))
    if is_whole(action.type)
]


def test_the_table_has_the_numbers_of_every_script():
    assert {"validate", "predict", "ablate", "benchmark", "analyze", "engine.data.draw"} <= {*SCRIPTS}
    assert {"analyze error --budgets", "predict --batch-size", "ablate --jobs"} <= {str(each.id) for each in NUMBERS}


@pytest.mark.parametrize(("script", "before", "action"), NUMBERS)
def test_a_whole_number_outside_its_range_is_refused(script, before, action, capsys):
    """Zero and negative where they make no sense, and numbers of any number of digits."""
    kind, (option,) = action.type, action.option_strings
    assert isinstance(kind, Count), f"{script} {option}: use engine.runtime.arguments.Count"
    assert kind(str(kind.low)) == kind.low >= 0
    assert kind(str(kind.high)) == kind.high < 2**63
    times = action.nargs if isinstance(action.nargs, int) else 1
    below, above = f"below the least valid value {kind.low}", f"above the largest valid value {kind.high}"
    bad = {str(kind.low - 1): below, "-" + 30 * "9": below, str(kind.high + 1): above, 5000 * "9": above}
    for value, message in bad.items() | dict.fromkeys(("x", "1.5", "1_0", "²"), "is not a whole number").items():
        line = refusal(run(script), [*before, option, *times * [value]], capsys).splitlines()[-1]
        assert f"argument {option}: " in line
        assert message in line
        assert len(line) < 200


@pytest.mark.parametrize("module", [module for module, *_ in eav.COMMANDS.values()])
def test_help_has_an_example_that_the_parser_takes(module):
    parser = parser_of(module)
    (example,) = re.findall(r"\n\n    (.+)\n\n", parser.format_help())
    command, *words = shlex.split(example)
    assert words[0] == f"{module}.py" if command == "python" else eav.COMMANDS[words[0]][0] == module
    parse = parser.parse_args if module == "analyze" else parser.parse_intermixed_args
    parse(words[1:])


@pytest.mark.parametrize("name", eav.COMMANDS)
def test_the_command_line_is_parsed_before_torch_is_imported(name):
    """By the script itself, and by `eav`."""
    module = eav.COMMANDS[name][0]
    words = [name, *["replace"] * (name == "analyze")]  # of a question, too
    script, console = f"runpy.run_module({module!r}, run_name='__main__')", "import eav; eav.main()"
    for run, argv, status in (
        (script, [module, *words[1:], "--help"], 0),
        (console, ["eav", *words, "--no-such-option"], 2),
    ):
        code = f"import runpy, sys; sys.argv = {argv}\ntry: {run}\nfinally: assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert "usage: " in done.stdout + done.stderr


@pytest.mark.parametrize("question", analyze.QUESTIONS)
def test_the_help_of_a_question_has_an_example(question, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("photo.jpg").touch()
    with pytest.raises(SystemExit):
        analyze.main([question, "--help"])
    example = re.search(r"^    python analyze.py (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    assert refusal(analyze.main, shlex.split(example), capsys).startswith("error: runs/softmax: no such run")


@pytest.mark.parametrize("text", ["0", "-4", 30 * "9", "4x0", "x", "4x", "4x4x4x4", "4x4x0", f"4x{30 * '9'}"])
@pytest.mark.parametrize("kind", [token_grid, image_size])
def test_sizes_are_whole_numbers(kind, text):
    with pytest.raises(argparse.ArgumentTypeError):
        kind(text)


LISTS = ["analyze search r --budget macs=.7", "analyze maps r x --attention eva", "engine.data.draw --images 2 2"]


@pytest.mark.parametrize("line", [*LISTS, "benchmark --tokens 49"])
def test_a_list_given_twice_is_refused_and_not_replaced(line, capsys):
    script, *words = line.split()
    again = words[[word[:2] for word in words].index("--") :]
    assert "given twice; give all its values after one" in refusal(run(script), [*words, *again], capsys)


def test_an_abbreviated_plugin_is_refused_and_not_left_out(capsys):
    line = refusal(run("train"), ["configs/quickstart.yaml", "--plug=x", "--output", "r"], capsys)
    assert line.endswith("argument --plugin: write --plugin x in full\n")


IMPORTS = {
    "torch": ["train configs/quickstart.yaml --output r"],
    "engine.config": ["train", "analyze"],
    "engine.runtime.arguments": ["validate", "predict", "ablate", "benchmark", "eav train", "eav runs r"],
    "engine.checkpoints.command_line": ["engine.checkpoints.export"],
    "engine.data.command_lines": ["engine.data.prepare", "engine.data.draw", "engine.data.verify"],
}
"""Module -> lines of scripts that import it."""


@pytest.mark.parametrize(("line", "module"), [(line, module) for module, lines in IMPORTS.items() for line in lines])
def test_an_interrupt_during_the_imports_ends_a_script_silently(line, module):
    finder = f"class Finder:\n  def find_spec(name, *of):\n    if name == {module!r}: raise KeyboardInterrupt"
    code = f"{finder}\nimport runpy, sys\nsys.meta_path.insert(0, Finder)\nsys.argv = {line.split()}"
    code += f"\nrunpy.run_module({line.split()[0]!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("script", ["train", "ablate", "validate", "engine.checkpoints.export"])
def test_an_option_of_the_run_is_not_taken_for_the_file(script, capsys):
    words = ["optim.lr=1", "x", *["--output", "r"] * (script in ("train", "ablate"))]
    assert "'optim.lr=1' is no file; the c" in refusal(run(script), words, capsys)
