"""A run while it is checked, step by step: what one step refuses, no later step can read."""

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from attention.options import OptionError, UnknownOptionError, collecting, parse_options, refuse
from engine.config.schema import SECTIONS, Run
from engine.config.yaml_files import Tree
from engine.run.advice import naming_origins

OPTIONS = {title: {field.name for field in dataclasses.fields(kind)} for title, kind in SECTIONS.items()}


class Unreadable(OptionError):
    """The reading of a refused option. It ends a check, and no message says it: another problem is the cause."""


class Draft:
    """A run of the options `tree`, checked by steps that each refuse all they can, so that one message has it all.

    Attributes:
        whole: the run, with defaults in the place of refused options. problems: what the steps have refused.
    """

    def __init__(self, tree: Tree, overrides: Sequence[str]):
        self.tree, self.overrides = tree, overrides
        self.problems, self.hidden = list[OptionError](), set[str]()
        with self.step():
            self.whole = parse_options(Run, tree.values)
        if self.problems:
            kept = {title: x for title, x in tree.values.items() if title in {*Run.__dataclass_fields__} - self.hidden}
            kept = {title: self.readable(title, x) if isinstance(x, dict) else x for title, x in kept.items()}
            self.whole = parse_options(Run, {"model": {}, "attention": None} | kept)

    @contextmanager
    def step(self) -> Iterator[list[OptionError]]:
        """Context of a check, whose `OptionError` is kept for `finish`, with those that it adds to the list."""
        found = list[OptionError]()
        with collecting(found):
            yield found
        for problem in found:
            self._hide(problem)
        self.problems += (problem for problem in found if not isinstance(problem, Unreadable))

    @property
    def run(self) -> Run:
        """The run as a check may read it: a refused option, or one that may have been meant, is `Unreadable`."""
        changed: dict[str, Any] = {}
        for title in {path.partition(".")[0] for path in self.hidden} - self.hidden:
            options, names = getattr(self.whole, title), {path.partition(".")[2] for path in self.hidden}
            changed[title] = _Mapping(options, names) if title == "model" else _hiding(options, names & OPTIONS[title])
        return _hiding(dataclasses.replace(self.whole, **changed), {path for path in self.hidden if "." not in path})

    def set(self, **sections: Any) -> None:
        """Replaces sections of the run."""
        self.whole = dataclasses.replace(self.whole, **sections)

    def readable(self, title: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of the plain `options` of a section that are not refused."""
        known = {name for name in OPTIONS.get(title, options) if f"{title}.{name}" not in self.hidden}
        return {name: value for name, value in options.items() if name in known}

    def finish(self) -> Run:
        """Returns the run; a ConfigError has a line for each problem of all steps."""
        with naming_origins(self.tree, self.overrides):
            refuse(self.problems)
        return self.whole

    def _hide(self, problem: OptionError) -> None:
        """Hides the option of a problem, or the section if that is named; for an unknown one, what it may stand for."""
        title, _, name = re.sub(r"[(\[].*?[)\]]", "", problem.key).partition(".")
        is_unknown = isinstance(problem, UnknownOptionError)
        if title in ("attention", "plugins"):  # mechanisms may be a plugin's
            self.hidden |= {title, "attention"}
        elif title == "model":
            self.hidden.add("model" if is_unknown or name in ("", "name") else f"model.{name}")
        elif not is_unknown:
            name = name.partition(".")[0]
            self.hidden |= {f"{title}.{name}"} if name in OPTIONS.get(title, ()) else {title} & SECTIONS.keys()
        else:
            meant, word = difflib.get_close_matches(title, SECTIONS, n=1), f"_{name or title}"
            for section, options in OPTIONS.items():
                given = self.tree.values.get(section)
                absent = options - given.keys() if isinstance(given, Mapping) else options
                names = {x for x in absent if f"_{x}".endswith(word)}
                if section in meant:
                    names |= set(difflib.get_close_matches(name, options, n=1))
                self.hidden |= {f"{section}.{x}" for x in names}


class _Mapping(dict[str, Any]):
    """Options of a model, of which `hidden` are `Unreadable`."""

    def __init__(self, options: Mapping[str, Any], hidden: Collection[str]):
        super().__init__(options)
        self.hidden = hidden

    def __getitem__(self, name: str) -> Any:
        return _refuse() if name in self.hidden else super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name in self.hidden else default


def _hiding(options: Any, names: Collection[str]) -> Any:
    """Returns a copy of a dataclass whose fields `names` are `Unreadable`, and which equals no other."""
    if not names:
        return options
    hiding: dict[str, Any] = dict.fromkeys(names, property(_refuse)) | {"__eq__": _refuse, "__hash__": None}
    copy: Any = object.__new__(type(type(options).__name__, (type(options),), hiding))
    vars(copy).update((name, value) for name, value in vars(options).items() if name not in names)
    return copy


def _refuse(*_: object) -> NoReturn:
    raise Unreadable("", "rests on an option that is refused")
