"""docs/reproducing.md has every sweep and every quoted table of a paper once, and says rightly what was run."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from engine.config.papers import read_papers

ROOT = Path(__file__).parents[1]
SECTIONS = dict(section.split("\n", 1) for section in (ROOT / "docs/reproducing.md").read_text().split("\n## ")[1:])
"""Heading -> text."""
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for text in SECTIONS.values()
    for line in text.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| table or figure", "| sweep"))
]
SWEEPS = sorted((ROOT / "configs/ablation").glob("*.yaml"))


def rows_of(sweep: str) -> list[list[str]]:
    return [row for row in ROWS if f"configs/ablation/{sweep}.yaml" in " ".join(row)]


@pytest.mark.parametrize("command", re.findall(r"`(python \w+\.py [^`]+)`", " ".join(SECTIONS.values())))
def test_a_command_has_what_its_script_asks_for(monkeypatch, command):
    class Parsed(Exception):
        """The script has taken the command line, and begins its work."""

    def begin():
        raise Parsed

    _, script, *arguments = shlex.split(command)
    module = importlib.import_module(script.removesuffix(".py"))
    monkeypatch.setattr(module, "refuse_bad_input", begin)
    with pytest.raises(Parsed):
        module.main(arguments)


def test_the_page_has_exactly_the_shipped_sweeps():
    named = re.findall(r"configs/ablation/(\w+)\.yaml", " ".join(SECTIONS.values()))
    assert sorted(named) == [path.stem for path in SWEEPS]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_was_run_where_the_page_and_its_head_say_so(path):
    (row,) = rows_of(path.stem)
    head = " ".join(re.match(r"(#.*\n)*", path.read_text())[0].replace("#", "").split())
    unrun = re.search(
        r"no run was made here|it has not been run|unknown here|the paper's figures|`paper` beside", head, re.I
    )
    assert row[-1].startswith("no") == bool(unrun), (row, head)


def test_the_list_of_sweeps_says_the_same():
    """docs/ablations.md has the sweeps by their names in one table."""
    text = (ROOT / "docs/ablations.md").read_text()
    table = text[text.index("| file | content | run here |") :].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        for sweep in re.findall(r"`(\w+)\.yaml`", cells[0]):
            (row,) = rows_of(sweep)
            assert row[-1].startswith("no") == (cells[-1] == "no"), sweep


@pytest.mark.parametrize("paper", ["EVA", "LARA"])
def test_a_quoted_table_has_a_row_with_its_sweep(paper):
    """Every table that engine/config/papers.yaml quotes of a paper is in the paper's section."""
    (text,) = [text for heading, text in SECTIONS.items() if heading.split()[0] == paper]
    for source in {row.source for row in read_papers() if row.source.startswith(f"{paper} Table")}:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {source.removeprefix(f'{paper} ')}: ")]
        sweep = re.search(r"configs/ablation/\w+\.yaml", line)[0]
        assert yaml.safe_load((ROOT / sweep).read_text())["paper"] == source


@pytest.mark.parametrize("path", [p for p in SWEEPS if p.stem.startswith(("eva_", "lara_"))], ids=lambda p: p.stem)
def test_the_cost_of_a_papers_sweep_counts_its_rows(path):
    sweep = yaml.safe_load(path.read_text())
    (row,) = rows_of(path.stem)
    assert row[2] == f"{len(sweep.get('runs') or sweep['bases'])} rows of ImageNet"
