"""Settings of a sweep, the rows of its table: their runs, options, costs and results."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ablation.cases import Case
from ablation.match import Matched
from ablation.schema import expand, to_text
from engine.config.papers import PaperRow
from engine.config.schema import Run
from engine.run.load import dump_run
from models.costs import Costs, count_costs


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        changes: option (or base) -> YAML text of its value. paper: figures of a paper. cases: a run per seed or fold.
        matched: the size that is solved for a cost; None if the sweep, or this setting, has no such size.
        replicated_by: the option in which the runs differ, train.seed or data.fold.
    """

    changes: dict[str, str]
    paper: PaperRow | None
    cases: tuple[Case, ...]
    matched: Matched | None = None
    replicated_by: str = "train.seed"

    @property
    def run(self) -> Run:
        """The first run."""
        return self.cases[0].run

    @property
    def replicates(self) -> tuple[str, list[int]]:
        """The option in which the runs differ, and its value in each."""
        section, name = self.replicated_by.split(".")
        return self.replicated_by, [getattr(getattr(case.run, section), name) for case in self.cases]

    @functools.cached_property
    def costs(self) -> Costs:
        """Parameters and MACs of the model."""
        return count_costs(self.run.model, self.run.attention)

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The options of the run in plain types, written out."""
        return dump_run(self.run)

    def values_of(self, option: str) -> list[Any]:
        """Returns the plain values that hold for an option of a sweep: several if it names several entries of a list.

        They are none if the run has no such option: its mechanism is another.
        """
        if option == "base":
            return [self.changes[option]] if option in self.changes else []
        values = []
        for key in expand(option):
            held: Any = self.options
            for part in key.split("."):
                if isinstance(held, list):
                    held = dict(zip(map(str, range(len(held))), held, strict=True))
                if not isinstance(held, Mapping) or part not in held:
                    return []
                held = held[part]
            values.append(held)
        return values

    def text_of(self, option: str) -> str:
        """Returns the YAML text of the value that holds for an option; empty if the run has no such option.

        If the setting does not change the option itself, the name of a mapping stands for the mapping.
        """
        if option in self.changes:
            return self.changes[option]
        held = [name_in(value) for value in self.values_of(option)]
        return to_text(held[0] if held.count(held[0]) == len(held) else held) if held else ""

    def results(self) -> dict[int, dict[str, Any]]:
        """Returns seed, or fold, -> final record of train.py for the finished runs."""
        results = zip(self.replicates[1], [case.result() for case in self.cases], strict=True)
        return {number: result for number, result in results if result}


def name_in(value: Any) -> Any:
    """Returns the name in a mapping, the names in a list of such mappings, or another value as it is."""
    if isinstance(value, list):
        return [name_in(item) for item in value]
    return value.get("name", value) if isinstance(value, Mapping) else value


def in_order(settings: Sequence[Setting]) -> list[Case]:
    """Returns the runs in the order of training: every setting with the first seed or fold, then with the next."""
    return [case for replicate in zip(*(setting.cases for setting in settings), strict=True) for case in replicate]


def accuracies(settings: Sequence[Setting]) -> dict[str, str]:
    """Returns name -> key in the final record, for plain weights and, if any run keeps them, averaged weights."""
    averages = any(setting.run.train.ema_decay for setting in settings)
    return {"top-1": "top1"} | ({"EMA top-1": "ema_top1"} if averages else {})


def has_replicates(settings: Sequence[Setting]) -> bool:
    """Returns whether settings are trained with several seeds or folds."""
    return len(settings[0].cases) > 1


def replicate_of(settings: Sequence[Setting]) -> str:
    """Returns "seed" or "fold", in which the runs of a setting differ."""
    return settings[0].replicated_by.rpartition(".")[2]


def changed_options(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Returns option, or base, -> YAML texts of its values in the settings; empty where a setting leaves it out."""
    changed = dict.fromkeys(option for setting in settings for option in setting.changes)
    return {option: [setting.changes.get(option, "") for setting in settings] for option in changed}


def held_options(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Returns option, or base, that any setting changes -> YAML texts of the values that hold in all settings.

    Empty where a setting has no such option.
    """
    return {option: [setting.text_of(option) for setting in settings] for option in changed_options(settings)}


def varied_options(settings: Sequence[Setting]) -> list[str]:
    """Returns the options, or base, in which the settings differ."""
    return [option for option, texts in changed_options(settings).items() if len(set(texts)) > 1]
