"""Command line of `train.py`."""

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from engine.config.schema import SECTIONS, Run
from engine.runtime.arguments import ArgumentParser, find_config
from engine.runtime.reading import read_bounded
from engine.runtime.text import one_line

OPTIONS = """\
options of a mechanism: python -m attention NAME
all, with defaults and units: python -m engine.config.option_pages, docs/options
options of one run: --dry-run"""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `train.py`, by default those of this process; `--help` shows the sections of a run."""
    example = "python train.py configs/quickstart.yaml schedule.epochs=3 --output runs/a"
    names = textwrap.fill(f"sections of key.path=value, and of the file: {', '.join(Run.__dataclass_fields__)}", 79)
    parser = ArgumentParser(description=f"Train a model.\n\n    {example}", epilog=f"{names}\n\n{OPTIONS}")
    add = parser.add_argument
    add("config", type=find_config, help="YAML file, see configs/")
    add("overrides", nargs="*", metavar="key.path=value", help="options in place of the file's: optim.lr=1e-3")
    add("--output", type=Path, required=True, help="directory of the run; an unfinished run resumes")
    add("--allow-change", action="append", default=[], metavar="KEY", help="what may change on resuming; repeatable")
    text = "print parameters, MACs, steps, images, memory, what would be resumed, and the options"
    add("--dry-run", action="store_true", help=f"{text}; start and write nothing")
    parser.keys = {x.name: f"{name}.{x.name}" for name, kind in SECTIONS.items() for x in dataclasses.fields(kind)}
    return parser.parse_intermixed_args(arguments)


def quoted_top1(path: Path) -> str:
    """Returns what the comment of a configuration says of its top-1, on the line that begins with "Expected top-1:"."""
    found = re.search(r"^# (Expected top-1: .*)", read_bounded(path, 2**15).decode(errors="replace"), re.MULTILINE)
    return one_line(f"{path.name}: {found[1]}") if found else ""
