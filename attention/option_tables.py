"""Options for programs and readers: type, default, meaning, range and choices, and a table of them in Markdown."""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from .options import to_yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """An option of a mechanism, a family of models or a section of a run.

    Attributes:
        kind: type of its values, e.g. ``int`` or ``Literal["1d", "2d"] | None``.
        default: value of an option that is not given. meaning: what it sets, with its unit.
        low, high: least and largest valid number; above, below: the same, exclusive; None without such a limit.
        choices: valid values of an option that is a choice of several, otherwise empty.
        follows: True if the default, null, stands for a value that follows from the other options.
    """

    kind: Any
    default: Any
    meaning: str
    low: float | None
    high: float | None
    above: float | None
    below: float | None
    choices: tuple[Any, ...]
    follows: bool

    @property
    def values(self) -> str:
        """The valid values in words: ``integer, ≥ 1``, ``one of `1d`, `2d`, or null``."""
        signs = {"≥": self.low, ">": self.above, "≤": self.high, "<": self.below}
        return to_words(self.kind) + "".join(
            f", {sign} {limit:.7g}" for sign, limit in signs.items() if limit is not None
        )


def describe(cls: type) -> dict[str, OptionInfo]:
    """The options of the dataclass `cls` by name, in the order of their declaration; see `attention.options.option`.

    Fields that are not made by `option`, as the sections of a run, are left out.
    """
    kinds, described = typing.get_type_hints(cls), {}
    for field in (field for field in dataclasses.fields(cls) if "meaning" in field.metadata):
        kind, limits = kinds[field.name], {name: field.metadata[name] for name in ("low", "high", "above", "below")}
        literals = [kind, *typing.get_args(kind)]
        choices = (
            choice for literal in literals if typing.get_origin(literal) is Literal for choice in literal.__args__
        )
        described[field.name] = OptionInfo(
            kind=kind,
            default=field.default,
            meaning=field.metadata["meaning"],
            choices=tuple(choices),
            follows=field.metadata["chosen"] is not None,
            **limits,
        )
    return described


def table(cls: type) -> str:
    """A table in Markdown with a row for every option of the dataclass `cls`: name, values, default and meaning."""
    rows = []
    for name, about in describe(cls).items():
        default = "as follows from the others" if about.follows else f"`{to_yaml(about.default)}`"
        rows.append([cell.replace("|", r"\|") for cell in (f"`{name}`", about.values, default, about.meaning)])
    return markdown_table(["option", "value", "default", "meaning"], rows)


def markdown_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Formats a table in Markdown."""
    titles = [*titles]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *rows))


def to_words(kind: Any) -> str:
    """Describes the values of a type in a configuration: ``one of `bf16`, `fp16`, or null``."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(f"`{to_yaml(argument)}`" for argument in arguments)
    if origin in (types.UnionType, typing.Union):
        kinds = [to_words(argument) for argument in arguments if argument is not types.NoneType]
        return " or ".join(kinds) + ", or null" * (types.NoneType in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        items = to_words(arguments[0])
        return f"list of {count}{items}{'s' * (count != '1 ' and items[-1] != 's')}"
    if dataclasses.is_dataclass(kind) or kind is Any or origin is dict:
        return "mapping"
    return {bool: "true or false", int: "integer", float: "number", str: "text"}[kind]
