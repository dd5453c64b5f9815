"""Time and memory that a paper prints for a model of the benchmark, as ratios to the softmax attention of its table.

bench/printed.csv has the numbers as printed, with the pixels that make as many tokens here. The ratio of memory is
printed too, from more digits than the GB have. Milliseconds of another machine say nothing beside ours, but ratios may.
LARA appendix H.5 does not say whether a gradient was computed, nor the batch.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.runtime.reading import read_csv

PRINTED = Path(__file__).with_name("printed.csv")


class Printed(NamedTuple):
    """Figures of a table: its name, the speed-up over its softmax attention, and the share of its peak memory."""

    source: str
    speedup: float
    peak_ratio: float


@functools.cache
def read_printed() -> dict[tuple[str, str, str], Printed]:
    """Reads the file: name, baseline and size of a row of the benchmark -> figures."""
    rows = read_csv(PRINTED)
    by_name = {(row["name"], row["size"]): row for row in rows}
    found = {}
    for row in rows:
        softmax = by_name[row["baseline"], row["size"]]
        ratios = float(softmax["ms"]) / float(row["ms"]), float(row["of_softmax_gb"])
        found[row["name"], row["baseline"], row["size"]] = Printed(row["source"], *ratios)
    return found


def print_beside(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns title of a column -> its text for a row of the benchmark; empty where no paper prints its figures."""
    figures = read_printed().get((row["name"], row["baseline"], row["size"]))
    if figures is None:
        return {"paper: speed-up": "", "paper: peak": "", "paper": ""}
    return {
        "paper: speed-up": f"{figures.speedup:.2f}",
        "paper: peak": f"{figures.peak_ratio:.2f}x",
        "paper": figures.source,
    }
