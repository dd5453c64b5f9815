"""The report on a sweep: its tables, in Markdown and LaTeX, and figures as texts and files."""

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from ablation.figures import draw_heat_map, draw_pareto, draw_results
from ablation.names import short_names
from ablation.runs import Case, Setting, changed_options, in_order
from ablation.tables import Table, list_best, list_notes, list_runs, tabulate, tabulate_match
from attention.option_tables import markdown_table
from engine.reporting.plots import encode
from engine.runtime.files import to_csv, write_file
from engine.runtime.locks import hold_lock
from engine.runtime.ownership import remove_owned
from engine.runtime.reading import read_csv

TABLES = ("table.md", "table.tex", "table.csv", "runs.csv")
"""Files that `write_tables` writes."""

DRAWN = ("table", "heat_map", "pareto")
"""Figures of `write_figures`."""

FIGURES = tuple(f"{name}.{form}" for name in DRAWN for form in ("png", "pdf"))
"""Files that `write_figures` writes."""

ESCAPES = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def make_report(settings: Sequence[Setting], left_out: Sequence[str] = ()) -> tuple[Table, str, list[str]]:
    """Returns the table of a sweep without columns of given values that all rows share, a text of those, and notes.

    left_out: lines that name the settings without runs.
    """
    table = tabulate(settings, for_readers=True)
    given = {*changed_options(settings), *tabulate_match(settings), "parameters (M)", "MACs (G)", "seeds", "folds"}
    constant = [x for x in table if (x in given or x.startswith("paper")) and len(set(table[x])) == 1]
    same = {title: table[title][0] for title in constant if len(settings) > 1}
    no_runs = {("seeds", "0"), ("folds", "0")}
    stated = ", ".join(f"{title} = {text}" for title, text in same.items() if text and (title, text) not in no_runs)
    shown = {title: texts for title, texts in table.items() if title not in same}
    return shown, f"All rows: {stated}." * bool(stated), list_notes(settings, table, left_out)


def report_sweep(caption: str, settings: Sequence[Setting], left_out: Sequence[str] = ()) -> str:
    """Formats a sweep in Markdown: caption, given values that all rows share, the table without them, and its notes."""
    table, stated, notes = make_report(settings, left_out)
    text = markdown_table(list(table), list(zip(*table.values(), strict=True)))
    return "\n\n".join([caption, *filter(None, [stated]), f"{text}\n"]) + "".join(f"\n{note}\n" for note in notes)


def to_latex(caption: str, settings: Sequence[Setting], left_out: Sequence[str] = (), label: str = "sweep") -> str:
    """Formats a sweep in LaTeX as ``tab:label``: `report_sweep` with names of rows in place of their options.

    Accuracies of `list_best` are bold, and notes comments below the table.
    """
    table, stated, notes = make_report(settings, left_out)
    options, best = changed_options(settings), list_best(settings)
    table = {"setting": short_names(settings)} | {title: table[title] for title in table if title not in options}
    bold = "Bold: the highest mean, and those whose difference to it is noise." * any(map(any, best.values()))
    columns = [
        [escape(title), *map(to_cell, texts, best.get(title, [False] * len(settings)))]
        for title, texts in table.items()
    ]
    head, *rows = [f"    {' & '.join(line)} \\\\" for line in zip(*columns, strict=True)]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{escape(' '.join(filter(None, [f'{caption}.' * bool(caption), stated, bold])))}}}",
        f"  \\label{{tab:{re.sub(r'[^A-Za-z0-9_-]+', '-', label)}}}",
        f"  \\begin{{tabular}}{{l{'r' * (len(table) - 1)}}}",
        *("    \\toprule", head, "    \\midrule", *rows, "    \\bottomrule"),
        *("  \\end{tabular}", "\\end{table}", *(f"% {' '.join(note.split())}" for note in notes), ""),
    ]
    return "\n".join(lines)


def to_cell(text: str, is_bold: bool) -> str:
    """Formats a cell: a number, or mean and deviation, in mathematics, so that signs are; the rest is escaped."""
    if not (found := re.match(r"([+-]?\d[\d.]*(?:e[+-]?\d+)?)(?: ± (\d[\d.]*))?(?= |$)", text)):
        return escape(text)
    mean, deviation = found.groups()
    number = f"${mean}" + (f" \\pm {deviation}" if deviation else "") + "$"
    return (f"{{\\boldmath{number}}}" if is_bold else number) + escape(text[found.end() :])


def escape(text: str) -> str:
    """Returns `text` as LaTeX that prints it, in one line."""
    return "".join(ESCAPES.get(character, character) for character in re.sub(r"\s+", " ", text)).replace("±", "$\\pm$")


def write_tables(caption: str, settings: Sequence[Setting], output: Path, left_out: Sequence[str] = ()) -> None:
    """Writes `TABLES` into `output`; for `left_out` see `make_report`."""
    with hold_lock(output / "lock", wait=True):
        write_file(output / "table.md", report_sweep(caption, settings, left_out).encode())
        write_file(output / "table.tex", to_latex(caption, settings, left_out, output.resolve().name).encode())
        for name, table in ("table.csv", tabulate(settings)), ("runs.csv", list_runs(settings)):
            write_file(output / name, to_csv(list(table), zip(*table.values(), strict=True)))


def write_figures(caption: str, settings: Sequence[Setting], output: Path) -> None:
    """Writes table, pareto and, for two options of numbers, heat_map as .png and .pdf into `output`.

    Removes an earlier figure that the sweep has no longer; without a finished run it has none.
    """
    drawings: list[Figure | None] = [None] * len(DRAWN)
    if any(setting.results() for setting in settings):
        drawings = [draw(caption, settings) for draw in (draw_results, draw_heat_map, draw_pareto)]
    with hold_lock(output / "lock", wait=True):
        for name, figure in zip(DRAWN, drawings, strict=True):
            if figure is None:
                remove_owned(output, [f"{name}.png", f"{name}.pdf"])
                continue
            write_file(output / f"{name}.png", encode(figure))
            figure.suptitle("")  # a paper has captions of its own
            write_file(output / f"{name}.pdf", encode(figure, "pdf"))


def lost_runs(cases: Sequence[Case], output: Path) -> list[str]:
    """Returns the runs in the tables of `output` that are none of `cases`, and would have no row any more."""
    path, names = output / TABLES[-1], {case.directory.name for case in cases}
    lines = read_csv(path) if path.exists() else []
    return [line["directory"] for line in lines if line.get("directory", "") not in {"", *names}]


def count_finished(settings: Sequence[Setting], jobs: int) -> str:
    """Returns "3 of 18 runs finished, about 0:12:00 left", by the finished runs and with so many runs at a time."""
    runs = [(case, case.run.schedule.epochs, case.result()) for case in in_order(settings)]
    finals = [(epochs, final) for _, epochs, final in runs if final]
    speeds = [final["elapsed_seconds"] / epochs for epochs, final in finals if "elapsed_seconds" in final]
    text = f"{len(finals)} of {len(runs)} runs finished"
    if not speeds or len(finals) == len(runs):
        return text
    left = sum(epochs for case, epochs, final in runs if not (final or case.has_failed()))
    seconds = fmean(speeds) * left / jobs
    return f"{text}, about {timedelta(seconds=round(seconds))} left"
