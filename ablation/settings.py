"""Settings of a sweep, the rows of its table: runs, costs and results, short names, and choice by values of options."""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ablation.cases import Case
from ablation.match import Matched
from ablation.schema import expand, to_text
from attention.options import OptionError, nearest
from engine.config.papers import PaperRow
from engine.config.schema import Run
from engine.config.yaml_files import parse_yaml
from engine.run.load import dump_run
from engine.runtime.errors import ConfigError, as_config_error
from engine.runtime.text import one_line
from models.costs import Costs, count_costs

SYMBOLS = {"window_size": "E", "cluster_size": "E", "num_landmarks": "C", "num_samples": "S"}
"""Option -> symbol: |E| tokens of a window or cluster, C landmarks or groups, S samples. Names have them for short."""

MAX_NAME = 24
"""Longest text of a value in a short name."""


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
    def num_runs(self) -> int:
        return len(self.cases)

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
        """Returns the YAML text of the value that holds for an option; for what the setting does not change itself, the
        name in place of a mapping that has one. Empty if the run has no such option.
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


def select(settings: Sequence[Setting], wanted: Mapping[str, Any], key: str) -> list[Setting]:
    """Returns the settings whose runs have all the `wanted` values, option -> value.

    A mapping has a value if it has what the value gives; the name of a mechanism, or of a model, stands for a mapping.

    Raises:
        OptionError: there is none; `key` begins the message.
    """
    found = [*settings]
    for option, value in wanted.items():
        kept = [setting for setting in found if has_value(setting, option, value)]
        if not kept:
            problem = f"{option} = {to_text(value)}: no row has it"
            if texts := sorted({setting.text_of(option) for setting in found} - {""}):
                raise OptionError(key, f"{problem}; rows have {', '.join(texts)}")
            known = {known for setting in settings for known in setting.changes}
            raise OptionError(key, f"{problem}{nearest(option, known)}")
        found = kept
    return found


def has_value(setting: Setting, option: str, value: Any) -> bool:
    """Returns whether the run of a setting has the `value` of an option, of all entries that the option names."""
    if setting.changes.get(option) == to_text(value):
        return True
    held = setting.values_of(option)
    return bool(held) and all(contains(own, value) for own in held)


def contains(held: Any, wanted: Any) -> bool:
    """Returns whether the plain value `held` is what is `wanted`, see `select`."""
    if isinstance(held, Mapping):
        asked = wanted if isinstance(wanted, Mapping) else {"name": wanted}
        return all(name in held and contains(held[name], value) for name, value in asked.items())
    if isinstance(held, list) and isinstance(wanted, list):
        return len(held) == len(wanted) and all(map(contains, held, wanted))
    return held == wanted and isinstance(held, bool) == isinstance(wanted, bool)


def select_only(settings: Sequence[Setting], texts: Sequence[str]) -> list[Setting]:
    """Returns the settings that the values ``"OPTION=VALUE"`` of --only name; all of them without any.

    Raises:
        ConfigError: a text of another form, or a value that no row has.
    """
    wanted = {}
    for text in texts:
        option, equals, value = text.partition("=")
        if not option or not equals:
            raise ConfigError(f"--only {text!r}: expected OPTION=VALUE")
        wanted[option] = parse_yaml(value, lambda line, text=text: f"--only {text}").values
    with as_config_error():
        return select(settings, wanted, "--only")


def put_first(settings: Sequence[Setting], baseline: Mapping[str, Any]) -> list[Setting]:
    """Returns the settings with the one that `baseline` names first, as differences are to the first row.

    Raises:
        OptionError: it names none, or several.
    """
    found = select(settings, baseline, "baseline")
    if len(found) > 1:
        names = dict(zip(map(id, settings), short_names(settings), strict=True))
        several = "; ".join(names[id(setting)] for setting in found)
        raise OptionError("baseline", f"{to_text(baseline)} is in {len(found)} rows ({several}); name one of them")
    return [*found, *(setting for setting in settings if setting is not found[0])]
