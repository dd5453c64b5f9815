"""Records of a run, `metrics.jsonl`, and the table of its epochs made from them, `epochs.csv`; see docs/logs.md."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from engine.checkpoints.progress import Progress
from engine.runtime.errors import UserError
from engine.runtime.files import to_csv
from engine.runtime.reading import open_regular, parse_json
from engine.runtime.terminal import warn_once
from engine.runtime.text import one_line

CONFIG, METRICS, EPOCHS = "config.yaml", "metrics.jsonl", "epochs.csv"
"""Files of a run directory."""

TOTALS = ("time", "elapsed_seconds", "gpu_hours", "images_seen")
"""Fields of every record: totals of the run until then."""

MAX_METRICS = 2**28
"""Bytes of the records that are read into memory; a run of 300 epochs makes some megabytes."""

MAX_LINE = 2**20
"""Bytes of a record."""

FREE: dict[str, tuple] = {"start": (), "change": ("option", "before", "now"), "stop": (), "fail": ("reason",)}
"""Kinds of records with fields of any type -> fields that they have. The other kinds hold numbers."""

NUMBERS = {"epoch", "step", "elapsed_seconds", "gpu_hours", "images_seen", "epochs", "total_steps"}
"""Fields that are numbers in every kind of record, and not null."""

AVERAGES: Mapping[str, int] = {**dict.fromkeys(("loss", "step_seconds", "data_wait"), 1), "images_per_second": -1}
"""Fields of `train` records -> exponent of their mean over an epoch, weighted by updates: 1, the arithmetic one, or -1,
the harmonic one. The last record gives other fields."""


def stream_records(directory: Path, limit: float = math.inf) -> Iterator[dict[str, Any]]:
    """Yields the records of the run in `directory`, oldest first; they need not be trusted.

    A line without a record is left out with a warning; the last line may be cut off, and is then left out without one.

    Raises:
        UserError: they cannot be read, or are larger than `limit` bytes.
    """
    path, first_wrong, num_wrong = directory / METRICS, 0, 0
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise UserError(f"{path}: larger than {limit:,} bytes")
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE), b""), start=1):
                record = _parse_record(line)
                if record is not None:
                    yield record
                elif line.endswith(b"\n") or len(line) == MAX_LINE:
                    first_wrong, num_wrong = first_wrong or number, num_wrong + 1
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if num_wrong:
        others = f" (nor do {num_wrong - 1} others)" if num_wrong > 1 else ""
        warn_once(f"{path}:{first_wrong}: holds no record of a run{others}; left out")


def find_records(directory: Path) -> list[dict[str, Any]]:
    """Returns the records of the run in `directory`; warns and returns none if they cannot be read, or are larger than
    `MAX_METRICS`.
    """
    try:
        return list(stream_records(directory, MAX_METRICS))
    except UserError as error:
        warn_once(str(error))
        return []


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns the record in `line`, of the types that all readers rely on; None if it holds no such record."""
    try:
        record = parse_json(line, METRICS)
    except UserError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    is_free = record["kind"] in FREE
    for name, value in record.items():
        if name in ("kind", "option", "reason", "time"):  # texts in every kind of record
            is_typed = isinstance(value, str)
        elif name in NUMBERS or not is_free:
            is_typed = (type(value) in (int, float) and abs(value) < 1e100) or (value is None and name not in NUMBERS)
        else:
            is_typed = True
        if not is_typed:
            return None
    has_fields = all(name in record for name in FREE.get(record["kind"], ()))
    counts = record.get("epoch"), record.get("step")
    return record if has_fields and all(isinstance(n, int) and 0 <= n < 2**53 for n in counts) else None


def is_until(progress: Progress, record: Mapping[str, Any]) -> bool:
    """Returns whether a run that goes on from `progress` keeps `record`.

    It keeps records that were made no later, evaluations only of finished epochs. It drops the `final` record, and
    changes that are not in the checkpoint: those that were made when a run went on from it.
    """
    if record["kind"] == "change":
        return (record["epoch"], record["step"]) < (progress.epoch, progress.step)
    is_evaluated = record["kind"] != "eval" or record["epoch"] <= progress.epoch
    return record["step"] <= progress.step and is_evaluated and record["kind"] != "final"


def list_changes(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns ``optim.lr 0.001 -> 0.0005 at step 10`` for every option that was changed in the run of `records`."""
    changes = (record for record in records if record["kind"] == "change")
    return [one_line(f"{x['option']} {x['before']} -> {x['now']} at step {x['step']}") for x in changes]


class EpochTable:
    """The rows of `epochs.csv`: a row for each epoch, complete or not, of the `records` until now, in order of epochs.

    A row holds epoch, step and `TOTALS` at its end, then `train_NAME` and `eval_NAME` for every field NAME.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()):
        self.finished = bytearray()  # rows in JSON, a line each: there may be very many epochs
        self.row: dict[str, Any] = {}
        self.sums: dict[str, tuple[int, float]] = {}  # of updates, and of their values
        self.step = 0
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds a record to the row of its epoch."""
        kind = record["kind"]
        if kind not in ("train", "eval"):
            return
        if self.row and record["epoch"] != self.row["epoch"]:
            self.finished += f"{json.dumps(self.row)}\n".encode()
            self.row, self.sums = {}, {}
        row = self.row
        row |= {name: record[name] for name in ("epoch", "step", *TOTALS) if name in record}
        row |= {f"{kind}_{name}": value for name, value in record.items() if name not in ("kind", *row)}
        if kind == "eval":
            return
        updates, self.step = record["step"] - self.step, record["step"]
        for name, exponent in AVERAGES.items():
            number, total = self.sums.get(name, (0, 0.0))
            with suppress(ArithmeticError):  # no value yet; a speed of zero, or no update: records were tampered with
                if (value := record.get(name)) is not None:
                    number, total = self.sums[name] = number + updates, total + updates * float(value) ** exponent
                row[f"train_{name}"] = (total / number) ** exponent

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table."""
        return [*map(json.loads, self.finished.splitlines()), *([self.row] if self.row else [])]


def epochs_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the content of `epochs.csv`: these rows, with empty fields for values that an epoch lacks."""
    names = dict.fromkeys(name for row in rows for name in row)  # evaluations last, even if the first epoch has none
    columns = sorted(names, key=lambda name: name.startswith("train_") + 2 * name.startswith("eval_"))
    return to_csv(columns, ([row.get(name) for name in columns] for row in rows))
