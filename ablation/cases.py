"""Runs of a sweep: their results, and the options and data of runs that have begun."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoints.files import find_checkpoint
from engine.checkpoints.identify import list_checkpoints
from engine.config.schema import Data, Run
from engine.config.yaml_files import read_yaml
from engine.data.identity import identify_data
from engine.data.splits import open_split
from engine.objectives import choose_objective
from engine.reporting.metrics import find_records, list_changes
from engine.run.load import dump_run, flatten, parse_run
from engine.runtime.errors import ConfigError, UserError
from engine.runtime.terminal import warn_once
from engine.training.differences import list_data_differences, list_differences


@dataclass(frozen=True)
class Case:
    """One run: the `command` trains it into `directory`."""

    run: Run
    directory: Path
    command: list[str]

    @property
    def config(self) -> Path:
        """The file in which train.py keeps the options of the run in the directory."""
        return self.directory / "config.yaml"

    def finals(self) -> list[dict[str, Any]]:
        """Returns the final records of the run in the directory, which may have other options."""
        return [record for record in find_records(self.directory) if record["kind"] == "final"]

    def result(self) -> dict[str, Any] | None:
        """Returns the final record of train.py; None if the run is unfinished or has other options."""
        finals = self.finals()
        return finals[-1] if finals and is_same_run(self.config, self.run) else None

    def has_begun(self) -> bool:
        """Returns whether the directory has a checkpoint or a final record, if only of other options."""
        return bool(list_checkpoints(self.directory) or self.finals())

    def has_failed(self) -> bool:
        """Returns whether the run has ended without a result: it has failed, or diverged."""
        return failure_mark(self).exists() and not self.result()

    def changes(self) -> list[str]:
        """Returns a text for every option that was changed during the run."""
        return list_changes(find_records(self.directory))


def failure_mark(case: Case) -> Path:
    """Returns the file that tells other workers that the run failed, and why: only the next command tries again."""
    return case.directory / "ablate.failed"


def is_same_run(config: Path, run: Run) -> bool:
    """Returns whether the file `config`, of any version, describes a run with the results of `run`."""
    try:
        return not list_option_differences(config, run)
    except ConfigError as error:
        warn_once(f"{error}; the run counts as another")
        return False


def list_option_differences(config: Path, run: Run) -> list[str]:
    """Returns one line for each option in the file `config`, of any version, that keeps train.py from resuming its run
    as `run`.

    Raises:
        ConfigError: the file cannot be read, or describes no run.
    """
    options, expected = read_yaml(config).values, dump_run(run)
    if options == expected:
        return []
    there = flatten(dump_run(parse_run(options, str(config))))
    return list_differences(there, flatten(expected))


def check_options(cases: Sequence[Case]) -> None:
    """Refuses runs that have begun with other options than the sweep has now, as train.py would.

    Raises:
        UserError: the first such run, and the first difference.
    """
    for case in cases:
        if not case.has_begun():
            continue
        try:
            lines = list_option_differences(case.config, case.run)
        except ConfigError as error:
            lines = [str(error)]
        if lines:
            remedy = "give them again, another --output, or move it elsewhere"
            raise UserError(f"{case.directory}: was trained with other options; {remedy}: {lines[0]}")


def check_data(cases: Sequence[Case]) -> None:
    """Refuses runs that have begun on other data than the sweep has now, as train.py would.

    Names on stderr the runs whose checkpoints do not tell their data. Data that an objective draws
    follows from the options.

    Raises:
        UserError: the first such run, and what differs. OptionError: the data cannot be read.
    """
    for case in cases:
        if not case.has_begun() or choose_objective(case.run).draw(case.run, False) is not None:
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


@functools.cache
def identify(data: Data) -> dict[str, Any]:
    """Returns the identity of the data of a run, see `identify_data`."""
    return identify_data(open_split(data, "train_split"), open_split(data, "val_split"))
