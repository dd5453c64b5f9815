"""Results of a benchmark: Markdown for readers, CSV for programs, and the marking of noisy values."""

import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.timing import MAX_ERROR, MAX_WAITED, Quartiles, Times
from engine.reporting.tables import compact_table
from engine.runtime.files import dicts_to_csv, write_file

NOISE = (
    f"~ is noisy: the median's standard error, 0.93 x interquartile range / sqrt(rounds), is above {MAX_ERROR:.0%}, or "
    f"other programs kept the measurement from running for more than {MAX_WAITED:.0%} of its time."
)
"""Meaning of ~ in tables."""
MEMORY = (
    "Peak: what torch allocates during a call, beyond parameters, optimiser state and inputs. Saved: what the result "
    "keeps for its backward pass, without parameters. MACs: of one image, forward; sorting and comparing has none. "
    "Operators: of PyTorch and Triton, without views. Moved: bytes that they read and write."
)
"""Meaning of the counts."""

SETTINGS = ("size", "batch", "mode", "dtype", "execution")
ENDS = ("", "_q1", "_q3", "_noisy")
MEASURED = [name + end for name in ("seconds", "speedup") for end in ENDS]
COUNTED = (
    *("macs_ratio", "efficiency", "images_per_second", "waited", "peak_bytes", "peak_ratio", "saved_bytes"),
    *("operators", "moved_bytes", "macs", "parameters"),
)
FILES = ("table.md", "results.csv")
"""Files that `write_tables` writes."""

COLUMNS = ("kind", "name", "baseline", *SETTINGS, *MEASURED, *COUNTED)
"""Columns of results.csv.

peak_ratio: relative to the baseline's. macs_ratio: the baseline's MACs, relative to these. efficiency: speed-up,
relative to macs_ratio. waited: see `bench.timing.Times`.
"""


def quartile_columns(name: str, found: Quartiles, times: Times) -> dict[str, float | bool]:
    """Returns the four columns of the quantity `name`."""
    values = (found.median, found.low, found.high, times.noisy(found))
    return dict(zip((name + end for end in ENDS), values, strict=True))


def quartiles_text(row: Mapping[str, Any], name: str, unit: float, form: str) -> str:
    """Formats a quantity of a row as ``"~1.23 (1.20–1.30)"``: median and quartiles, ~ if noisy; empty if unknown."""
    median, low, high, noisy = (row[name + end] for end in ENDS)
    return "" if median is None else f"{'~' * noisy}{median / unit:{form}} ({low / unit:{form}}–{high / unit:{form}})"


def format_results(metadata: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Formats the conditions of the measurements, and a table for each kind of subject, as Markdown."""
    conditions = ", ".join(f"{name} {value}" for name, value in metadata.items() if name != "command")
    lines = [conditions, "", f"{MEMORY} Speed-up: of the same round's times, median and quartiles."]
    for kind, same_kind in itertools.groupby(rows, key=itemgetter("kind")):
        table = [readable(row) for row in same_kind]
        settings = {name: text for name, text in table[0].items() if name in SETTINGS}
        shared = [name for name in settings if len({line[name] for line in table}) == 1]
        lines += ["", f"{kind}: " + ", ".join(f"{name} {settings[name]}" for name in shared if settings[name]), ""]
        lines += [compact_table([{name: line[name] for name in line if name not in shared} for line in table])]
    noisy = sum(bool(row["seconds_noisy"] or row["speedup_noisy"]) for row in rows)
    if noisy:
        waited = max(row["waited"] or 0 for row in rows)
        lines += ["", f"Too noisy: {noisy} of {len(rows)} rows (kept waiting for up to {waited:.0%}). {NOISE}"]
    return "\n".join(lines) + "\n"


def readable(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns title of a column -> its text in a row; empty for unknown values."""

    def text(value: float | None, unit: float, form: str) -> str:
        return "" if value is None else f"{value / unit:{form}}"

    return {
        "name": row["name"],
        **{name: str(row[name]) for name in SETTINGS},
        "ms": quartiles_text(row, "seconds", 1e-3, ".4g") or "out of memory",
        f"speed-up over {row['baseline']}": quartiles_text(row, "speedup", 1, ".2f"),
        "of the ratio of MACs": text(row["efficiency"], 1, ".2f"),
        "images/s": text(row["images_per_second"], 1, ".4g"),
        "peak (MiB)": text(row["peak_bytes"], 2**20, ".1f")
        + (f" ({row['peak_ratio']:.2f}x)" if row["peak_ratio"] else ""),
        "saved (MiB)": text(row["saved_bytes"], 2**20, ".1f"),
        "operators": text(row["operators"], 1, ".0f"),
        "moved (MiB)": text(row["moved_bytes"], 2**20, ".1f"),
        "MACs (G)": text(row["macs"], 1e9, ".3f"),
        "parameters (M)": text(row["parameters"], 1e6, ".3f"),
    }


def write_tables(metadata: Mapping[str, Any], rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Writes table.md and results.csv into the directory `output`."""
    write_file(output / "table.md", format_results(metadata, rows).encode())
    write_file(output / "results.csv", dicts_to_csv(rows, COLUMNS))
