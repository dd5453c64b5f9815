"""Prints tables of every option of a run in Markdown, as in docs/options.md.

    python -m engine.config.options_table

The rows come from the dataclasses that hold the options: the sections of `engine.config.schema.Run`, and the `Config`
of every family of models and of every mechanism.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from attention import ATTENTION
from attention.option_tables import table
from engine.config.schema import Run
from engine.runtime.arguments import ArgumentParser
from models import MODELS
from models.assignment import Place


def tables() -> str:
    """Returns a heading and a table for each section of a run, family of models and mechanism that has options."""
    families = {f"model ({family.__name__.lower()})": family.Config for family, _ in MODELS.values()}
    sections = {name: kind for name, kind in typing.get_type_hints(Run).items() if dataclasses.is_dataclass(kind)}
    mechanisms = {name: mechanism.Config for name, mechanism in ATTENTION.items()}
    of_runs = families | {"attention, as an entry of a list": Place} | sections | {"(no section)": Run}
    chapters: dict[str, Mapping[str, Any]] = {"Runs": of_runs, "Mechanisms": mechanisms}
    parts = []
    for title, classes in chapters.items():
        parts.append(f"## {title}")
        parts += [f"### {name}\n\n{table(cls)}" for name, cls in classes.items() if dataclasses.fields(cls)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    ArgumentParser(prog="python -m engine.config.options_table", description="Print every option.").parse_args()
    print(tables())
