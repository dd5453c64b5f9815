"""Settings of an ablation: costs, results, names in tables and figures."""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ablation.cases import Case
from ablation.match import Matched
from ablation.names import expand, to_text
from ablation.tuning import Tuning
from engine.config.load import dump_run
from engine.config.papers import PaperRow
from engine.config.schema import Run
from engine.runtime.text import one_line
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


SYMBOLS = {"window_size": "E", "cluster_size": "E", "num_landmarks": "C", "num_samples": "S"}
"""Option -> symbol: |E| tokens of a window or cluster, C landmarks or groups, S samples. Names have them for short."""

MAX_NAME = 24
"""Longest text of a value in a short name."""


def short_names(settings: Sequence[Setting]) -> list[str]:
    """Names each setting by the options in which settings differ: "E=49, C=16", or "local, E=49".

    A mechanism has the `SYMBOLS` of its sizes, and the options in which settings of the same mechanism differ. Where
    such names would not tell all settings apart, they have every option that varies, in full. Settings of the same name
    have the size that is solved for `match` in theirs.
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
    names = with_sizes(names, settings)
    if len(set(names)) == len(names):
        return names
    names = [", ".join(f"{option}={text}" for option, text in changes.items()) or "base" for changes in chosen]
    return with_sizes(names, settings)


def with_sizes(names: Sequence[str], settings: Sequence[Setting]) -> list[str]:
    """Adds to a name that several settings have the size that is solved for `match`: "performer, num_samples=50"."""
    return [
        f"{name}, {own.option}={own.value}" if (own := setting.matched) and names.count(name) > 1 else name
        for name, setting in zip(names, settings, strict=True)
    ]


def name_change(setting: Setting, option: str) -> str:
    """Returns a changed option of a setting and its value, such as "E=49", "epochs=9", or the base alone.

    An option of list entries, or of stages, has their numbers in front: "0-2: C=16".
    """
    text = setting.changes[option]
    if option == "base":
        return text
    *_, place, name = ["", *option.split(".")]
    if not option.startswith("attention."):
        return name_option(name, text, {}) if not name.isdecimal() else f"{place}.{name_option(name, text, {})}"
    if isinstance(attention := setting.run.attention, Mapping):
        return name_option(name, yaml.safe_load(text), attention)
    if not place[:1].isdecimal():  # a whole entry
        return f"{name}: {'; '.join(one.get('name', '') for one in list_mechanisms(yaml.safe_load(text)))}"
    entry = attention[int(expand(option)[0].split(".")[1])]
    return f"{place}: {name_option(name, yaml.safe_load(text), entry)}"


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
