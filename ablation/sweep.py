"""Ablation files: settings, each trained once for every seed, all checked before the first run starts."""

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ablation.cases import Case
from ablation.match import Matched, OutOfReach, parse_match, solve
from ablation.schema import LIMIT, OF_ROWS, Ablation, list_replicates, to_overrides, to_text
from ablation.settings import Setting
from attention.options import OptionError, nearest, parse_options, to_yaml
from attention.plugins import as_arguments, load_plugin
from engine.config.papers import PaperRow, read_papers
from engine.config.schema import Run
from engine.config.yaml_files import SWEEP, Tree, read_yaml
from engine.run.checks import check_run
from engine.run.load import is_overridden, load_run, load_unbuilt
from engine.runtime.errors import ConfigError, as_config_error

TRAIN = str(Path(__file__).parents[1] / "train.py")

CONFIGS = Path(__file__).parents[1] / "configs"

MAX_BYTES = 255
"""Longest name of a directory in nearly every file system, in bytes."""

PAPER_FIELDS = "top1", "parameters", "macs", "step_ms", "memory_gb"
"""Fields of a `PaperRow` that a row of a sweep may give itself."""


class Row(NamedTuple):
    """A row of a sweep before it is checked.

    Attributes:
        key: key of the ablation file that gives it, for messages. base: path of its configuration. options: option ->
            value, with the keys in `OF_ROWS`.
    """

    key: str
    base: Path
    options: Mapping[str, Any]


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
        planner = Planner(ablation, overrides, output, launcher)
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
    return ablation, [*settings.values()], left_out


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


def list_bases(ablation: Ablation) -> tuple[str, ...]:
    """Returns the configurations that the settings change."""
    return (ablation.base,) if ablation.base else ablation.bases


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


def check_effect(overrides: Sequence[str], rows: Sequence[Row], path: Path) -> None:
    """Raises a ConfigError for one of the `overrides` that changes nothing.

    Every row of the ablation file `path` sets the same option itself, or an option that contains it.
    """
    keys = [{text.partition("=")[0] for text in to_overrides(row.options)} for row in rows]
    for text in overrides:
        parts = text.partition("=")[0].split(".")
        wholes = {".".join(parts[: depth + 1]) for depth in range(len(parts))}
        if all(wholes & of_row for of_row in keys):
            by = min(wholes & keys[0], key=len)
            raise ConfigError(f"override {text!r}: every run of {path} sets {by} itself; change it there")


def find_paper_rows(source: str | None) -> dict[tuple[Path, tuple[str, ...]], PaperRow]:
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


class Planner:
    """Makes settings of the rows of `ablation`.

    Args:
        overrides: options of every run. output: directory of the runs. launcher: command that starts train.py.
    Attributes:
        paper_rows: rows of the paper's table. match: target of the sizes that are solved, or None. replicates: runs of
            every setting. world_size: ranks of each.
    Raises:
        OptionError: a paper, match, seeds or folds that cannot be.
    """

    def __init__(self, ablation: Ablation, overrides: Sequence[str], output: Path, launcher: Sequence[str]):
        self.ablation, self.overrides, self.output, self.launcher = ablation, (*overrides,), output, launcher
        self.paper_rows = find_paper_rows(ablation.paper)
        self.match = None if ablation.match is None else parse_match(ablation.match)
        self.replicates = list_replicates(ablation)
        self.world_size = count_ranks(launcher)

    def plan(self, row: Row) -> tuple[str, Setting]:
        """Returns the name of a row's setting in the file system, and the setting.

        Raises:
            OutOfReach: its mechanism has no size with the cost of `match`. ConfigError: it cannot be trained.
        """
        matched, run = self._load(row)
        size, given = [matched.override] if matched else [], to_overrides(row.options)
        name = self.name(row, size)
        self._check_replicates(run, given)
        command = [*self.launcher, TRAIN, str(row.base), *self.overrides, *given, *size]
        cases = tuple(self._create_case(run, command, name, values) for values in self.replicates)
        changes = {option: to_text(value) for option, value in row.options.items() if option not in OF_ROWS}
        if self.ablation.bases:
            changes = {"base": title(row.base)} | changes
        return name, Setting(changes, self._paper(row), cases, matched, ["train.seed", *self.replicates[0]][-1])

    def _check_replicates(self, run: Run, given: Sequence[str]) -> None:
        """Refuses overrides of the option in which the runs of a setting differ, and impossible folds.

        Raises:
            ConfigError: the first problem.
        """
        for key in self.replicates[0]:
            if is_overridden(key, [*self.overrides, *given]):
                by = "folds" if self.ablation.folds else "seeds"
                raise ConfigError(f"{key} is given beside {by}; leave one of them out")
        if not self.ablation.folds:
            return
        if held_out_by := run.data.held_out_by:
            raise ConfigError(f"{held_out_by}: folds already holds images out; set it to null in base")
        with as_config_error("folds: "):
            check_run(with_values(run, self.replicates[0]), self.world_size)

    def name(self, row: Row, size: Sequence[str] = ()) -> str:
        """Returns the name of a row in the file system, with the override `size` that `match` adds."""
        titles = [title(row.base)] if self.ablation.bases else []
        return to_name([*titles, *to_overrides(row.options), *size]) or "base"

    def _load(self, row: Row) -> tuple[Matched | None, Run]:
        """Returns the size that is solved for the row, None if there is none, and its run."""
        given, match = [*self.overrides, *to_overrides(row.options)], row.options.get("match", True)
        if "match" in row.options and (match is not False or not self.match):
            problem = "acts in a sweep with match only" if match is False else "expected false, or no match"
            raise ConfigError(f"match: {problem}, got {match!r}; leave it out")
        matched = None
        if match and self.match:
            run = load_unbuilt(row.base, given)
            with as_config_error():
                matched = solve(self.match, run)
            if is_overridden(key := f"attention.{matched.option}", given):
                raise ConfigError(f"{key} is given, and match solves it; leave it out, or write match: false beside it")
            given.append(matched.override)
        return matched, load_run(row.base, given, world_size=self.world_size)

    def _paper(self, row: Row) -> PaperRow | None:
        """Returns the paper's figures that the row gives itself, or else the figures for its configuration."""
        given = row.options.get("paper")
        if isinstance(given, float | int):
            given = {"top1": given}
        if given is None:
            return self.paper_rows.get((row.base.resolve(), tuple(to_overrides(row.options))))
        if not isinstance(given, Mapping):
            raise ConfigError(f"paper: expected a number, or a mapping of {', '.join(PAPER_FIELDS)}, got {given!r}")
        if unknown := sorted(set(given) - set(PAPER_FIELDS)):
            raise ConfigError(f"paper.{unknown[0]}: unknown figure{nearest(unknown[0], PAPER_FIELDS)}")
        with as_config_error():
            return parse_options(PaperRow, {"config": str(row.base), **given}, "paper")

    def _create_case(self, run: Run, command: Sequence[str], name: str, values: Mapping[str, int]) -> Case:
        """Returns the run of a setting with these values, option key.path -> value, and adds them to its `command`."""
        texts = [f"{key}={to_yaml(value)}" for key, value in values.items()]
        directory = self.output / to_directory(name, texts)
        run = with_values(run, values)
        return Case(run, directory, [*command, *texts, "--output", str(directory), *as_arguments()])


def title(base: Path) -> str:
    """Returns the name of a configuration with its folder: "deit_tiny_p8/eva"."""
    return "/".join(base.with_suffix("").parts[-2:])


def with_values(run: Run, values: Mapping[str, int]) -> Run:
    """Returns `run` with these values, "section.option" -> value."""
    for key, value in values.items():
        section, name = key.split(".")
        run = dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **{name: value})})
    return run


def to_name(texts: Sequence[str]) -> str:
    """Returns the name of a directory for the overrides `texts`."""
    return re.sub(r"[^\w.=,]+", "-", re.sub(r"[{}\s]", "", ",".join(texts)).replace(":", "="))


def to_directory(name: str, values: Sequence[str]) -> str:
    """Returns the name of the directory of a run: the setting's `name`, and the overrides that its `values` are.

    In a name beyond the `MAX_BYTES` that file systems allow, a hash takes the place of what does not fit.
    """
    whole = ",".join([name, *values])
    if len(whole.encode()) <= MAX_BYTES:
        return whole
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    end = ",".join([f"-{digest}", *values])
    return name.encode()[: MAX_BYTES - len(end)].decode(errors="ignore") + end


def count_ranks(launcher: Sequence[str]) -> int:
    """Returns how many ranks the command `launcher` starts, by torchrun's options; 1 where they are no numbers."""
    text = " ".join(launcher).replace("_", "-")
    found = (re.findall(rf"--{option}[= ](\d+)(?!\S)", text) for option in ("nnodes", "nproc-per-node"))
    return math.prod(int(numbers[-1]) for numbers in found if numbers)
