"""Runs an ablation: a YAML grid -> runs -> one table.

    python ablate.py configs/ablation/quickstart.yaml --output runs/ablation_quickstart
    python ablate.py configs/ablation/eva_table6.yaml data.root=/data/imagenet --output runs/eva_table6 \\
        --launcher "torchrun --nproc_per_node=8"

Every run is an ordinary run directory of train.py below --output. The same command again skips finished runs and
resumes unfinished ones; at the same time, on another machine perhaps, it takes those that are not running elsewhere.
table.md, table.csv, runs.csv and table.png are rewritten after every run.
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ablation.sweep import in_order, read_ablation
from ablation.tables import markdown, write_tables
from ablation.worker import train_all
from engine.config import ConfigError, find_config, refuse_bad_input


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run an ablation: a YAML grid -> runs -> one table.")
    parser.add_argument("config", type=find_config, help="YAML file, see configs/ablation/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="options of every run")
    parser.add_argument("--output", type=Path, required=True, help="directory of the runs and the table")
    parser.add_argument("--launcher", default="", help='what starts train.py, e.g. "torchrun --nproc_per_node=8"')
    parser.add_argument("--dry-run", action="store_true", help="check all runs, show table and commands, and end")
    args = parser.parse_intermixed_args(arguments)
    with refuse_bad_input():
        launcher = shlex.split(args.launcher) or [sys.executable]
        if shutil.which(launcher[0]) is None:
            raise ConfigError(f"--launcher: {launcher[0]!r} is not a command here")
        ablation, settings = read_ablation(args.config, args.overrides, args.output, launcher)

    cases = in_order(settings)
    if args.dry_run:
        print(markdown(ablation.caption, settings))
        for case in cases:
            print(shlex.join(case.command))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    failed, elsewhere = train_all(cases, lambda: write_tables(ablation.caption, settings, args.output))
    print(markdown(ablation.caption, settings))
    if elsewhere:
        print(f"{len(elsewhere)} of {len(cases)} runs are running elsewhere: {', '.join(elsewhere)}")
    if failed:
        sys.exit(f"error: {len(failed)} of {len(cases)} runs failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
