"""Records of a run, `metrics.jsonl`, and the table of its epochs made from them, `epochs.csv`; see docs/logs.md."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

from engine.checkpoints.progress import Progress
from engine.runtime.files import to_csv

METRICS, EPOCHS = "metrics.jsonl", "epochs.csv"
"""Files of a run directory."""

TOTALS = ("time", "elapsed_seconds", "gpu_hours", "images_seen")
"""Fields of every record: totals of the run until then."""

AVERAGES: Mapping[str, Callable[..., float]] = {
    "loss": fmean,
    "images_per_second": harmonic_mean,
    "step_seconds": fmean,
    "data_wait": fmean,
}
"""Fields of `train` records -> their mean over an epoch, weighted by updates. The last record gives other fields."""


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Returns the records of the run in `directory`, oldest first; skips lines that are cut off."""
    records = []
    with suppress(FileNotFoundError):
        for line in (directory / METRICS).read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the process was killed while it wrote
                records.append(json.loads(line))
    return records


def is_until(progress: Progress, record: Mapping[str, Any]) -> bool:
    """Returns whether a run that goes on from `progress` keeps `record`.

    It keeps records that were made no later, evaluations only of finished epochs. It drops the `final` record, and
    changes that are not in the checkpoint: those that were made when a run went on from it.
    """
    if record["kind"] == "change":
        return (record["epoch"], record["step"]) < (progress.epoch, progress.step)
    is_evaluated = record["kind"] != "eval" or record["epoch"] <= progress.epoch
    return record["step"] <= progress.step and is_evaluated and record["kind"] != "final"


def describe_change(record: Mapping[str, Any]) -> str:
    """Returns the text of a `change` record: ``optim.lr 0.001 -> 0.0005``."""
    return f"{record['option']} {record['before']} -> {record['now']}"


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
