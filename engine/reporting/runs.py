"""Shows all runs below a folder as a table.

    python -m engine.reporting.runs runs/

A run is running (and where), finished, stopped (by a signal; the same command goes on), failed (and why), or
interrupted (it ended without a record). `changed` names options that --allow-change has changed within the run.
"""

import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.checkpoints.progress import default_ranking, is_score, sign_of
from engine.config.yaml_files import read_yaml
from engine.reporting.metrics import CONFIG, find_records, list_changes
from engine.reporting.tables import align
from engine.runtime.arguments import ArgumentParser
from engine.runtime.errors import UserError, refuse_bad_input
from engine.runtime.locks import is_locked, lock_holder
from engine.runtime.text import one_line


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Show runs as a table.\n\n    eav runs runs/")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders of runs")
    args = parser.parse_args(arguments)
    with refuse_bad_input():
        rows = [{"run": str(run), **summarise(run)} for run in find_runs(args.paths)]
        print(align([list(rows[0]), *(list(row.values()) for row in rows)]))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Returns the directories of runs in and below `paths`; a UserError says that a folder or a run is missing."""
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such folder")
    found = {file.parent for path in paths for file in path.rglob("lock") if file.is_file() and file.stat().st_size}
    if not found:
        raise UserError(f"{', '.join(map(str, paths))}: no run in it")
    return sorted(found)


def summarise(run: Path) -> dict[str, str]:
    """Returns the columns of the run in the directory `run`; "" for unknown values."""
    records = find_records(run)
    starts = [number for number, record in enumerate(records) if record["kind"] == "start"]
    launch = records[starts[-1] :] if starts else records
    start, last = (launch[0], launch[-1]) if launch else ({}, {})
    kinds = {record["kind"]: record for record in records}  # the last of each
    trained, evaluated = kinds.get("train", {}), kinds.get("eval", {})
    is_running, (model, mechanisms, best_by) = is_locked(run), _subject(run)
    return {
        "state": f"running: {lock_holder(run)}" if is_running else _end(last),
        "configuration": next(iter(re.findall(r"\S+\.ya?ml", str(start.get("command")))), ""),
        "model": model,
        "attention": mechanisms,
        "epoch": f"{max(trained.get('epoch', 0), evaluated.get('epoch', 0))}/{start.get('epochs', '?')}",
        "best": _best([record for record in records if record["kind"] == "eval"], best_by),
        "images/s": _text(trained.get("images_per_second"), ".0f"),
        "elapsed": _duration(last.get("elapsed_seconds")),
        "GPU-hours": _text(last.get("gpu_hours"), ".2f"),
        "ETA": _duration(_seconds_left(start, last) if is_running else None),
        "changed": "; ".join(list_changes(records)),
    }


def _subject(run: Path) -> tuple[str, str, str]:
    """Returns the names of a run's model and mechanisms, and its best_by; "" where its configuration is not read."""
    try:
        options = read_yaml(run / CONFIG).values
    except UserError:
        return "", "", ""
    model, attention, train = (options.get(name) for name in ("model", "attention", "train"))
    entries = attention if isinstance(attention, list) else [attention]
    names = [str(entry.get("name")) for entry in entries if isinstance(entry, dict)]
    name = str(model.get("name")) if isinstance(model, dict) else ""
    return name, "+".join(dict.fromkeys(names)), str(train.get("best_by") or "") if isinstance(train, dict) else ""


def _best(evaluations: Sequence[dict[str, Any]], best_by: str) -> str:
    """Returns name, value and epoch of the best of the metrics that rank epochs, by either kind of weights."""
    names = {best_by or default_ranking(record) for record in evaluations}
    pairs = ((x, key, sign_of(name)) for x in evaluations for name in names for key in (name, f"ema_{name}"))
    found = [(sign * x[key], -x["epoch"], key) for x, key, sign in pairs if is_score(x.get(key))]
    score, epoch, key = max(found, default=(0, 0, ""))
    return f"{key} {abs(score):.4g} (epoch {-epoch})" if key else ""


def _end(last: dict[str, Any]) -> str:
    """Returns how a launch has ended, from its last record."""
    failed = f"failed: {one_line(str(last.get('reason')), 60)}"
    ends = {"final": "finished", "stop": "stopped", "fail": failed, None: "not begun"}
    return ends.get(last.get("kind"), "interrupted")


def _seconds_left(start: dict[str, Any], last: dict[str, Any]) -> float | None:
    """Estimates the time left from the time per step since the launch, with evaluations; None: not known yet."""
    steps = last.get("step", 0) - start.get("step", 0)
    if steps <= 0 or not {"elapsed_seconds", "total_steps"} <= start.keys() or "elapsed_seconds" not in last:
        return None
    return (last["elapsed_seconds"] - start["elapsed_seconds"]) / steps * (start["total_steps"] - last["step"])


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _duration(seconds: float | None) -> str:
    return "" if seconds is None or not 0 <= seconds < 1e13 else str(timedelta(seconds=round(seconds)))


if __name__ == "__main__":
    main()
