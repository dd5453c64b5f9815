"""Heartbeat of a run: `metrics.prom`, in Prometheus' text format, for the textfile collector of node_exporter."""

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.runtime.files import write_atomically
from engine.runtime.reading import MAX_TEXT, parsing, read_bounded

HEARTBEAT = "metrics.prom"
"""File of a run directory."""

GAUGES = {
    "record_time_seconds": "seconds since 1970 of the last record",
    "checkpoint_time_seconds": "seconds since 1970 of the last checkpoint of this launch",
    "running": "1 until the launch ends",
    "failed": "1 after an error has ended the launch",
    "epoch": "epoch that is trained, from 1",
    "step": "updates of the run",
    "total_steps": "updates of the whole run",
    "loss": "mean loss since the record before",
    "images_per_second": "images trained in a second",
    "data_wait": "percentage of the time that the slowest rank waits for data",
    "broken": "broken training images of the epoch",
    "top1": "percentage of right predictions in the last evaluation",
}
"""Name of a gauge, without its prefix -> its help text."""


def label_of(directory: Path) -> str:
    """Returns the path of a run's directory as the value of a label."""
    return str(directory.resolve()).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def settle(directory: Path) -> None:
    """Gives the heartbeat of a finished run, which may be a copy or was killed at its end, its directory and no launch.

    UserError: it cannot be read.
    """
    path, label = directory / HEARTBEAT, label_of(directory)

    def mend(line: re.Match[str]) -> str:
        return f'{line[1]}{{run="{label}"}} {"0.0" if line[1] == "eav_running" else line[2]}'

    if path.exists():
        with parsing(path):
            text = read_bounded(path, MAX_TEXT).decode()
        write_atomically(path, re.sub(r'(?m)^(eav_\w+)\{run=".*"\} (\S+)$', mend, text).encode(), sync=False)


class Heartbeat:
    """Writes the last values of the run in `directory`, at every record. It is written anew, whole."""

    def __init__(self, directory: Path):
        self.path, self.values = directory / HEARTBEAT, {"running": 1.0, "failed": 0.0}
        self.run = label_of(directory)

    def beat(self, values: Mapping[str, Any]) -> None:
        """Takes those of `values` that are gauges, None for a number that is not finite, and writes the file."""
        known = {name: math.nan if x is None else float(x) for name, x in values.items() if name in GAUGES}
        self.values |= known | {"record_time_seconds": time.time()}
        lines = []
        for name, text in GAUGES.items():
            if name in self.values:
                gauge = f"eav_{name}"
                lines += [f"# HELP {gauge} {text}", f"# TYPE {gauge} gauge"]
                lines.append(f'{gauge}{{run="{self.run}"}} {self.values[name]!r}')
        write_atomically(self.path, "\n".join([*lines, ""]).encode(), sync=False)
