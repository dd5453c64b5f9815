"""Settings of an ablation and their runs: costs, results, the data of finished runs, names in tables and figures."""

import functools
import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.checkpoints.files import find_checkpoint
from engine.config.load import dump_run, flatten, parse_run
from engine.config.papers import PaperRow
from engine.config.schema import Data, Run
from engine.config.yaml_files import read_yaml
from engine.data.splits import identify_data, open_split
from engine.objectives import choose_objective
from engine.reporting.metrics import find_records, list_changes
from engine.runtime.errors import ConfigError, UserError
from engine.runtime.terminal import warn_once
from engine.runtime.text import one_line
from engine.training.resume import CONTENT, NAMES_ONLY, list_data_differences, list_differences
from models.costs import Costs, count_costs


@dataclass(frozen=True)
class Case:
    """One run: the `command` trains it into `directory`."""

    run: Run
    directory: Path
    command: list[str]

    def result(self) -> dict[str, Any] | None:
        """Returns the final record of train.py; None if the run is unfinished or has other options."""
        finals = [record for record in find_records(self.directory) if record["kind"] == "final"]
        return finals[-1] if finals and is_same_run(self.directory / "config.yaml", self.run) else None

    def changes(self) -> list[str]:
        """Returns a text for every option that was changed within the run, so that it is not all of one setting."""
        return list_changes(find_records(self.directory))


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        changes: option (or base) -> YAML text of its value. paper: figures of a paper. cases: a run per seed.
    """

    changes: dict[str, str]
    paper: PaperRow | None
    cases: tuple[Case, ...]

    @functools.cached_property
    def costs(self) -> Costs:
        """Parameters and MACs of the model."""
        return count_costs(self.cases[0].run.model, self.cases[0].run.attention)

    def results(self) -> dict[int, dict[str, Any]]:
        """Returns seed -> final record of train.py for the finished runs."""
        results = {case.run.train.seed: case.result() for case in self.cases}
        return {seed: result for seed, result in results.items() if result}


def in_order(settings: Sequence[Setting]) -> list[Case]:
    """Returns the runs in the order of training: every setting with the first seed, then with the next seed."""
    return [case for replicate in zip(*(setting.cases for setting in settings), strict=True) for case in replicate]


def accuracies(settings: Sequence[Setting]) -> dict[str, str]:
    """Returns name -> key in the final record, for plain weights and, if any run keeps them, averaged weights."""
    averages = any(case.run.train.ema_decay for setting in settings for case in setting.cases)
    return {"top-1": "top1"} | ({"EMA top-1": "ema_top1"} if averages else {})


def has_replicates(settings: Sequence[Setting]) -> bool:
    """Returns whether settings are trained with several seeds."""
    return len(settings[0].cases) > 1


def changed_options(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Returns option, or base, -> YAML texts of its values in the settings; empty where a setting leaves it out."""
    changed = dict.fromkeys(option for setting in settings for option in setting.changes)
    return {option: [setting.changes.get(option, "") for setting in settings] for option in changed}


def varied_options(settings: Sequence[Setting]) -> list[str]:
    """Returns the options, or base, in which the settings differ."""
    return [option for option, texts in changed_options(settings).items() if len(set(texts)) > 1]


SYMBOLS = {"window_size": "E", "cluster_size": "E", "num_landmarks": "C", "num_samples": "S"}
"""Option -> symbol: |E| tokens of a window or cluster, C landmarks or groups, S samples. Names have them for short."""

MAX_NAME = 24
"""Longest text of a value in a short name."""


def short_names(settings: Sequence[Setting]) -> list[str]:
    """Names each setting by the options in which settings differ: "E=49, C=16", or "local, E=49".

    A mechanism has the `SYMBOLS` of its sizes, and the options in which settings of the same mechanism differ. Where
    such names would not tell all settings apart, they have every option that varies, in full.
    """
    varied = varied_options(settings)
    chosen = [
        {option: setting.changes[option] for option in varied if option in setting.changes} for setting in settings
    ]
    found = [list_mechanisms(yaml.safe_load(changes.get("attention", "[]"))) for changes in chosen]
    texts: dict[tuple[str, str], set[str]] = {}  # mechanism, option -> texts of its values
    mechanisms = list(itertools.chain(*found))
    for own in mechanisms:
        for option in {option for other in mechanisms if other.get("name") == own.get("name") for option in other}:
            texts.setdefault((own.get("name", ""), option), set()).add(str(own.get(option)))
    names = []
    for setting, changes, own_mechanisms in zip(settings, chosen, found, strict=True):
        parts = ["; ".join(name_mechanism(own, texts) for own in own_mechanisms)]
        parts += [name_change(setting, option) for option in changes if option != "attention"]
        names.append(", ".join(filter(None, parts)) or "base")
    if len(set(names)) == len(names):
        return names
    return [", ".join(f"{option}={text}" for option, text in changes.items()) or "base" for changes in chosen]


def name_change(setting: Setting, option: str) -> str:
    """Returns a changed option of a setting and its value, such as "E=49", "epochs=9", or the base alone."""
    text, name = setting.changes[option], option.rpartition(".")[2]
    if option == "base":
        return text
    if option.startswith("attention.") and isinstance(attention := setting.cases[0].run.attention, Mapping):
        return name_option(name, yaml.safe_load(text), attention)
    return name_option(name, text, {})


def list_mechanisms(attention: Any) -> list[Mapping[str, Any]]:
    """Returns the mappings of the option `attention`, which is a name, a mapping, or a list of mappings."""
    if isinstance(attention, str):
        return [{"name": attention}]
    return [attention] if isinstance(attention, Mapping) else list(attention)


def name_mechanism(own: Mapping[str, Any], texts: Mapping[tuple[str, str], Collection[str]]) -> str:
    """Names a mechanism with its sizes and other options that vary: "eva, E=49, C=16"; blocks stand before it."""
    shown = [
        name_option(option, value, own)
        for option, value in own.items()
        if option not in ("name", "blocks") and (option in SYMBOLS or len(texts[own.get("name", ""), option]) > 1)
    ]
    blocks = f"{own['blocks']}: " if "blocks" in own else ""
    return blocks + ", ".join(filter(None, [own.get("name"), *shown]))


def name_option(option: str, value: Any, attention: Mapping[str, Any]) -> str:
    """Returns "E=49" for the side 7 of the square windows of `attention`, "lr=0.001" for an option without a symbol."""
    if option == "window_size" and not (attention.get("layout") == "1d" or attention.get("causal")):
        if not isinstance(value, int) or attention.get("overlap"):
            return f"{option}={value}"
        value = value**2
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{SYMBOLS.get(option, option)}={one_line(text, MAX_NAME)}"


def is_same_run(config: Path, run: Run) -> bool:
    """Returns whether the file `config`, of any version, describes a run with the results of `run`."""
    expected = dump_run(run)
    try:
        options = read_yaml(config).values
        if options == expected:
            return True
        return not list_differences(flatten(dump_run(parse_run(options, str(config)))), flatten(expected))
    except ConfigError as error:
        warn_once(f"{error}; the run counts as another")
        return False


def check_data(cases: Sequence[Case]) -> None:
    """Refuses finished runs that were trained on other data than the sweep has now, as train.py would.

    Names on stderr the finished runs whose checkpoints do not tell their data, or only its names. Data that an
    objective draws follows from the options.

    Raises:
        UserError: the first such run, and what differs. OptionError: the data cannot be read.
    """
    for case in cases:
        if not case.result() or choose_objective(case.run).draw(case.run, False) is not None:
            continue
        try:
            found = find_checkpoint(case.directory, "last", quiet=True)
            problem = "no checkpoint there"
        except UserError as error:
            found, problem = None, str(error)
        if found is None:
            print(f"warning: {case.directory}: which data it was trained on is not known: {problem}", file=sys.stderr)
        elif lines := list_data_differences(found[1], identify(case.run.data)):
            remedy = "name its data again, or another --output"
            raise UserError(f"{case.directory}: was trained on other data; {remedy}: {'; '.join(lines)}")
        elif CONTENT[0] not in found[1]:
            print(f"warning: {found[0]}: {NAMES_ONLY}", file=sys.stderr)


@functools.cache
def identify(data: Data) -> dict[str, Any]:
    """Returns the identity of the data of a run, see `identify_data`."""
    return identify_data(open_split(data, "train_split"), open_split(data, "val_split"))
