"""Ablation files: settings, each trained once for every seed, all checked before the first run starts."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation.match import OutOfReach
from ablation.names import to_overrides
from ablation.planner import PaperRows, Planner, Row, list_bases
from ablation.schema import LIMIT, Ablation
from ablation.selection import put_first
from ablation.settings import Setting
from attention.options import OptionError, nearest, parse_options
from attention.plugins import load_plugin
from engine.config.papers import read_papers
from engine.config.schema import Run
from engine.config.yaml_files import SWEEP, Tree, read_yaml
from engine.runtime.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"


def read_ablation(
    path: Path, overrides: Sequence[str], output: Path, launcher: Sequence[str]
) -> tuple[Ablation, list[Setting], list[str]]:
    """Reads the ablation file `path` and checks all its settings; writes nothing.

    Returns:
        The file, its settings, and a line for each setting that is left out, as its cost cannot be that of `match`.
    Raises:
        ConfigError: the file, or a run, holds something that cannot be honoured.
    """
    tree = read_yaml(path)
    sections = {field.name for field in dataclasses.fields(Run)}
    if tree.values.keys() & sections and not tree.values.keys() & SWEEP:
        raise ConfigError(f"{path}: the configuration of one run; give it to train.py, or name it as base of a sweep")
    with tree.locating():
        ablation = parse_ablation(tree)
        paper_rows = find_paper_rows(ablation.paper)
        planner = Planner(ablation, path.parent, overrides, output, launcher, paper_rows)
        rows = list_rows(ablation, path.parent)

    settings: dict[str, Setting] = {}
    left_out = []
    for row in rows:
        try:
            name, setting = planner.plan(row)
            if name in settings:
                raise ConfigError(f"a second run with {name}")
            settings[name] = setting
        except OutOfReach as error:
            left_out.append(f"{planner.name(row)}: {error}")
        except ConfigError as error:
            raise ConfigError(f"{tree.origin(row.key)}: {row.key}: {error}") from None
    check_effect(overrides, rows, path)
    if not settings:
        raise ConfigError(f"{tree.origin('match')}: match: no setting can be trained; the last: {left_out[-1]}")
    with tree.locating():
        ordered = put_first([*settings.values()], ablation.baseline) if ablation.baseline else [*settings.values()]
    return ablation, ordered, left_out


def check_effect(overrides: Sequence[str], rows: Sequence[Row], path: Path) -> None:
    """Raises a ConfigError if every row of the ablation file `path` sets what one of the `overrides` sets, or a whole
    of which that is a part: the override would change nothing.
    """
    keys = [{text.partition("=")[0] for text in to_overrides(row.options)} for row in rows]
    for text in overrides:
        parts = text.partition("=")[0].split(".")
        wholes = {".".join(parts[: depth + 1]) for depth in range(len(parts))}
        if all(wholes & of_row for of_row in keys):
            by = min(wholes & keys[0], key=len)
            raise ConfigError(f"override {text!r}: every run of {path} sets {by} itself; change it there")


def parse_ablation(tree: Tree) -> Ablation:
    """Returns the options of an ablation file, and imports its plugins.

    Raises:
        OptionError: an option that cannot be honoured, or contradicts another.
    """
    ablation = parse_options(Ablation, tree.values)
    for plugin in ablation.plugins:
        load_plugin(plugin, "plugins")
    if not list_bases(ablation):
        raise OptionError("base", "required, but not given; or give bases")
    if ablation.base and ablation.bases:
        raise OptionError("bases", "given beside base; leave one of them out")
    if not ablation.grid and not ablation.runs and not ablation.bases:
        raise OptionError("runs", "no runs; give grid or runs")
    return ablation


def list_rows(ablation: Ablation, folder: Path) -> list[Row]:
    """Returns the rows for each base: those of `grid`, then those of `runs`; without both, the base as it is.

    Raises:
        OptionError: see `combine`.
    """
    changes = [("grid", options) for options in combine(ablation.grid or {})]
    changes += [(f"runs.{i}", options) for i, options in enumerate(ablation.runs)]
    bases = [folder / base for base in list_bases(ablation)]
    if not changes:
        return [Row(f"bases.{i}", base, {}) for i, base in enumerate(bases)]
    return [Row(key, base, options) for base, (key, options) in itertools.product(bases, changes)]


def combine(grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the settings of `grid`: all combinations of its values.

    Raises:
        OptionError: a value of `grid` is no list; there are more than `LIMIT` settings.
    """
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise OptionError(f"grid.{key}", f"expected a list of values, got {values!r}")
    if (count := math.prod(map(len, grid.values()))) > LIMIT:
        raise OptionError("grid", f"{count:,} combinations, more than {LIMIT:,}; list rows in runs instead")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()) if values]


def find_paper_rows(source: str | None) -> PaperRows:
    """Returns configuration and overrides -> row of the paper's table `source`; empty for null.

    Raises:
        OptionError: engine/config/papers.yaml has no such source.
    """
    rows = read_papers() if source else ()
    found = {((CONFIGS / row.config).resolve(), row.overrides): row for row in rows if row.source == source}
    if source and not found:
        meant = nearest(source, {row.source for row in rows})
        raise OptionError("paper", f"{source!r} is no source in engine/config/papers.yaml{meant}")
    return found
