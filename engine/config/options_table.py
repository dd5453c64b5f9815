"""Prints tables of every option of a run in Markdown, as in docs/options.md.

    python -m engine.config.options_table

The rows come from the dataclasses that hold the options: the sections of `engine.config.schema.Run`, and the `Config`
of every family of models and of every mechanism.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import yaml

from attention import ATTENTION
from engine.config.schema import Run
from models import MODELS

LIMITS = {"low": "≥", "above": ">", "high": "≤", "below": "<"}


def tables() -> str:
    """Returns a heading and a table for each section of a run, family of models and mechanism that has options."""
    families = {f"model ({family.__name__.lower()})": family.Config for family, _ in MODELS.values()}
    sections = {name: kind for name, kind in typing.get_type_hints(Run).items() if dataclasses.is_dataclass(kind)}
    mechanisms = {name: mechanism.Config for name, mechanism in ATTENTION.items()}
    of_runs = families | sections | {"(no section)": Run}
    chapters: dict[str, Mapping[str, Any]] = {"Runs": of_runs, "Mechanisms": mechanisms}
    parts = []
    for title, classes in chapters.items():
        parts.append(f"## {title}")
        parts += [f"### {name}\n\n{table(cls)}" for name, cls in classes.items() if dataclasses.fields(cls)]
    return "\n\n".join(parts)


def table(cls: type) -> str:
    """Returns a table with a row for every option of the dataclass `cls`; sections of a run have their own tables."""
    kinds = typing.get_type_hints(cls)
    header = ("option", "value", "default", "meaning")
    rows = [header, ("---",) * len(header)]
    for field in filter(lambda field: field.metadata, dataclasses.fields(cls)):
        default = "as follows from the others" if field.metadata["chosen"] else f"`{to_yaml(field.default)}`"
        value = to_words(kinds[field.name]) + limits(field.metadata)
        rows.append((f"`{field.name}`", value, default, field.metadata["meaning"]))
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)


def to_yaml(value: Any) -> str:
    """Returns `value` as a configuration writes it."""
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


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
        return f"list of {count}{to_words(arguments[0])}{'s' * (count != '1 ')}"
    if dataclasses.is_dataclass(kind) or kind is Any or origin is dict:
        return "mapping"
    return {bool: "true or false", int: "integer", float: "number", str: "text"}[kind]


def limits(metadata: Mapping[str, Any]) -> str:
    """Describes the range of an option: ``, ≥ 0, ≤ 1``."""
    return "".join(f", {sign} {metadata[key]:.7g}" for key, sign in LIMITS.items() if metadata[key] is not None)


if __name__ == "__main__":
    print(tables())
