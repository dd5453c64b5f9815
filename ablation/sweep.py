"""Ablation files: settings, each trained once for every seed, all checked before the first run starts."""

import dataclasses
import functools
import hashlib
import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablation.cases import Case
from ablation.match import Match, Matched, OutOfReach, solve
from ablation.search import sample
from ablation.settings import Setting
from ablation.tuning import Tuning, check_rates
from attention.options import OptionError, nearest, option, parse_options, to_yaml
from attention.plugins import as_arguments, load_plugin
from engine.config.checks import check_run
from engine.config.load import load_run, load_unbuilt, sets
from engine.config.papers import PaperRow, read_papers
from engine.config.schema import Run
from engine.config.yaml_files import SWEEP, dump_yaml, read_yaml
from engine.objectives import choose_objective
from engine.runtime.errors import ConfigError

TRAIN = str(Path(__file__).parents[1] / "train.py")
CONFIGS = Path(__file__).parents[1] / "configs"
LIMIT = 10_000
"""Largest number of settings of a grid, and of seeds of a setting."""

OF_ROWS = {"paper", "match"}
"""Keys of an item of `runs` that are no options of train.py."""

MAX_BYTES = 255
"""Longest name of a directory in nearly every file system, in bytes."""


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
    lr: tuple[float, ...] | None = option(
        None,
        "values of optim.lr: that of each setting is chosen on held-out training images; null: as base has it",
        above=0,
    )
    val_fraction: float = option(0.1, "data.val_fraction of the runs that choose lr", above=0, below=1)
    grid: dict[str, Any] | None = option(None, "option key.path -> list of values; one setting per combination")
    trials: int | None = option(
        None,
        "number of settings sampled from grid, whose values may be {range: [LOW, HIGH]} or {log_range: [LOW, HIGH]}",
        low=1,
        high=LIMIT,
    )
    trials_seed: int = option(0, "seed of the sampling", low=0)
    runs: tuple[dict[str, Any], ...] = option(
        (),
        "options key.path -> value of each setting; paper: its top-1 in a paper; match: false keeps the size that it"
        " has",
    )
    match: Match | None = option(
        None, "a cost for which the size of every setting's mechanism is solved: layer_macs, token_macs or model_macs"
    )
    plugins: tuple[str, ...] = option((), "modules or .py files that register mechanisms of your own, see --plugin")


def read_ablation(
    path: Path, overrides: Sequence[str], output: Path, launcher: Sequence[str]
) -> tuple[Ablation, list[Setting], list[str]]:
    """Reads the ablation file `path` and checks all its settings; writes nothing.

    Returns:
        The file, its settings, and a line for each setting that is left out, as its cost cannot be that of `match`.
    Raises:
        ConfigError: the file, or a run, holds something that cannot be honoured.
    """
    tree, settings, left_out = read_yaml(path), {}, []
    load = functools.cache(functools.partial(load_run, world_size=count_ranks(launcher)))  # sampled settings: twice

    @functools.cache
    def solve_for(base: Path, given: tuple[str, ...]) -> Matched | None:
        """The size for the target of `match`; None without one."""
        return ablation.match and match_size(ablation.match, base, (*overrides, *given))

    def check(options: dict[str, Any]) -> None:
        for base in bases:
            given = to_overrides(options)
            matched = solve_for(path.parent / base, tuple(given))
            load(path.parent / base, (*overrides, *given, *([matched.override] if matched else [])))

    sections = {field.name for field in dataclasses.fields(Run)}
    if tree.values.keys() & sections and not tree.values.keys() & SWEEP:
        raise ConfigError(f"{path}: the configuration of one run; give it to train.py, or name it as base of a sweep")
    try:
        ablation = parse_options(Ablation, tree.values)
        for plugin in ablation.plugins:
            load_plugin(plugin, "plugins")
        if ablation.match:
            ablation.match.check()
        bases = (ablation.base,) if ablation.base else ablation.bases
        product = combine(ablation, check)
        if not ablation.base and not ablation.bases:
            raise OptionError("base", "required, but not given; or give bases")
        if ablation.base and ablation.bases:
            raise OptionError("bases", "given beside base; leave one of them out")
        if not product and not ablation.runs and not ablation.bases:
            raise OptionError("runs", "no runs; give grid or runs")
        figures = figures_of(ablation.paper)
        seeds, rates = list_seeds(ablation.seeds), check_rates(ablation.lr)
        if "val_fraction" in tree.values and not rates:
            raise OptionError("val_fraction", f" = {ablation.val_fraction}, but there is no lr to choose; leave it out")
    except OptionError as error:
        raise ConfigError(f"{tree.origin(error.key)}: {error}") from None

    rows = [("grid", options) for options in product]
    rows += [(f"runs.{i}", options) for i, options in enumerate(ablation.runs)]
    for (i, base), (key, options) in itertools.product(enumerate(bases), rows or [("bases", {})]):
        key, base = key if rows else f"bases.{i}", path.parent / base
        changes = {option: to_text(value) for option, value in options.items() if option not in OF_ROWS}
        given, is_matched = to_overrides(options), options.get("match", True)
        if ablation.bases:
            changes = {"base": "/".join(base.with_suffix("").parts[-2:])} | changes
        title = [changes["base"]] if ablation.bases else []
        name = to_name([*title, *given]) or "base"
        try:
            if "match" in options and (is_matched is not False or not ablation.match):
                problem = "acts in a sweep with match only" if is_matched is False else "expected false, or no match"
                raise ConfigError(f"match: {problem}, got {is_matched!r}; leave it out")
            matched = solve_for(base, tuple(given)) if is_matched else None
            size = [matched.override] if matched else []
            name = to_name([*title, *given, *size]) or "base"
            if name in settings:
                raise ConfigError(f"a second run with {name}")
            if not isinstance(top1 := options.get("paper"), float | int | None):
                raise ConfigError(f"paper: expected a number, got {top1!r}")
            paper = PaperRow(config=str(base), top1=top1) if top1 else figures.get((base.resolve(), tuple(given)))
            run = load(base, (*overrides, *given, *size))
            if seeds and sets([*overrides, *given], "train.seed"):
                raise ConfigError("train.seed is given beside seeds; leave one of them out")
            if rates:
                check_tuning(run, rates, ablation.val_fraction, [*overrides, *given], count_ranks(launcher))
        except OutOfReach as error:
            left_out.append(f"{name}: {error}")
            continue
        except ConfigError as error:
            raise ConfigError(f"{tree.origin(key)}: {key}: {error}") from None
        command = [*launcher, TRAIN, str(base), *overrides, *given, *size]

        create = functools.partial(create_case, run, command, output, name)
        by_lr = {lr: tuple(create(lr, seed) for seed in seeds or [None]) for lr in rates or [None]}
        trials = {lr: create(lr, [*seeds, None][0], ablation.val_fraction) for lr in rates}
        settings[name] = Setting(changes, paper, by_lr, matched, Tuning(trials) if trials else None)
    if not settings:
        raise ConfigError(f"{tree.origin('match')}: match: no setting can be trained; the last: {left_out[-1]}")
    return ablation, list(settings.values()), left_out


def create_case(
    run: Run,
    command: Sequence[str],
    output: Path,
    name: str,
    lr: float | None,
    seed: int | None,
    val_fraction: float | None = None,
) -> Case:
    """Returns the run of a setting with these values, where they are not None, and adds them to its `command`."""
    given = {"optim.lr": lr, "data.val_fraction": val_fraction, "train.seed": seed}
    texts = [f"{key}={to_yaml(value)}" for key, value in given.items() if value is not None]
    directory = output / to_directory(name, texts)
    run = with_values(run, lr, seed, val_fraction)
    return Case(run, directory, [*command, *texts, "--output", str(directory), *as_arguments()])


def with_values(run: Run, lr: float | None, seed: int | None, val_fraction: float | None) -> Run:
    """Returns `run` with these values, where they are not None."""
    sections = {"optim": {"lr": lr}, "train": {"seed": seed}, "data": {"val_fraction": val_fraction}}
    for section, values in sections.items():
        given = {name: value for name, value in values.items() if value is not None}
        run = dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **given)})
    return run


def check_tuning(
    run: Run, rates: Sequence[float], val_fraction: float, overrides: Sequence[str], world_size: int
) -> None:
    """Refuses a run whose learning rate cannot be chosen among `rates`, given beside them, or not valid with one.

    Raises:
        ConfigError: the first problem.
    """
    for key in ("optim.lr", "data.val_fraction", "data.folds"):
        if sets(overrides, key):
            raise ConfigError(f"{key} is given beside lr; leave one of them out")
    if held_out_by := run.data.held_out_by:
        raise ConfigError(f"{held_out_by}: lr holds images out by itself; set it to null in base")
    if "top1" not in choose_objective(run).measure.names:
        raise ConfigError("lr is chosen by top-1, which this run does not measure; give optim.lr instead")
    try:
        for lr in rates:
            check_run(with_values(run, lr, None, val_fraction), world_size)
    except OptionError as error:
        raise ConfigError(f"lr: {error}") from None


def match_size(match: Match, base: Path, overrides: Sequence[str]) -> Matched:
    """Solves the size of the mechanism of the configuration `base` with `overrides`.

    Raises:
        OutOfReach: see `solve`. ConfigError: the overrides give the size, or something cannot be honoured.
    """
    run = load_unbuilt(base, overrides)
    try:
        matched = solve(match, run)
    except OptionError as error:
        raise ConfigError(str(error)) from None
    if sets(overrides, key := f"attention.{matched.option}"):
        raise ConfigError(f"{key} is given, and match solves it; leave it out, or write match: false beside it")
    return matched


def count_ranks(launcher: Sequence[str]) -> int:
    """Returns how many ranks the command `launcher` starts, by torchrun's options; 1 where they are no numbers."""
    text = " ".join(launcher).replace("_", "-")
    found = (re.findall(rf"--{option}[= ](\d+)(?!\S)", text) for option in ("nnodes", "nproc-per-node"))
    return math.prod(int(numbers[-1]) for numbers in found if numbers)


def to_overrides(options: Mapping[str, Any]) -> list[str]:
    """Returns the overrides of train.py for a setting."""
    return [f"{option}={to_text(value)}" for option, value in options.items() if option not in OF_ROWS]


def combine(ablation: Ablation, check: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Returns the settings of `grid`: all combinations, or `trials` of them that `check` does not refuse.

    Raises:
        OptionError: a value of `grid` is no list, or no range of a search; there are more than `LIMIT` settings.
    """
    grid = ablation.grid or {}
    if ablation.trials and not grid:
        raise OptionError("trials", f" = {ablation.trials}, but there is no grid to choose from")
    if ablation.trials:
        settings, refused = sample(grid, ablation.trials, ablation.trials_seed, check)
        if refused:
            number = f"{len(refused)} of {len(refused) + len(settings)} points"
            print(f"grid: {number} are no valid run, others take their place; the first: {refused[0]}", file=sys.stderr)
        return settings
    for key, values in grid.items():
        if isinstance(values, dict):
            raise OptionError(f"grid.{key}", f"{values!r} needs trials: how many settings to choose")
        if not isinstance(values, list) or not values:
            raise OptionError(f"grid.{key}", f"expected a list of values, got {values!r}")
    if (count := math.prod(map(len, grid.values()))) > LIMIT:
        raise OptionError("grid", f"{count:,} combinations, more than {LIMIT:,}; choose some of them by trials")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()) if values]


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


def to_name(texts: Sequence[str]) -> str:
    """Returns the name of a directory for the overrides `texts`."""
    return re.sub(r"[^\w.=,]+", "-", re.sub(r"[{}\s]", "", ",".join(texts)).replace(":", "="))


def figures_of(source: str | None) -> dict[tuple[Path, tuple[str, ...]], PaperRow]:
    """Returns configuration and overrides -> figures of the paper's table `source`; empty for null.

    Raises:
        OptionError: engine/config/papers.yaml has no such source.
    """
    rows = read_papers() if source else ()
    figures = {((CONFIGS / row.config).resolve(), row.overrides): row for row in rows if row.source == source}
    if source and not figures:
        meant = nearest(source, {row.source for row in rows})
        raise OptionError("paper", f"{source!r} is no source in engine/config/papers.yaml{meant}")
    return figures


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


def to_text(value: Any) -> str:
    """Formats `value` as YAML on one line."""
    text = dump_yaml(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()
