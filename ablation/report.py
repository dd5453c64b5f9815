"""The report on a sweep: its tables and figures as texts and files."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from ablation.figures import draw_curves, draw_heat_map, draw_pareto, draw_results
from ablation.names import short_names
from ablation.settings import Setting, changed_options
from ablation.tables import Table, list_notes, list_runs, tabulate, tabulate_match
from engine.reporting.plots import encode
from engine.reporting.tables import markdown_table
from engine.runtime.files import to_csv, write_file
from engine.runtime.locks import hold_lock
from engine.runtime.ownership import remove_owned

ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}

NUMBER = re.compile(r"([+-]?\d[\d.]*(?:e[+-]?\d+)?)(?: ± (\d[\d.]*))?(?= |$)")

TABLES = ("table.md", "table.tex", "table.json", "table.csv", "runs.csv")
"""Files that `write_tables` writes."""

FIGURES = ("table.png", "heat_map.png", "pareto.png", "curves.png")
"""Files that `write_figures` writes."""


class Report(NamedTuple):
    """A table for readers.

    Attributes:
        table: its columns, without those of given values that all rows share. stated: a text of those values.
        notes: see `list_notes`.
    """

    table: Table
    stated: str
    notes: list[str]


def make_report(settings: Sequence[Setting], table: Table, left_out: Sequence[str] = ()) -> Report:
    """Returns the report on the `table` for readers; for `left_out` see `report_sweep`."""
    papers = [title for title in table if title.startswith("paper")]
    given = (
        *changed_options(settings),
        *tabulate_match(settings),
        "parameters (M)",
        "MACs (G)",
        "seeds",
        "folds",
        *papers,
    )
    constant = [title for title in table if title in given and len(set(table[title])) == 1]
    same = {title: table[title][0] for title in constant if len(settings) > 1 or not table[title][0]}
    stated = ", ".join(f"{title} = {text}" for title, text in same.items() if text)
    shown = {title: texts for title, texts in table.items() if title not in same}
    return Report(shown, stated, list_notes(settings, table, left_out))


def report_sweep(caption: str, settings: Sequence[Setting], left_out: Sequence[str] = ()) -> str:
    """Formats a sweep for readers, see `to_markdown`.

    Args:
        left_out: lines that name the settings without runs.
    """
    return to_markdown(caption, make_report(settings, tabulate(settings).readers, left_out))


def to_markdown(caption: str, report: Report) -> str:
    """Formats a report in Markdown: caption, values that all rows share, the table, and its notes."""
    table, stated, notes = report
    rows = markdown_table(list(table), zip(*table.values(), strict=True)) + "\n"
    return f"{caption}\n\n" + f"All rows: {stated}.\n\n" * bool(stated) + rows + "".join(f"\n{n}\n" for n in notes)


def to_latex(caption: str, report: Report) -> str:
    """Formats a report as `to_markdown` does, as a LaTeX table with booktabs; notes are comments below it."""
    table, stated, notes = report
    caption = " ".join(filter(None, [f"{caption}." * bool(caption), f"All rows: {stated}." * bool(stated)]))
    text = latex_table(caption, list(table), list(zip(*table.values(), strict=True)))
    return text + "".join(f"% {note}\n" for note in notes)


def to_json(caption: str, settings: Sequence[Setting], left_out: Sequence[str] = ()) -> bytes:
    """Encodes the settings and their finished runs: the final records of train.py by seed or fold."""
    rows = [
        {
            "name": name,
            "changes": {option: yaml.safe_load(text) for option, text in setting.changes.items()},
            **setting.costs._asdict(),
            **({"matched": dataclasses.asdict(setting.matched)} if setting.matched else {}),
            "paper": setting.paper and dataclasses.asdict(setting.paper),
            "runs": setting.results(),
            "directories": [case.directory.name for case in setting.cases],
        }
        for name, setting in zip(short_names(settings), settings, strict=True)
    ]
    return json.dumps({"caption": caption, "rows": rows, "left_out": [*left_out]}, indent=1).encode()


def write_tables(caption: str, settings: Sequence[Setting], output: Path, left_out: Sequence[str] = ()) -> None:
    """Writes `TABLES` into `output`; for `left_out` see `report_sweep`."""
    readers, programs = tabulate(settings)
    report = make_report(settings, readers, left_out)
    with hold_lock(output / "lock", wait=True):
        write_file(output / "table.md", to_markdown(caption, report).encode())
        write_file(output / "table.tex", to_latex(caption, report).encode())
        write_file(output / "table.json", to_json(caption, settings, left_out))
        for name, table in ("table.csv", programs), ("runs.csv", list_runs(settings)):
            write_file(output / name, to_csv(list(table), zip(*table.values(), strict=True)))


def write_figures(caption: str, settings: Sequence[Setting], output: Path) -> None:
    """Writes table.png, pareto.png, curves.png and, for two options of numbers, heat_map.png into `output`.

    Removes an earlier figure that the sweep has no longer.
    """
    drawings = [draw(caption, settings) for draw in (draw_results, draw_heat_map, draw_pareto, draw_curves)]
    with hold_lock(output / "lock", wait=True):
        for name, figure in zip(FIGURES, drawings, strict=True):
            if figure is not None:
                write_file(output / name, encode(figure))
            else:
                remove_owned(output, [name])


def latex_table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table; columns of numbers are aligned to the right."""
    is_number = [all(NUMBER.match(cell) or not cell for cell in column) for column in zip(*rows, strict=True)]
    head = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{escape(caption)}}}",
        f"  \\begin{{tabular}}{{{''.join('r' if right else 'l' for right in is_number)}}}",
        "    \\toprule",
    ]
    lines = [" & ".join(map(to_cell, line)) for line in (titles, *rows)]
    lines = [f"    {lines[0]} \\\\", "    \\midrule", *(f"    {line} \\\\" for line in lines[1:])]
    return "\n".join([*head, *lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""])


def to_cell(text: str) -> str:
    """Formats a cell: a number, or mean and deviation, in mathematics, so that signs are; the rest is escaped."""
    if not (found := NUMBER.match(text)):
        return escape(text)
    mean, deviation = found.groups()
    return f"${mean}" + (f" \\pm {deviation}" if deviation else "") + "$" + escape(text[found.end() :])


def escape(text: str) -> str:
    """Returns `text` as LaTeX that prints it."""
    return "".join(ESCAPES.get(character, character) for character in text).replace("±", "$\\pm$")
