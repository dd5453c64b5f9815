"""Short names of settings, by the options in which they differ."""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from ablation.runs import Setting, expand, varied_options
from attention.options import OptionError, nearest
from engine.runtime.text import one_line

SYMBOLS = {"window_size": "E", "cluster_size": "E", "num_landmarks": "C", "num_samples": "S"}
"""Option -> symbol: |E| tokens of a window or cluster, C landmarks or groups, S samples. Names have them for short."""

WORD = re.compile(r"[\w./-]+")
"""Word of a short name."""


def short_names(settings: Sequence[Setting]) -> list[str]:
    """Names each setting by the options in which settings differ: "E=49, C=16", or "local, E=49".

    A mechanism has the `SYMBOLS` of its sizes, and the options in which settings of the same mechanism differ. Where
    such names would not tell all settings apart, they have every option that varies, in full. Settings of the same name
    have the size that is solved for `match` in theirs. The sweep's labels replace words of the names.
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
    in_full = [", ".join(f"{option}={text}" for option, text in changes.items()) or "base" for changes in chosen]
    for found_names in (names, in_full):
        sized = [
            f"{name}, {own.option}={own.value}" if (own := setting.matched) and found_names.count(name) > 1 else name
            for name, setting in zip(found_names, settings, strict=True)
        ]
        if len(set(sized)) == len(sized):
            break
    return [WORD.sub(lambda word: settings[0].labels.get(word[0], word[0]), name) for name in sized]


def check_labels(settings: Sequence[Setting], left_out: Sequence[str]) -> None:
    """Raises an OptionError for a label of no word in names of rows and `left_out`, or that is another's name."""
    names = short_names([replace(setting, labels={}) for setting in settings])
    words = {word for name in [*names, *left_out] for word in WORD.findall(name)}
    shown = {word: word for word in words} | settings[0].labels
    for word, text in settings[0].labels.items():
        if word not in words:
            raise OptionError(f"labels.{word}", f"no word of a row's name{nearest(word, words)}")
        if same := [other for other in shown if other != word and shown[other] == text]:
            raise OptionError(f"labels.{word}", f"{text!r} is also the name of {same[0]}; give another")


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
    """Returns the mappings of the option `attention`: a name, a mapping, a list of mappings, or a host's own (null)."""
    if isinstance(attention, str):
        return [{"name": attention}]
    if attention is None:
        return [{"name": "null"}]
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
    return f"{SYMBOLS.get(option, option)}={one_line(text, 24)}"  # short, in a name
