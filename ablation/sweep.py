"""Ablation files: settings, each trained once for every seed, all checked before the first run starts."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ablation.match import Matched, OutOfReach, solve
from ablation.names import check_labels
from ablation.runs import Case, Setting, to_text
from ablation.schema import OF_ROWS, Ablation, Row, list_replicates, list_rows, parse_ablation
from attention.options import OptionError, nearest, parse_options, refuse, to_yaml
from attention.plugins import as_arguments
from engine.config.papers import PaperRow, read_papers
from engine.config.schema import Run
from engine.config.yaml_files import SWEEP, read_yaml
from engine.run.checks import list_checks
from engine.run.load import is_overridden, load_run, load_unbuilt
from engine.runtime.errors import ConfigError, as_config_error

ROOT = Path(__file__).parents[1]

MAX_BYTES = 255
"""Longest name of a directory in nearly every file system, in bytes."""


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
    with tree.locating():
        check_labels([*settings.values()], left_out)
    return ablation, [*settings.values()], left_out


def check_effect(overrides: Sequence[str], rows: Sequence[Row], path: Path) -> None:
    """Raises a ConfigError for one of the `overrides` that changes nothing.

    Every row of the ablation file `path` sets the same option itself, or an option that contains it.
    """
    keys = [{text.partition("=")[0] for text in row.overrides} for row in rows]
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
    found = {((ROOT / "configs" / row.config).resolve(), row.overrides): row for row in rows if row.source == source}
    if source and not found:
        meant = nearest(source, {row.source for row in rows})
        raise OptionError("paper", f"{source!r} is no source in engine/config/papers.yaml{meant}")
    return found


class Planner:
    """Makes settings of the rows of `ablation`.

    Args:
        overrides: options of every run. output: directory of the runs. launcher: command that starts train.py.
    Raises:
        OptionError: a paper, seeds or folds that cannot be.
    """

    def __init__(self, ablation: Ablation, overrides: Sequence[str], output: Path, launcher: Sequence[str]):
        self.ablation, self.overrides, self.output, self.launcher = ablation, (*overrides,), output, launcher
        self.paper_rows = find_paper_rows(ablation.paper)
        self.replicates = list_replicates(ablation)
        self.world_size = count_ranks(launcher)

    def plan(self, row: Row) -> tuple[str, Setting]:
        """Returns the name of a row's setting in the file system, and the setting.

        Raises:
            OutOfReach: its mechanism has no size with the cost of `match`. ConfigError: it cannot be trained.
        """
        matched, run = self._load(row)
        size, first, folds = [matched.override] if matched else [], self.replicates[0], self.ablation.folds
        for key in first:
            if is_overridden(key, [*self.overrides, *row.overrides]):
                raise ConfigError(f"{key} is given beside {'folds' if folds else 'seeds'}; leave one of them out")
        if folds and (held_out_by := run.data.held_out_by):
            raise ConfigError(f"{held_out_by}: folds already holds images out; set it to null in base")
        if folds:
            with as_config_error(lambda key: "folds: "):
                run = with_values(run, first)
                refuse([problem for check in list_checks(self.world_size) for problem in check(run) or ()])
        name = self.name(row, size)
        command = [*self.launcher, str(ROOT / "train.py"), str(row.base), *self.overrides, *row.overrides, *size]
        cases = []
        for values in self.replicates:
            texts = [f"{key}={to_yaml(value)}" for key, value in values.items()]
            directory = self.output / to_directory(name, texts)
            own = [*command, *texts, "--output", str(directory), *as_arguments()]
            cases.append(Case(with_values(run, values), directory, own))
        changes = {option: to_text(value) for option, value in row.options.items() if option not in OF_ROWS}
        if self.ablation.bases:
            changes = {"base": title(row.base)} | changes
        labels, varied = self.ablation.labels or {}, ["train.seed", *first][-1]
        return name, Setting(changes, self._paper(row), tuple(cases), matched, varied, labels)

    def name(self, row: Row, size: Sequence[str] = ()) -> str:
        """Returns the name of a row in the file system, with the override `size` that `match` adds."""
        texts = ",".join([*([title(row.base)] if self.ablation.bases else []), *row.overrides, *size])
        return re.sub(r"[^\w.=,]+", "-", re.sub(r"[{}\s]", "", texts).replace(":", "=")) or "base"

    def _load(self, row: Row) -> tuple[Matched | None, Run]:
        """Returns the size that is solved for the row, None if there is none, and its run."""
        given, match = [*self.overrides, *row.overrides], row.options.get("match", True)
        if "match" in row.options and (match is not False or not self.ablation.match):
            problem = "acts in a sweep with match only" if match is False else "expected false, or no match"
            raise ConfigError(f"match: {problem}, got {match!r}; leave it out")
        matched = None
        if match and self.ablation.match:
            run = load_unbuilt(row.base, given)
            with as_config_error():
                matched = solve(self.ablation.match.token_macs, run)
            if is_overridden(key := f"attention.{matched.option}", given):
                raise ConfigError(f"{key} is given, and match solves it; leave it out, or write match: false beside it")
            given.append(matched.override)
        return matched, load_run(row.base, given, world_size=self.world_size)

    def _paper(self, row: Row) -> PaperRow | None:
        """Returns the paper's figures that the row gives itself, or else the figures for its configuration."""
        given = row.options.get("paper")
        if given is None:
            return self.paper_rows.get((row.base.resolve(), tuple(row.overrides)))
        given = given if isinstance(given, Mapping) else {"top1": given}
        with as_config_error():
            return parse_options(PaperRow, {"config": str(row.base), **given}, "paper")


def title(base: Path) -> str:
    """Returns the name of a configuration with its folder: "deit_tiny_p8/eva"."""
    return "/".join(base.with_suffix("").parts[-2:])


def with_values(run: Run, values: Mapping[str, int]) -> Run:
    """Returns `run` with these values, "section.option" -> value."""
    for key, value in values.items():
        section, name = key.split(".")
        run = dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **{name: value})})
    return run


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
