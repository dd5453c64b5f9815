"""The ablation file: its options, the rows that it lists, and the runs of each."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ablation.match import Match
from ablation.runs import expand, to_text
from attention.options import OptionError, option, parse_options
from attention.plugins import load_plugin
from engine.config.yaml_files import Tree

OF_ROWS = {"paper", "match"}
"""Keys of an item of `runs` that are no options of train.py."""


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
    match: Match | None = option(
        None, "token_macs: multiply-accumulates of a token in attention for which the size of every mechanism is solved"
    )
    labels: dict[str, str] | None = option(
        None, "word in the short names of rows -> its text in figures, LaTeX and notes: {E: '|E|'}"
    )
    plugins: tuple[str, ...] = option((), "modules or .py files that register mechanisms of your own, see --plugin")


class Row(NamedTuple):
    """A row of a sweep before it is checked.

    Attributes:
        key: key of the ablation file that gives it, for messages. base: path of its configuration. options: option ->
            value, with the keys in `OF_ROWS`.
    """

    key: str
    base: Path
    options: Mapping[str, Any]

    @property
    def overrides(self) -> list[str]:
        """Overrides of train.py."""
        given = {key: to_text(value) for key, value in self.options.items() if key not in OF_ROWS}
        return [f"{key}={text}" for keys, text in given.items() for key in expand(keys)]


def parse_ablation(tree: Tree) -> Ablation:
    """Returns the options of an ablation file, and imports its plugins; an OptionError refuses one of them."""
    ablation = parse_options(Ablation, tree.values)
    for plugin in ablation.plugins:
        load_plugin(plugin, "plugins")
    if not ablation.base and not ablation.bases:
        raise OptionError("base", "required, but not given; or give bases")
    if ablation.base and ablation.bases:
        raise OptionError("bases", "given beside base; leave one of them out")
    if not ablation.grid and not ablation.runs and not ablation.bases:
        raise OptionError("runs", "no runs; give grid or runs")
    for key, values in (ablation.grid or {}).items():
        if not isinstance(values, list) or not values:
            raise OptionError(f"grid.{key}", f"expected a list of values, got {values!r}")
    return ablation


def list_rows(ablation: Ablation, folder: Path) -> list[Row]:
    """Returns the rows for each base: all combinations of `grid`, then `runs`; without both, the base as it is."""
    grid = ablation.grid or {}
    changes = [("grid", dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values()) if values]
    changes += [(f"runs.{i}", options) for i, options in enumerate(ablation.runs)]
    bases = [folder / base for base in ablation.bases or [ablation.base or ""]]
    for i, base in enumerate(bases):
        if not base.is_file():
            raise OptionError(
                f"bases.{i}" if ablation.bases else "base",
                f"{base}: {'a directory' if base.is_dir() else 'no such file'}",
            )
    if not changes:
        return [Row(f"bases.{i}", base, {}) for i, base in enumerate(bases)]
    return [Row(key, base, options) for base, (key, options) in itertools.product(bases, changes)]


def list_replicates(ablation: Ablation) -> list[dict[str, int]]:
    """Returns option key.path -> value of each run of every setting, by `seeds` or `folds`; without both, of one run.

    Runs differ in the last option.

    Raises:
        OptionError: both are given; there is no seed, one below 0, or a duplicate.
    """
    seeds, folds = ablation.seeds, ablation.folds
    if folds is not None and seeds is not None:
        raise OptionError("folds", f" = {folds} is given beside seeds; leave one of them out")
    if folds is not None:
        return [{"data.folds": folds, "data.fold": fold} for fold in range(folds)]
    values = range(min(seeds, 1001)) if isinstance(seeds, int) else seeds or ()
    if len(values) > 1000:
        raise OptionError("seeds", f" = {seeds}: a sweep has at most 1000")
    if seeds is not None and (not values or min(values) < 0 or len(set(values)) < len(values)):
        raise OptionError("seeds", f"expected a number of seeds, or a list of different ones from 0, got {seeds!r}")
    return [{"train.seed": seed} for seed in values] or [{}]
