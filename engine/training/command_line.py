"""Command line of `train.py`."""

import argparse
import dataclasses
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path

from engine.config.option_pages import sections
from engine.config.schema import Run
from engine.runtime.arguments import ArgumentParser, find_config

OPTIONS = """\
options of a mechanism: python -m attention NAME
all options, with defaults and units: python -m engine.config.option_pages,
or docs/options.md
options of one run, as they are resolved: --dry-run
"""
"""Ways to list the options."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `train.py`, by default those of this process; `--help` shows the sections of a run."""
    example = "python train.py configs/quickstart.yaml schedule.epochs=3 --output runs/a"
    parser = ArgumentParser(description=f"Train a model.\n\n    {example}", epilog=describe_sections())
    add = parser.add_argument
    add("config", type=find_config, help="YAML file, see configs/")
    add("overrides", nargs="*", metavar="key.path=value", help="options in place of the file's: optim.lr=1e-3")
    add("--output", type=Path, required=True, help="directory of the run; an unfinished run resumes")
    add("--allow-change", action="append", default=[], metavar="KEY", help="what may differ, by name; repeatable")
    text = "print the resolved configuration, parameters, MACs, steps, images, memory, and what would be resumed"
    add("--dry-run", action="store_true", help=f"{text}; start and write nothing")
    kinds = [(name, kind) for name, kind in typing.get_type_hints(Run).items() if dataclasses.is_dataclass(kind)]
    parser.keys = {field.name: f"{name}.{field.name}" for name, kind in kinds for field in dataclasses.fields(kind)}
    return parser.parse_intermixed_args(arguments)


def describe_sections() -> str:
    """Returns the sections of a run with their descriptions, and ways to list their options."""
    indent = " " * 13
    lines = (textwrap.fill(f"  {name:10} {text}", 79, subsequent_indent=indent) for name, text in sections().items())
    return "\n".join(["sections, in the file and in key.path=value:", *lines, "", OPTIONS])
