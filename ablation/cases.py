"""Runs of a sweep: their results, and the data of finished ones."""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoints.files import find_checkpoint
from engine.config.load import dump_run, flatten, parse_run
from engine.config.schema import Data, Run
from engine.config.yaml_files import read_yaml
from engine.data.splits import identify_data, open_split
from engine.objectives import choose_objective
from engine.reporting.metrics import find_records, list_changes
from engine.runtime.errors import ConfigError, UserError
from engine.runtime.terminal import warn_once
from engine.training.resume import CONTENT, NAMES_ONLY, list_data_differences, list_differences


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

    def has_diverged(self) -> bool:
        """Returns whether the run has ended because a loss, gradient or weight was not finite."""
        records = find_records(self.directory)
        is_over = bool(records) and records[-1]["kind"] == "fail" and "not finite" in records[-1]["reason"]
        return is_over and is_same_run(self.directory / "config.yaml", self.run)

    def changes(self) -> list[str]:
        """Returns a text for every option that was changed within the run, so that it is not all of one setting."""
        return list_changes(find_records(self.directory))


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
