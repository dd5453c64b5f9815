"""Settings of an ablation: their runs, costs, results and options."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ablation.cases import Case
from ablation.match import Matched
from ablation.names import expand, to_text
from ablation.tuning import Tuning
from engine.config.load import dump_run
from engine.config.papers import PaperRow
from engine.config.schema import Run
from models.costs import Costs, count_costs


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        changes: option (or base) -> YAML text of its value. paper: figures of a paper.
        by_lr: learning rate -> a run per seed or fold; without `tuning`, None -> them.
        matched: the size that is solved for a cost; None if the sweep, or this setting, has no such size.
        tuning: the runs that choose the learning rate; None if it is given.
        replicated_by: the option in which the runs differ, train.seed or data.fold.
    """

    changes: dict[str, str]
    paper: PaperRow | None
    by_lr: Mapping[float | None, tuple[Case, ...]]
    matched: Matched | None = None
    tuning: Tuning | None = None
    replicated_by: str = "train.seed"

    @property
    def cases(self) -> tuple[Case, ...]:
        """A run per seed or fold; none until the learning rate is chosen."""
        lr = self.tuning and self.tuning.choose()
        return () if self.tuning and lr is None else self.by_lr[lr]

    @property
    def trials(self) -> list[Case]:
        """The runs that choose the learning rate; none if it is given."""
        return [*self.tuning.cases.values()] if self.tuning else []

    @property
    def known_cases(self) -> list[Case]:
        """`trials`, and then `cases`."""
        return [*self.trials, *self.cases]

    @property
    def possible_cases(self) -> list[Case]:
        """`trials`, and then the runs of every learning rate that may be chosen."""
        return [*self.trials, *itertools.chain(*self.by_lr.values())]

    @property
    def run(self) -> Run:
        """The first run; its learning rate may not be the chosen one."""
        return next(iter(self.by_lr.values()))[0].run

    @property
    def num_runs(self) -> int:
        return len(next(iter(self.by_lr.values())))

    @property
    def replicates(self) -> tuple[str, list[int]]:
        """The option in which the runs differ, and its value in each."""
        section, name = self.replicated_by.split(".")
        cases = next(iter(self.by_lr.values()))
        return self.replicated_by, [getattr(getattr(case.run, section), name) for case in cases]

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
        """Returns the YAML text of the value that holds for an option; for what the setting does not change itself, the
        name in place of a mapping that has one. Empty if the run has no such option.
        """
        if option in self.changes:
            return self.changes[option]
        held = [name_in(value) for value in self.values_of(option)]
        return to_text(held[0] if held.count(held[0]) == len(held) else held) if held else ""

    def results(self) -> dict[int, dict[str, Any]]:
        """Returns seed, or fold, -> final record of train.py for the finished runs."""
        results = zip(self.replicates[1], [case.result() for case in self.cases], strict=False)
        return {number: result for number, result in results if result}


def name_in(value: Any) -> Any:
    """Returns the name in a mapping, the names in a list of such mappings, or another value as it is."""
    if isinstance(value, list):
        return [name_in(item) for item in value]
    return value.get("name", value) if isinstance(value, Mapping) else value


def in_order(settings: Sequence[Setting]) -> list[Case]:
    """Returns the runs in the order of training: every setting with the first seed or fold, then with the next.

    Those of a setting whose learning rate is not chosen yet are left out.
    """
    begun = [own for setting in settings if (own := setting.cases)]
    return [case for replicate in zip(*begun, strict=True) for case in replicate]


def trials_of(settings: Sequence[Setting]) -> list[Case]:
    """Returns the runs that choose learning rates, in the order of training; empty if these are given."""
    tuned = [setting.trials for setting in settings if setting.tuning]
    return [case for trials in zip(*tuned, strict=True) for case in trials]


def accuracies(settings: Sequence[Setting]) -> dict[str, str]:
    """Returns name -> key in the final record, for plain weights and, if any run keeps them, averaged weights."""
    averages = any(setting.run.train.ema_decay for setting in settings)
    return {"top-1": "top1"} | ({"EMA top-1": "ema_top1"} if averages else {})


def has_replicates(settings: Sequence[Setting]) -> bool:
    """Returns whether settings are trained with several seeds or folds."""
    return settings[0].num_runs > 1


def replicate_of(settings: Sequence[Setting]) -> str:
    """Returns the word for what the runs of a setting differ in, "seed" or "fold"."""
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
