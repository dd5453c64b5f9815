"""Rows of the papers' tables with accuracy and cost of a model, by its configuration."""

import functools
from dataclasses import dataclass
from pathlib import Path

from attention.options import option, parse_options
from engine.config.yaml_files import read_yaml

PAPERS = Path(__file__).with_name("papers.yaml")


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """A row of a paper's table. Figures are as printed there; None: not printed."""

    config: str  # a file below configs/, timm:ARCHITECTURE, hf:TYPE of transformers, or the name of another model
    overrides: tuple[str, ...] = option((), "key.path=value, as on a command line, or options of hf:TYPE")
    source: str = option("", "paper and table; empty: for comparison")
    top1: float | None = option(None, "percent", above=0)
    parameters: float | None = option(None, "millions", above=0)
    macs: float | None = option(None, 'billions, printed as "G"', above=0)
    released_macs: float | None = option(None, "billions, counted in the papers' released code", above=0)
    step_ms: float | None = option(None, "milliseconds of a training step, on the paper's machine", above=0)
    memory_gb: float | None = option(None, "memory in training there, GB", above=0)
    note: str = option("", "why our count does not round to what is printed")


@dataclass(frozen=True, kw_only=True)
class Papers:
    """Content of the file."""

    rows: tuple[PaperRow, ...]


@functools.cache
def read_papers(path: Path = PAPERS) -> tuple[PaperRow, ...]:
    """Reads all rows of a file; a ConfigError names file, line and field of a malformed one."""
    tree = read_yaml(path)
    with tree.locating():
        return parse_options(Papers, tree.values).rows
