"""Heartbeat of a run: `metrics.prom`, in Prometheus' text format, for the textfile collector of node_exporter."""

import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.runtime.files import write_atomically
from engine.runtime.reading import MAX_TEXT, read_bounded

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


class Heartbeat:
    """Writes the last values of the run in `directory`, at every record. It is written anew, whole."""

    def __init__(self, directory: Path):
        self.path, self.values = directory / HEARTBEAT, {"running": 1.0, "failed": 0.0}
        self.run = str(directory.resolve()).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

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

    def settle(self) -> None:
        """Gives the file of a finished run, which was copied or killed at its end, this directory and no launch."""
        with suppress(FileNotFoundError):
            text = read_bounded(self.path, MAX_TEXT).decode(errors="replace")
            text = re.sub(r'run=".*"\}', lambda _: f'run="{self.run}"}}', text)
            text = re.sub(r"(?m)^(eav_running\{.*\}) .*", r"\1 0.0", text)
            write_atomically(self.path, text.encode(), sync=False)
