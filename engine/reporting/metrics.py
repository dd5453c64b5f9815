"""Records of a run, `metrics.jsonl`, and the table of its epochs made from them, `epochs.csv`; see docs/logs.md."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import StatisticsError, fmean, harmonic_mean
from typing import Any

from engine.checkpoints.progress import Progress
from engine.runtime.errors import UserError
from engine.runtime.files import to_csv
from engine.runtime.reading import read_bounded
from engine.runtime.terminal import warn_once
from engine.runtime.text import one_line

METRICS, EPOCHS = "metrics.jsonl", "epochs.csv"
"""Files of a run directory."""

TOTALS = ("time", "elapsed_seconds", "gpu_hours", "images_seen")
"""Fields of every record: totals of the run until then."""

MAX_METRICS = 2**28
"""Bytes of the records; a run of 300 epochs makes some megabytes."""

FREE: dict[str, tuple] = {"start": (), "change": ("option", "before", "now"), "stop": (), "fail": ("reason",)}
"""Kinds of records with fields of any type -> fields that they have. The other kinds hold numbers."""

NUMBERS = {"epoch", "step", "elapsed_seconds", "gpu_hours", "images_seen", "epochs", "total_steps"}
"""Fields that are numbers in every kind of record, and not null."""

TEXTS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("kind", "option", "reason"), bool),
    "time": lambda text: _is_time(text),
    "run_id": re.compile("[0-9a-f]{32}").fullmatch,
}
"""Fields that are texts in every kind of record -> function that is true for valid ones."""

AVERAGES: Mapping[str, Callable[..., float]] = {
    **dict.fromkeys(("loss", "step_seconds", "data_wait"), fmean),
    **dict.fromkeys(("images_per_second", "tflops", "mfu"), harmonic_mean),
}
"""Fields of `train` records -> their mean over an epoch, weighted by updates. The last record gives other fields."""


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Returns the records of the run in `directory`, oldest first; they need not be trusted.

    A line without a record is left out with a warning; the last line may be cut off, and is then left out without one.

    Raises:
        UserError: they cannot be read.
    """
    try:
        lines = read_bounded(directory / METRICS, MAX_METRICS).split(b"\n")
    except FileNotFoundError:
        return []
    records = [_parse_record(line) for line in lines]
    if wrong := [number for number, record in enumerate(records[:-1], start=1) if record is None]:
        others = f" (nor do {len(wrong) - 1} others)" if wrong[1:] else ""
        warn_once(f"{directory / METRICS}:{wrong[0]}: holds no record of a run{others}; left out")
    return [record for record in records if record is not None]


def find_records(directory: Path) -> list[dict[str, Any]]:
    """Returns `read_records`; if they cannot be read, warns and returns none."""
    try:
        return read_records(directory)
    except UserError as error:
        warn_once(str(error))
        return []


def first_pass_images(directory: Path) -> int | None:
    """Returns the images of a pass at the first start of the run in `directory`; None if its records do not say."""
    starts = (record for record in find_records(directory) if record["kind"] == "start")
    images = next(starts, {}).get("images_per_pass")
    return images if type(images) is int and images > 0 else None


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns the record in `line`, of the types that all readers rely on; None if it holds no such record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    is_free = record["kind"] in FREE
    for name, value in record.items():
        if name in TEXTS:
            is_typed = isinstance(value, str) and TEXTS[name](value)
        elif name in NUMBERS or not is_free:
            is_typed = (type(value) in (int, float) and abs(value) < 1e100) or (value is None and name not in NUMBERS)
        else:
            is_typed = True
        if not is_typed:
            return None
    has_fields = all(name in record for name in FREE.get(record["kind"], ()))
    counts = record.get("epoch"), record.get("step")
    return record if has_fields and all(isinstance(n, int) and 0 <= n < 2**53 for n in counts) else None


def _is_time(text: str) -> bool:
    with suppress(ValueError):
        return datetime.fromisoformat(f"{text}+00:00").year > 1970
    return False


def is_until(progress: Progress, record: Mapping[str, Any]) -> bool:
    """Returns whether a run that goes on from `progress` keeps `record`.

    It keeps records that were made no later, evaluations only of finished epochs. It drops the `final` record, the skip
    of the update after the checkpoint, and changes that are not in the checkpoint: those that were made when a run went
    on from it.
    """
    if record["kind"] == "skip":
        return record["step"] < progress.step  # its step is the number of updates before it
    if record["kind"] == "change":
        return (record["epoch"], record["step"]) < (progress.epoch, progress.step)
    is_evaluated = record["kind"] != "eval" or record["epoch"] <= progress.epoch
    return record["step"] <= progress.step and is_evaluated and record["kind"] != "final"


def describe_change(record: Mapping[str, Any]) -> str:
    """Returns the text of a `change` record: ``optim.lr 0.001 -> 0.0005``."""
    return one_line(f"{record['option']} {record['before']} -> {record['now']}")


def list_changes(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a text for every option that was changed in the run of `records`."""
    changes = (record for record in records if record["kind"] == "change")
    return [f"{describe_change(record)} at step {record['step']}" for record in changes]


def tabulate_epochs(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each epoch in `records`, complete or not.

    A row holds epoch, step and `TOTALS` at its end, then `train_NAME` and `eval_NAME` for every field NAME.
    """
    rows: dict[int, dict[str, Any]] = {}
    trained: dict[int, list[tuple[Mapping[str, Any], int]]] = {}
    step = 0
    for record in records:
        kind, epoch = record["kind"], record["epoch"]
        if kind not in ("train", "eval"):
            continue
        row = rows.setdefault(epoch, {})
        row |= {name: record[name] for name in ("epoch", "step", *TOTALS) if name in record}
        row |= {f"{kind}_{name}": value for name, value in record.items() if name not in ("kind", *row)}
        if kind == "train":
            trained.setdefault(epoch, []).append((record, record["step"] - step))
            step = record["step"]
    for epoch, found in trained.items():
        for name, average in AVERAGES.items():
            known = [(record[name], updates) for record, updates in found if record.get(name) is not None]
            if known:
                values, weights = zip(*known, strict=True)
                with suppress(StatisticsError):  # updates that were not made: the records were tampered with
                    rows[epoch][f"train_{name}"] = average(values, weights=weights)
    return list(rows.values())


def epochs_csv(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Returns the content of `epochs.csv`: `tabulate_epochs`, with empty fields for values that an epoch lacks."""
    rows = tabulate_epochs(records)
    columns = sorted(dict.fromkeys(name for row in rows for name in row), key=_section)
    return to_csv(columns, ([row.get(name) for name in columns] for row in rows))


def _section(column: str) -> int:
    """Returns a sort key that puts evaluations last, even if the first epoch has none."""
    return column.startswith("train_") + 2 * column.startswith("eval_")
