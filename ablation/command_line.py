"""Command line of `ablate.py`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.runtime.arguments import PROCESSES, ArgumentParser, find_config


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of `ablate.py`, by default those of this process."""
    example = "python ablate.py configs/ablation/quickstart.yaml --output runs/ablation"
    parser = ArgumentParser(description=f"Run an ablation: a YAML grid -> runs -> one table.\n\n    {example}")
    add = parser.add_argument
    add("config", type=find_config, help="YAML file, see configs/ablation/")
    add("overrides", nargs="*", metavar="key.path=value", help="options of every run")
    add("--output", type=Path, required=True, help="directory of the runs and the table")
    add("--launcher", default="", help='command that starts train.py, e.g. "torchrun --nproc_per_node=8"')
    add("--jobs", type=PROCESSES, default=1, metavar="K", help="runs at the same time, each with its own GPUs (1)")
    add("--no-wait", action="store_true", help="end when all remaining runs are running elsewhere")
    add("--dry-run", action="store_true", help="check all runs, show the table and the first command, and end")
    return parser.parse_intermixed_args(arguments)
