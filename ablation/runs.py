"""Runs of a sweep, and its settings, the rows of the table: options, costs and results."""

import functools
import itertools
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablation.match import Matched
from engine.checkpoints.files import newest_checkpoint
from engine.checkpoints.identify import list_checkpoints
from engine.config.papers import PaperRow
from engine.config.schema import Data, Run
from engine.config.yaml_files import dump_yaml, read_yaml
from engine.data.identity import identify_data
from engine.data.splits import open_split, open_splits
from engine.objectives.copying import Copying
from engine.reporting.metrics import find_records, list_changes
from engine.run.load import dump_run, flatten, parse_run
from engine.runtime.errors import ConfigError, UserError, as_config_error
from engine.runtime.terminal import warn_once
from engine.training.differences import list_data_differences, list_differences
from models.assignment import numbers_of
from models.costs import Costs, count_costs


@dataclass(frozen=True)
class Case:
    """One run: the `command` trains it into `directory`."""

    run: Run
    directory: Path
    command: list[str]

    def finals(self) -> list[dict[str, Any]]:
        """Returns the final records of the run in the directory, which may have other options."""
        return [record for record in find_records(self.directory) if record["kind"] == "final"]

    def result(self) -> dict[str, Any] | None:
        """Returns the final record of train.py; None if the run is unfinished or has other options."""
        finals = self.finals()
        try:
            return finals[-1] if finals and not self.differences() else None
        except ConfigError as error:
            warn_once(f"{error}; the run counts as another")
            return None

    def differences(self) -> list[str]:
        """Returns one line for each option in the directory, of any version, that keeps train.py from resuming it.

        Raises:
            ConfigError: the file cannot be read, or describes no run.
        """
        path = self.directory / "config.yaml"
        options, expected = read_yaml(path).values, dump_run(self.run)
        if options == expected:
            return []
        there = parse_run(options, str(path), resumes=True)
        return list_differences(flatten(dump_run(there)), flatten(expected))

    def has_failed(self) -> bool:
        """Returns whether the run has ended without a result: it has failed, or diverged."""
        return failure_mark(self).exists() and not self.result()

    def changes(self) -> list[str]:
        """Returns a text for every option that was changed during the run."""
        return list_changes(find_records(self.directory))


def failure_mark(case: Case) -> Path:
    """Returns the file that tells other workers that the run failed, and why: only the next command tries again."""
    return case.directory / "ablate.failed"


def check_begun(cases: Sequence[Case]) -> None:
    """Refuses runs that have begun with other options, or on other data, than the sweep has now, as train.py would.

    Names on stderr the runs whose checkpoints do not tell their data. Data that an objective draws follows from the
    options.

    Raises:
        UserError: the first such run, and what differs. OptionError: the data cannot be read.
    """
    begun = [case for case in cases if list_checkpoints(case.directory) or case.finals()]
    for case in begun:
        try:
            lines = case.differences()
        except ConfigError as error:
            lines = [str(error)]
        if lines:
            remedy = "give them again, another --output, or move it elsewhere"
            raise UserError(f"{case.directory}: was trained with other options; {remedy}: {lines[0]}")
    for case in begun:
        if Copying.applies(case.run):  # drawn, not read
            continue
        try:
            found, problem = newest_checkpoint(case.directory, quiet=True), "no checkpoint there"
        except UserError as error:
            found, problem = None, str(error)
        if found is None:
            print(f"warning: {case.directory}: which data it was trained on is not known: {problem}", file=sys.stderr)
        elif lines := list_data_differences(found[1], identify(case.run.data)):
            remedy = "name its data again, or another --output"
            raise UserError(f"{case.directory}: was trained on other data; {remedy}: {'; '.join(lines)}")


def check_data(cases: Sequence[Case]) -> None:
    """Opens the data of runs without a result, those of several once.

    Raises:
        ConfigError: `open_splits` refuses them; the message names the first run.
    """
    opened = set()
    for case in cases:
        needed = case.run.data, case.run.model["num_classes"], case.run.train.total_batch_size
        if needed not in opened and not case.result():
            with as_config_error(lambda key, name=case.directory.name: f"{name}: "):
                open_splits(case.run)
            opened.add(needed)


@functools.cache
def identify(data: Data) -> dict[str, Any]:
    return identify_data(open_split(data, "train_split"), open_split(data, "val_split"))


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        changes: option (or base) -> YAML text of its value. paper: figures of a paper. cases: a run per seed or fold.
        matched: the size that is solved for a cost; None if the sweep, or this setting, has no such size.
        replicated_by: the option in which the runs differ, train.seed or data.fold. labels: those of the sweep.
    """

    changes: dict[str, str]
    paper: PaperRow | None
    cases: tuple[Case, ...]
    matched: Matched | None = None
    replicated_by: str = "train.seed"
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        """The first run."""
        return self.cases[0].run

    @property
    def replicates(self) -> list[int]:
        """The value in each run of the option in which they differ."""
        section, name = self.replicated_by.split(".")
        return [getattr(getattr(case.run, section), name) for case in self.cases]

    @functools.cached_property
    def costs(self) -> Costs:
        """Parameters and MACs of the model."""
        return count_costs(self.run.model, self.run.attention)

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The options of the run in plain types, written out."""
        return dump_run(self.run)

    def text_of(self, option: str) -> str:
        """Returns the YAML text of the value that holds for an option, of its values if it names several entries of a
        list; empty if the run has no such option, as its mechanism is another.

        If the setting does not change the option itself, the name of a mapping stands for the mapping.
        """
        if option in self.changes:
            return self.changes[option]
        found = []
        for key in expand(option):
            held: Any = self.options
            for part in key.split("."):
                if isinstance(held, list):
                    held = dict(zip(map(str, range(len(held))), held, strict=True))
                if not isinstance(held, Mapping) or part not in held:
                    return ""
                held = held[part]
            found.append(name_in(held))
        return to_text(found[0] if found.count(found[0]) == len(found) else found)

    def results(self, left_out: Collection[Path] = ()) -> dict[int, dict[str, Any]]:
        """Returns seed, or fold, -> final record of train.py for the finished runs, but in directories `left_out`."""
        runs = zip(self.replicates, self.cases, strict=True)
        return {number: result for number, case in runs if case.directory not in left_out and (result := case.result())}


def name_in(value: Any) -> Any:
    """Returns the name in a mapping, the names in a list of such mappings, or another value as it is."""
    if isinstance(value, list):
        return [name_in(item) for item in value]
    return value.get("name", value) if isinstance(value, Mapping) else value


def in_order(settings: Sequence[Setting]) -> list[Case]:
    """Returns the runs in the order of training: every setting with the first seed or fold, then with the next."""
    return [case for replicate in zip(*(setting.cases for setting in settings), strict=True) for case in replicate]


def find_crowded(settings: Sequence[Setting]) -> set[Path]:
    """Returns the directories of runs that trained on a machine's CPUs while another did, whose steps took longer."""
    launches, crowded = [], set[Path]()
    for case in in_order(settings):
        records = find_records(case.directory)
        starts = [record for record in records if record["kind"] == "start" and "cuda" not in record]
        for start in starts[-1:]:  # the launch whose steps were timed
            launches.append((case.directory, start.get("host"), start.get("time", ""), records[-1].get("time", "")))
    for (a, a_host, a_begin, a_end), (b, b_host, b_begin, b_end) in itertools.combinations(launches, 2):
        if a_host == b_host and max(a_begin, b_begin) < min(a_end, b_end):  # times sort as text
            crowded |= {a, b}
    return crowded


def replicate_of(settings: Sequence[Setting]) -> str:
    """Returns "seed" or "fold", in which the runs of a setting differ."""
    return settings[0].replicated_by.rpartition(".")[2]


def changed_options(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Returns option, or base, -> YAML texts of its values in the settings; empty where a setting leaves it out."""
    changed = dict.fromkeys(option for setting in settings for option in setting.changes)
    return {option: [setting.changes.get(option, "") for setting in settings] for option in changed}


def varied_options(settings: Sequence[Setting]) -> list[str]:
    """Returns the options, or base, in which the settings differ."""
    return [option for option, texts in changed_options(settings).items() if len(set(texts)) > 1]


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
                parts = [str(number) for number in numbers_of(part, 1000, option)]
        keys = [f"{key}.{each}" if key else each for key in keys for each in parts]
    return keys


def to_text(value: Any) -> str:
    """Formats `value` as YAML on one line."""
    text = dump_yaml(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()
