"""Messages on options that are not there: the place where one is written, and what the user may have meant."""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attention import ATTENTION
from attention.options import OptionError, OptionErrors, UnknownOptionError, to_yaml
from attention.plugins import FLAG
from attention.registry import UnknownMechanism
from engine.config.schema import SECTIONS
from engine.config.yaml_files import Tree
from engine.runtime.errors import ConfigError
from models import MODELS
from models.assignment import Place, split_place


@contextmanager
def naming_origins(tree: Tree, overrides: Sequence[str]) -> Iterator[None]:
    """Context in which an `OptionError` becomes a `ConfigError` that names the places of its options."""
    try:
        yield
    except OptionError as error:
        problems = error.problems if isinstance(error, OptionErrors) else [error]
        texts = [_advise(problem, tree.values, overrides) for problem in problems]
        raise ConfigError(*(f"{tree.origin(x.key)}: {text}" for x, text in zip(problems, texts, strict=True))) from None


def _advise(error: OptionError, values: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Returns the message of `error`, with what the user may have meant."""
    if isinstance(error, UnknownMechanism) and (plugins := values.get("plugins")):
        flags = " ".join(f"{FLAG} {shlex.quote(plugin)}" for plugin in plugins)
        return f"{error.key}: the mechanism {error.name!r} came from a plugin; add {flags} if you trust it"
    return _advise_other(error, values, overrides) if isinstance(error, UnknownOptionError) else str(error)


def _advise_other(error: UnknownOptionError, values: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Returns the message of `error`, with what the user may have meant in another section."""
    for text in overrides:
        key, _, name = text.partition("=")
        form = r"attention\.\d+\.name" if isinstance(values["attention"], list) else r"attention\.name"
        if re.fullmatch(form, key) and error.key.startswith("attention"):
            whole = key.removesuffix(".name")
            entry = values["attention"][int(whole.partition(".")[2])] if "." in whole else values["attention"]
            place, _ = split_place(entry)
            mapping = to_yaml({**place, "name": name}).replace("}", ", ...}")
            remedy = f"give it as a whole, {f'{whole}={name} or ' * (not place)}{whole}={mapping}"
            return f"{error.key}: unknown option; {text} keeps the other options that the file gives: {remedy}"
    section, _, name = re.sub(r"\(\w+\)|\]", "", error.key).replace("[", ".").rpartition(".")
    options = sorted(_known_options(values.get("attention")), key=lambda option: option.startswith(f"{section}."))
    found = [option for option in options if option.endswith(f".{name}")]
    if not found and len(longer := [option for option in options if option.endswith(f"_{name}")]) == 1:
        found = longer
    if not found and "did you mean" not in str(error):
        names = {option.rpartition(".")[2]: option for option in options}
        found = [names[match] for match in difflib.get_close_matches(name, names, n=1, cutoff=0.75)]
    return f"{error.key}: unknown option; did you mean {' or '.join(map(repr, found))}?" if found else str(error)


def _known_options(attention: Any) -> list[str]:
    """Returns the paths of all options of a run whose attention has the plain options `attention`."""
    kinds = [*SECTIONS.items(), *(("model", family.Config) for family, _ in MODELS.values())]
    entries = {f"attention.{i}": entry for i, entry in enumerate(attention)} if isinstance(attention, list) else {}
    kinds += [(path, Place) for path in entries]
    for path, entry in (entries or {"attention": attention}).items():
        name = entry.get("name") if isinstance(entry, Mapping) else entry
        kinds += [(path, ATTENTION[name].Config)] if isinstance(name, str) and name in ATTENTION else []
    options = (f"{section}.{field.name}" for section, kind in kinds for field in dataclasses.fields(kind))
    return list(dict.fromkeys(options))
