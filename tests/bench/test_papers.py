"""The papers' rows are complete, and an incomplete row is refused with its line."""

import dataclasses
import sys
from pathlib import Path

import pytest

from bench.costs import print_costs
from engine.config.papers import PaperRow, read_papers
from engine.runtime.errors import ConfigError
from models import is_host

CONFIGS = Path(__file__).parents[2] / "configs"


def test_every_row_has_its_configuration():
    rows = read_papers()
    assert len({(row.config, row.overrides, row.source) for row in rows}) == len(rows)
    for row in rows:
        if not is_host(row.config):
            assert (CONFIGS / row.config).is_file() == (row.note != "neither timm nor transformers has it")
        assert bool(row.source) == bool(row.top1 or row.parameters or row.macs)
        assert row.source or not (row.note or row.released_macs)


def test_other_peoples_models_are_counted_where_a_package_has_them(monkeypatch, capsys):
    pvt = PaperRow(config="hf:pvt", overrides=("depths=[2, 2, 2, 2]",), macs=2.1, source="Table 1")
    swin = PaperRow(config="timm:swin_tiny_patch4_window7_224", source="Table 1", parameters=28.3)
    print_costs([swin, PaperRow(config="SOFT-T", macs=1.9, source="Table 1", note="nobody has it"), pvt])
    monkeypatch.setitem(sys.modules, "transformers", None)
    print_costs([dataclasses.replace(pvt, overrides=())])
    found = [[*line.split(" | ")[1:5], line.split(" | ")[-1]] for line in capsys.readouterr().out.splitlines()]
    assert found[2] == ["28.288", "28.3", "4.491", "", " |"]
    assert found[3] == ["", "", "", "1.9", "nobody has it |"]
    assert found[4] == ["13.229", "", "1.933", "2.1", " |"]
    assert "need the package transformers; pip install" in found[7][-1]


def test_a_row(tmp_path):
    path = tmp_path / "papers.yaml"
    path.write_text("rows:\n  - {config: a.yaml, overrides: [b.c=1], macs: 4, source: Table 1, note: rounded}\n")
    row = PaperRow(config="a.yaml", overrides=("b.c=1",), macs=4.0, source="Table 1", note="rounded")
    assert read_papers(path) == (row,)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{config: a.yaml, mac: 4.6}", "rows[1].mac: unknown option; did you mean 'macs'?"),
        ("{macs: 4.6}", "rows[1].config: required, but not given"),
        ("{config: a.yaml, macs: 4.6 G}", "rows[1].macs: expected float, got '4.6 G'"),
        ("{config: a.yaml, parameters: -5.7}", "rows[1].parameters = -5.7 must be greater than 0"),
        ("{config: a.yaml, overrides: b.c=1}", "rows[1].overrides: expected a list, got 'b.c=1'"),
        ("{config: a.yaml, macs: 4.6, macs: 4.7}", "rows.1.macs: duplicate key"),
        ("a.yaml", "rows[1]: expected a mapping of options, got 'a.yaml'"),
    ],
)
def test_a_malformed_row_is_refused(row, problem, tmp_path):
    path = tmp_path / "papers.yaml"
    path.write_text(f"rows:\n  - {{config: a.yaml}}\n  - {row}\n")
    with pytest.raises(ConfigError) as refused:
        read_papers(path)
    assert str(refused.value).startswith(f"{path}:3: {problem}")
