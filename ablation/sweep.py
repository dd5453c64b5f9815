"""Ablation files: settings, each trained once for every seed, all checked before the first run starts."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attention.options import OptionError, option, parse_options
from bench.costs import Costs, count_costs
from engine.checkpoint import list_differences
from engine.config import ConfigError, dump_run, flatten, load_run, parse_run, read_yaml
from engine.schema import Run

TRAIN = str(Path(__file__).parents[1] / "train.py")


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """An ablation file: the settings of `grid`, then those of `runs`. `base` is relative to the file."""

    base: str
    caption: str = option("", "title of the table")
    seeds: int | tuple[int, ...] | None = option(
        None, "train.seed of the runs of every setting: a list, or 3 for [0, 1, 2]; null: one run, of base's seed"
    )
    grid: dict[str, Any] | None = option(None, "option key.path -> list of values; one setting per combination")
    runs: tuple[dict[str, Any], ...] = option(
        (), "options key.path -> value of each setting; paper: its top-1 in a paper"
    )


@dataclass(frozen=True)
class Case:
    """One run: the `command` trains it into `directory`."""

    run: Run
    directory: Path
    command: list[str]

    def result(self) -> dict[str, Any] | None:
        """The final record of train.py; None if the run is not finished, or was made with other options."""
        try:
            config = yaml.safe_load((self.directory / "config.yaml").read_text())
            records = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
            finals = [record for record in records if record["kind"] == "final"]
        except (FileNotFoundError, json.JSONDecodeError):  # an interrupted run may have been cut off within a line
            return None
        return finals[-1] if finals and is_same_run(config, self.run, self.directory) else None


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        changes: option -> YAML text of its value. paper: top-1 that a paper reports, percent. cases: a run per seed.
    """

    changes: dict[str, str]
    paper: float | None
    cases: tuple[Case, ...]

    @functools.cached_property
    def costs(self) -> Costs:
        """Parameters and MACs of the model."""
        return count_costs(self.cases[0].run.model, self.cases[0].run.attention)

    def results(self) -> dict[int, dict[str, Any]]:
        """Seed -> final record of train.py, of the finished runs."""
        results = {case.run.train.seed: case.result() for case in self.cases}
        return {seed: result for seed, result in results.items() if result}


def read_ablation(
    path: Path, overrides: Sequence[str], output: Path, launcher: Sequence[str]
) -> tuple[Ablation, list[Setting]]:
    """The ablation file `path` and its settings, all checked; nothing is written.

    Raises:
        ConfigError: anything that cannot be honoured, in the file or in a run.
    """
    tree, settings = read_yaml(path), {}
    try:
        ablation = parse_options(Ablation, tree.values)
        grid = ablation.grid or {}
        for key, values in grid.items():
            if not isinstance(values, list) or not values:
                raise OptionError(f"grid.{key}", f"expected a list of values, got {values!r}")
        product = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()) if values]
        if not product and not ablation.runs:
            raise OptionError("runs", "no runs; give grid or runs")
        seeds = list_seeds(ablation.seeds)
    except OptionError as error:
        raise ConfigError(f"{tree.origin(error.key)}: {error}") from None

    base = path.parent / ablation.base
    keys = ["grid"] * len(product) + [f"runs.{i}" for i in range(len(ablation.runs))]
    for key, options in zip(keys, [*product, *ablation.runs], strict=True):
        changes = {option: to_text(value) for option, value in options.items() if option != "paper"}
        given = [f"{option}={text}" for option, text in changes.items()]
        name = re.sub(r"[^\w.=,]+", "-", re.sub(r"[{}\s]", "", ",".join(given)).replace(":", "=")) or "base"
        paper = options.get("paper")
        try:
            if name in settings:
                raise ConfigError(f"a second run with {name}")
            if not isinstance(paper, float | int | None):
                raise ConfigError(f"paper: expected a number, got {paper!r}")
            run = load_run(base, [*overrides, *given])
            if seeds and sets_seed([*overrides, *given]):
                raise ConfigError("train.seed is given beside seeds; leave one of them out")
        except ConfigError as error:
            raise ConfigError(f"{tree.origin(key)}: {key}: {error}") from None
        cases = []
        for seed in seeds or [None]:
            texts = [] if seed is None else [f"train.seed={seed}"]
            directory = output / ",".join([name, *texts])
            command = [*launcher, TRAIN, str(base), *overrides, *given, *texts, "--output", str(directory)]
            train = run.train if seed is None else dataclasses.replace(run.train, seed=seed)
            cases.append(Case(dataclasses.replace(run, train=train), directory, command))
        settings[name] = Setting(changes, paper, tuple(cases))
    return ablation, list(settings.values())


def list_seeds(seeds: int | tuple[int, ...] | None) -> Sequence[int]:
    """The values of train.seed that the option `seeds` means; none where it is null.

    Raises:
        OptionError: no seed, one below 0, or one twice.
    """
    values = range(seeds) if isinstance(seeds, int) else seeds or ()
    if seeds is not None and (not values or min(values) < 0 or len(set(values)) < len(values)):
        raise OptionError("seeds", f"expected a number of seeds, or a list of different ones from 0, got {seeds!r}")
    return values


def sets_seed(overrides: Sequence[str]) -> bool:
    """Whether one of `overrides`, which are valid, gives train.seed."""
    keys_and_values = (override.partition("=")[::2] for override in overrides)
    return any("train.seed" in flatten({key: yaml.safe_load(text)}) for key, text in keys_and_values)


def in_order(settings: Sequence[Setting]) -> list[Case]:
    """The runs as they are trained: every setting with the first seed, then every setting with the next one."""
    return [case for replicate in zip(*(setting.cases for setting in settings), strict=True) for case in replicate]


def accuracies(settings: Sequence[Setting]) -> dict[str, str]:
    """Name -> key in the final record, of plain weights and, if any run keeps them, of averaged ones."""
    averages = any(case.run.train.ema_decay for setting in settings for case in setting.cases)
    return {"top-1": "top1"} | ({"EMA top-1": "ema_top1"} if averages else {})


def has_replicates(settings: Sequence[Setting]) -> bool:
    """Whether settings are trained with several seeds."""
    return len(settings[0].cases) > 1


def is_same_run(config: dict[str, Any], run: Run, source: Path) -> bool:
    """Whether `config`, perhaps written by an older version, describes `run` as far as its results go."""
    if config == dump_run(run):
        return True
    try:
        config = dump_run(parse_run(config, str(source)))
    except ConfigError:
        return False
    return not list_differences(flatten(config), flatten(dump_run(run)))


def to_text(value: Any) -> str:
    """`value` as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()


def short_names(settings: Sequence[Setting]) -> list[str]:
    """A name for each setting from the options in which they differ: "window_size=7, num_landmarks=49"."""
    changed = dict.fromkeys(option for setting in settings for option in setting.changes)
    varied = [option for option in changed if len({setting.changes.get(option) for setting in settings}) > 1]
    return [
        ", ".join(f"{o.rpartition('.')[2]}={setting.changes[o]}" for o in varied if o in setting.changes) or "base"
        for setting in settings
    ]
