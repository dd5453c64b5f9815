"""The sweep of an output directory: its file is stored there, and only a file with all of its runs may replace it."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation.schema import Ablation, list_seeds, to_text
from attention.options import OptionError, parse_options
from engine.config.yaml_files import read_yaml
from engine.runtime.errors import ConfigError
from engine.runtime.files import write_file
from engine.runtime.locks import hold_lock
from engine.runtime.reading import read_bounded
from engine.runtime.text import one_line

SWEEP_FILE = "sweep.yaml"
"""File of an output directory: the ablation file, with the command above it."""

FREE = {"caption", "paper", "baseline", "plugins"}
"""Options that do not affect runs, or only together with another option."""

MOST_SHOWN = 60
"""Longest text of a value in a message."""


def check_sweep(path: Path, output: Path) -> None:
    """Refuses the ablation file `path` unless every run of the sweep in `output` is one of its runs, too.

    Raises:
        ConfigError: the first difference that is no addition.
    """
    stored = output / SWEEP_FILE
    if not stored.exists():
        return
    try:
        before, now = map(read_sweep, (stored, path))
    except (OptionError, ConfigError) as error:
        raise ConfigError(f"{stored}: cannot be compared with {path}: {error}; move it away to go on") from None
    if differences := list_differences(before, now):
        remedies = f"another --output, --only to leave rows out, or delete {stored} to keep its runs"
        problem = f"{output}: holds another sweep; values and runs may be added, but {'; '.join(differences)}"
        raise ConfigError(f"{problem}; give {remedies}")


def is_extended(ablation: Ablation, output: Path) -> bool:
    """Returns whether the sweep in `output` has runs that `ablation` has not.

    One that cannot be read counts as such: another version has stored it.
    """
    stored = output / SWEEP_FILE
    try:
        return stored.exists() and bool(list_differences(read_sweep(stored), ablation))
    except (OptionError, ConfigError):
        return True


def read_sweep(path: Path) -> Ablation:
    """Returns the options of the ablation file `path`; its rows are not checked."""
    return parse_options(Ablation, read_yaml(path).values)


def list_differences(before: Ablation, now: Ablation) -> list[str]:
    """Returns a text for every difference of two sweeps by which a run of `before` is no run of `now`."""
    found = {}
    for field in dataclasses.fields(Ablation):
        name = field.name
        pair = old, new = getattr(before, name), getattr(now, name)
        if name in FREE or old == new:
            continue
        if name == "seeds":
            old, new = [*list_seeds(old)], [*list_seeds(new)]
        if name == "grid" and old:
            found |= compare_grids(old, new or {})
        elif name == "runs":
            old, new = ([{k: v for k, v in run.items() if k != "paper"} for run in runs] for runs in pair)
            found |= {f"runs.{i}": (run, None) for i, run in enumerate(old) if run not in new}
        elif name in ("bases", "seeds") and bool(old) == bool(new):
            if lost := [value for value in old if value not in new]:
                found[name] = lost, None
        elif name != "grid":
            found[name] = pair
    if before.bases and not before.grid and not before.runs and (now.grid or now.runs):
        found["bases"] = "as they are", "changed by all settings"
    return [f"{name}: {describe(*pair)}" for name, pair in found.items()]


def compare_grids(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns option -> the lost values, and the values in their place (None: no others)."""
    found: dict[str, tuple[Any, Any]] = {}
    for option in {**old, **new}:
        if option not in old or option not in new:
            found[f"grid.{option}"] = old.get(option), new.get(option)
        elif lost := [value for value in old[option] if value not in new[option]]:
            found[f"grid.{option}"] = lost, None
    return found


def describe(old: Any, new: Any) -> str:
    """Returns the text of a difference: a value that was removed, one that was added, or both."""
    pair = ([*value] if isinstance(value, tuple) else value for value in (old, new))
    old, new = ("" if value is None else one_line(to_text(value), MOST_SHOWN) for value in pair)
    if not new:
        return f"{old} was removed"
    return f"{old} -> {new}" if old else f"{new} was not set before, and would change all runs"


def store_sweep(path: Path, overrides: Sequence[str], output: Path) -> None:
    """Writes the ablation file `path` into `output`, with the command in its first line."""
    command = shlex.join(["python", "ablate.py", str(path), *overrides, "--output", str(output)])
    with hold_lock(output / "lock", wait=True):
        write_file(output / SWEEP_FILE, f"# {one_line(command)}\n".encode() + read_bounded(path, 2**20))
