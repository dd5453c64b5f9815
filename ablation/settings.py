"""Settings of an ablation: costs, results, names in tables and figures."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ablation.cases import Case
from ablation.match import Matched
from ablation.tuning import Tuning
from engine.config.papers import PaperRow
from engine.config.schema import Run
from models.costs import Costs, count_costs


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        changes: option (or base) -> YAML text of its value. paper: figures of a paper.
        by_lr: learning rate -> a run per seed; without `tuning`, None -> them.
        matched: the size that is solved for a cost; None if the sweep, or this setting, has no such size.
        tuning: the runs that choose the learning rate; None if it is given.
    """

    changes: dict[str, str]
    paper: PaperRow | None
    by_lr: Mapping[float | None, tuple[Case, ...]]
    matched: Matched | None = None
    tuning: Tuning | None = None

    @property
    def cases(self) -> tuple[Case, ...]:
        """A run per seed; none until the learning rate is chosen."""
        lr = self.tuning and self.tuning.choose()
        return () if self.tuning and lr is None else self.by_lr[lr]

    @property
    def run(self) -> Run:
        """The run of the first seed; its learning rate may not be the chosen one."""
        return next(iter(self.by_lr.values()))[0].run

    @property
    def num_seeds(self) -> int:
        return len(next(iter(self.by_lr.values())))

    @functools.cached_property
    def costs(self) -> Costs:
        """Parameters and MACs of the model."""
        return count_costs(self.run.model, self.run.attention)

    def results(self) -> dict[int, dict[str, Any]]:
        """Returns seed -> final record of train.py for the finished runs."""
        results = {case.run.train.seed: case.result() for case in self.cases}
        return {seed: result for seed, result in results.items() if result}


def in_order(settings: Sequence[Setting]) -> list[Case]:
    """Returns the runs in the order of training: every setting with the first seed, then with the next seed.

    Those of a setting whose learning rate is not chosen yet are left out.
    """
    begun = [own for setting in settings if (own := setting.cases)]
    return [case for replicate in zip(*begun, strict=True) for case in replicate]


def trials_of(settings: Sequence[Setting]) -> list[Case]:
    """Returns the runs that choose learning rates, in the order of training; empty if these are given."""
    tuned = [setting.tuning.cases.values() for setting in settings if setting.tuning]
    return [case for trials in zip(*tuned, strict=True) for case in trials]


def accuracies(settings: Sequence[Setting]) -> dict[str, str]:
    """Returns name -> key in the final record, for plain weights and, if any run keeps them, averaged weights."""
    averages = any(setting.run.train.ema_decay for setting in settings)
    return {"top-1": "top1"} | ({"EMA top-1": "ema_top1"} if averages else {})


def has_replicates(settings: Sequence[Setting]) -> bool:
    """Returns whether settings are trained with several seeds."""
    return settings[0].num_seeds > 1


def changed_options(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Returns option, or base, -> YAML texts of its values in the settings; empty where a setting leaves it out."""
    changed = dict.fromkeys(option for setting in settings for option in setting.changes)
    return {option: [setting.changes.get(option, "") for setting in settings] for option in changed}


def varied_options(settings: Sequence[Setting]) -> list[str]:
    """Returns the options, or base, in which the settings differ."""
    return [option for option, texts in changed_options(settings).items() if len(set(texts)) > 1]


def short_names(settings: Sequence[Setting]) -> list[str]:
    """Names each setting by the options in which settings differ: "window_size=7, num_landmarks=49"."""
    varied, names = varied_options(settings), []
    for setting in settings:
        changes = {option: setting.changes[option] for option in varied if option in setting.changes}
        texts = [text if o == "base" else f"{o.rpartition('.')[2]}={text}" for o, text in changes.items()]
        names.append(", ".join(texts) or "base")
    return names
