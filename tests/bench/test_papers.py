"""The papers' rows are complete, and an incomplete row is refused with its line."""

from pathlib import Path

import pytest

from bench.costs import costs_of_timm, print_costs_of_others
from engine.config.papers import PaperRow, read_others, read_papers
from engine.runtime.errors import ConfigError
from tests.support.partition import chosen

CONFIGS = Path(__file__).parents[2] / "configs"


def test_every_row_has_its_configuration():
    rows = read_papers()
    assert len({(row.config, row.overrides, row.source) for row in rows}) == len(rows)
    for row in rows:
        assert (CONFIGS / row.config).is_file()
        assert bool(row.source) == bool(row.top1 or row.parameters or row.macs)
        assert row.source or not (row.note or row.released_macs)


def test_a_row(tmp_path):
    path = tmp_path / "papers.yaml"
    path.write_text("rows:\n  - {config: a.yaml, overrides: [b.c=1], macs: 4, source: Table 1, note: rounded}\n")
    row = PaperRow(config="a.yaml", overrides=("b.c=1",), macs=4.0, source="Table 1", note="rounded")
    assert read_papers(path) == (row,)


@pytest.mark.parametrize(
    "row", chosen(read_others(), lambda row: row.title == "Swin-T"), ids=lambda row: f"{row.title}, {row.source}"
)
def test_a_model_of_timm_is_counted_as_the_paper_prints_it_or_its_row_says_why_not(row):
    """EVA Table 10 prints whole millions, LARA Table 2 one decimal, some of them zeros after a rounding."""
    parameters, macs = costs_of_timm(row.model)
    digits = 0 if row.source == "EVA Table 10" else 1
    agrees = (round(parameters / 1e6, digits), round(macs / 1e9, 1)) == (row.parameters, row.macs)
    assert agrees != bool(row.note)
    assert abs(parameters / 1e6 / row.parameters - 1) < 0.02
    assert abs(macs / 1e9 / row.macs - 1) < 0.05


def test_the_table_of_other_models(capsys):
    rows = read_others()
    assert {row.source for row in rows} == {"EVA Table 10", "LARA Table 2"}
    assert len({(row.model, row.source) for row in rows}) == len(rows)
    (swin,) = [row for row in rows if row.title == "Swin-T"]
    print_costs_of_others([swin])
    line = "| swin_tiny_patch4_window7_224 | Swin-T | 28.288 | 28.3 | 4.491 | 4.5 | 81.3 | LARA Table 2 |  |"
    assert capsys.readouterr().out.splitlines()[-1] == line


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
