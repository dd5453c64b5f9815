"""ViTs of timm at high resolution, as they are and with other attention: time, memory and multiply-accumulates.

    python -m bench.high_resolution --output docs/data/high_resolution.csv  # measures what the file lacks

Random weights, one image, fp32, one thread. Calls of a case are timed in turns, after one that counts memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from attention import Grid
from bench.comparison import Comparison, rows_of, size_text
from bench.results import COLUMNS as RESULTS
from bench.results import SETTINGS
from bench.timing import cpu_clock, time_rounds
from bench.workload import Subject, Workload, read_options, whole_model
from engine.runtime.arguments import ArgumentParser
from engine.runtime.errors import refuse_bad_input
from engine.runtime.files import append_whole, dicts_to_csv
from engine.runtime.memory import peak_bytes
from engine.runtime.provenance import device_name
from engine.runtime.reading import read_csv
from models import replace_attention

COLUMNS = ("device", "torch", "timm", *RESULTS)
"""Columns of the file. The name of a row is ``"HOST:ATTENTION"``."""
CPU = torch.device("cpu")
OTHERS = "eva:window_size=8,num_landmarks=64", "lara:num_landmarks=64", "performer:num_samples=64"
MECHANISMS = "softmax", *OTHERS, "local:window_size=8", "linear", "agent"
"""Attention of all blocks; the first is the host's own."""
KEPT = " + softmax"
"""End of the name of attention that leaves every fourth block its softmax attention."""


class Case(NamedTuple):
    """Host of timm, size of images, rounds of the measurement, number of mechanisms that also leave softmax."""

    host: str
    size: Grid
    mode: str
    rounds: int = 2
    mixed: int = 1

    def comparison(self) -> Comparison:
        names = *MECHANISMS, *(name + KEPT for name in MECHANISMS[1 : self.mixed + 1])
        subjects = [with_attention(self.host, name) for name in names]
        costs = [subject.costs(self.size) for subject in subjects]
        return Comparison("model", subjects, subjects[0].name, costs, self.size, 1, self.mode, "fp32", "eager")


SMALL, BASE = "vit_small_patch16_dinov3", "vit_base_patch14_dinov2"
CASES = (
    Case(SMALL, (512, 512), "inference", rounds=3, mixed=6),
    Case(SMALL, (1024, 1024), "inference", mixed=6),
    Case(SMALL, (1024, 2048), "inference"),
    Case(BASE, (518, 518), "inference"),
    Case(SMALL, (512, 512), "forward+backward", rounds=3),
    Case(BASE, (518, 518), "forward+backward"),
    Case(BASE, (1036, 1036), "inference"),
    Case(SMALL, (1024, 1024), "forward+backward"),
)


def with_attention(host: str, text: str) -> Subject:
    """Parses attention as in ``--attention`` of benchmark.py, with or without `KEPT`."""
    whole, (entry, kept, _) = whole_model(f"timm:{host}"), text.partition(KEPT)
    name, _, options = entry.partition(":")
    attention: Any = {"name": name, **read_options(text, options)}
    if kept:
        attention = [{"blocks": "0-2, 4-6, 8-10", **attention}, {"blocks": "3, 7, 11", "name": "softmax"}]
    build = whole.build if name == "softmax" else lambda size: replace_attention(whole.build(size), attention, size)
    return replace(whole, name=f"{host}:{text}", build=build, warm_up=0)


def measure(comparison: Comparison, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each subject."""
    where = [getattr(comparison, name) for name in SETTINGS]
    calls = {each.name: Workload(each, *where, CPU).call for each in comparison.subjects}
    counts = {name: {"peak_bytes": peak_bytes(call, CPU)} for name, call in calls.items()}
    times = time_rounds(calls, rounds, CPU, clock=cpu_clock(), is_warm=True)
    versions = {"device": device_name(CPU), "torch": version("torch"), "timm": version("timm")}
    return [versions | row for row in rows_of(comparison, counts, times)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m bench.high_resolution", description=__doc__.partition(":")[0])
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    output = parser.parse_args(arguments).output
    torch.set_num_threads(1)
    with refuse_bad_input():
        if not output.exists():
            append_whole(output, dicts_to_csv([], COLUMNS))
        done = {(row["baseline"], row["size"], row["mode"]) for row in read_csv(output)}
        keys = {case: (f"{case.host}:{MECHANISMS[0]}", size_text("model", case.size), case.mode) for case in CASES}
        for case in tqdm([case for case, key in keys.items() if key not in done], unit="case", disable=None):
            lines = dicts_to_csv(measure(case.comparison(), case.rounds), COLUMNS).splitlines(keepends=True)
            append_whole(output, b"".join(lines[1:]))


if __name__ == "__main__":
    main()
