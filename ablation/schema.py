"""Options of an ablation file, and how its keys name options of train.py."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attention.options import OptionError, option
from engine.config.yaml_files import dump_yaml
from engine.runtime.errors import as_config_error
from models.assignment import numbers_of

LIMIT = 10_000
"""Largest number of settings of a grid, and of seeds of a setting."""

OF_ROWS = {"paper", "match"}
"""Keys of an item of `runs` that are no options of train.py."""

MOST_ENTRIES = 1000
"""Numbers of list entries in a key are below this."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Ablation file: for each base, the settings of `grid`, then of `runs`. Paths of bases are relative to the file."""

    base: str | None = option(None, "configuration that the settings change")
    bases: tuple[str, ...] = option(
        (), "instead of base: several configurations, each a row or changed by all settings"
    )
    caption: str = option("", "title of the table")
    paper: str | None = option(None, "a source in engine/config/papers.yaml, whose figures are shown beside ours")
    seeds: int | tuple[int, ...] | None = option(
        None, "train.seed of the runs of every setting: a list, or 3 for [0, 1, 2]; null: one run, of base's seed"
    )
    folds: int | None = option(
        None,
        "data.folds of every setting, in place of seeds: a run for each data.fold, which validates on that part of the"
        " training images",
        low=2,
        high=1000,
    )
    grid: dict[str, Any] | None = option(None, "option key.path -> list of values; one setting per combination")
    runs: tuple[dict[str, Any], ...] = option(
        (),
        "options key.path -> value of each setting; paper: its top-1 in a paper, or {top1: , step_ms: , memory_gb: };"
        " match: false keeps the size that it has",
    )
    match: dict[str, Any] | None = option(
        None,
        "token_macs: multiply-accumulates of a token in attention for which the size of every mechanism is solved",
    )
    plugins: tuple[str, ...] = option((), "modules or .py files that register mechanisms of your own, see --plugin")


def list_replicates(ablation: Ablation) -> list[dict[str, int]]:
    """Returns option key.path -> value of each run of every setting, by `seeds` or `folds`; without both, of one run.

    Runs differ in the last option.

    Raises:
        OptionError: both are given, or see `list_seeds`.
    """
    if ablation.folds is None:
        return [{"train.seed": seed} for seed in list_seeds(ablation.seeds)] or [{}]
    if ablation.seeds is not None:
        raise OptionError("folds", f" = {ablation.folds} is given beside seeds; leave one of them out")
    return [{"data.folds": ablation.folds, "data.fold": fold} for fold in range(ablation.folds)]


def list_seeds(seeds: int | tuple[int, ...] | None) -> Sequence[int]:
    """Returns the values of train.seed for the option `seeds`; empty for null.

    Raises:
        OptionError: there is no seed, one below 0, a duplicate, or more than `LIMIT`.
    """
    if isinstance(seeds, int) and seeds > LIMIT:
        raise OptionError("seeds", f"{seeds:,} seeds, more than {LIMIT:,}; a list names single ones")
    values = range(seeds) if isinstance(seeds, int) else seeds or ()
    if seeds is not None and (not values or min(values) < 0 or len(set(values)) < len(values)):
        raise OptionError("seeds", f"expected a number of seeds, or a list of different ones from 0, got {seeds!r}")
    return values


def to_overrides(options: Mapping[str, Any]) -> list[str]:
    """Returns the overrides of train.py for a setting.

    Raises:
        ConfigError: see `expand`.
    """
    given = {option: to_text(value) for option, value in options.items() if option not in OF_ROWS}
    return [f"{key}={text}" for option, text in given.items() for key in expand(option)]


def expand(option: str) -> list[str]:
    """Returns the options that one key of a sweep sets: ``attention.0-2.window_size`` is that of three entries.

    Raises:
        ConfigError: numbers of entries that fall, or come twice.
    """
    keys = [""]
    for part in option.split("."):
        parts = [part]
        if re.fullmatch(r"[0-9 ]+([-,][0-9 ]+)+", part):
            with as_config_error():
                parts = [str(number) for number in numbers_of(part, MOST_ENTRIES, option)]
        keys = [f"{key}.{each}" if key else each for key in keys for each in parts]
    return keys


def to_text(value: Any) -> str:
    """Formats `value` as YAML on one line."""
    text = dump_yaml(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()
