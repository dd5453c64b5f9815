"""The tables of docs/results.md are what the files in docs/data/ say."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = (DOCS / "results.md").read_text()
Row = dict[str, str]


def read(name: str, mode: str) -> list[Row]:
    """The rows of a file that are of this mode."""
    with (DOCS / "data" / name).open() as file:
        return [row for row in csv.DictReader(file) if row["mode"] == mode]


def table(rows: Sequence[Row], titles: str, cells: Callable[[Row, Row], Sequence[str]]) -> str:
    """Markdown: a line for every name, and for every size the cells of its row and the baseline's, under the titles."""
    found = {(row["name"], row["size"]): row for row in rows}
    names, sizes = (list(dict.fromkeys(pair)) for pair in zip(*found, strict=True))
    lines = [["", *(title.format(size) for size in sizes for title in titles.split("|"))]]
    lines.append(["---"] * len(lines[0]))
    for name in names:
        pairs = [(found[name, size], found[rows[0]["baseline"], size]) for size in sizes]
        lines.append([f"`{name}`", *(cell for pair in pairs for cell in cells(*pair))])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def speed(row: Row, baseline: Row) -> tuple[str, str]:
    """How many times as fast as the baseline, and how many times fewer multiply-accumulates; its own milliseconds."""
    if row is baseline:
        milliseconds = f"{1e3 * float(row['seconds']) / int(row['batch']):.3g}"
        return f"{float(milliseconds):g} ms", ""
    median, low, high = (float(row[f"speedup{end}"]) for end in ("", "_q1", "_q3"))
    noise = "~" if row["speedup_noisy"] == "True" else ""
    ratio = float(baseline["macs"]) / float(row["macs"])
    return f"{noise}{median:.2f} ({low:.2f}–{high:.2f})", f"{ratio:.2f}"


def memory(row: Row, _: Row) -> tuple[str, str]:
    """Peak and saved MiB of an image."""
    return tuple(f"{float(row[name]) / int(row['batch']) / 2**20:.1f}" for name in ("peak_bytes", "saved_bytes"))


def training(row: Row, baseline: Row) -> tuple[str, str, str]:
    """Speed and peak MiB of an image."""
    return *speed(row, baseline), memory(row, baseline)[0]


def test_tables_of_time_and_memory():
    for mode in ("forward", "forward+backward"):
        assert table(read("attention.csv", mode), "{} tokens|MACs", speed) in RESULTS
    assert table(read("attention.csv", "forward+backward"), "{} tokens: peak|saved", memory) in RESULTS
    assert table(read("model.csv", "train"), "{} pixels|MACs|peak", training) in RESULTS
