"""Runs an ablation: a YAML grid -> runs -> one table.

    python ablate.py configs/ablation/quickstart.yaml --output runs/ablation_quickstart
    python ablate.py configs/ablation/eva_table6.yaml data.root=/data/imagenet --output runs/eva_table6 \\
        --launcher "torchrun --nproc_per_node=8"

Every run is an ordinary run directory of train.py below --output. The same command again skips finished runs and
resumes unfinished ones. Started several times at once, also on several machines, it trains runs that are not running
elsewhere, and runs whose process was killed. --jobs K starts it K times, each with its share of the GPUs or CPUs.
The tables (table.md, table.tex, table.csv, table.json, runs.csv) are rewritten after every run. The figures (table.png,
pareto.png, curves.png, heat_map.png) are rewritten at most once a minute, and at the end or at a stop signal.
"""

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ablation.cases import Case, check_data, check_options, failure_mark, last_failure
from ablation.estimate import estimate_sweep
from ablation.identity import SWEEP_FILE, check_sweep, is_extended, store_sweep
from ablation.progress import Progress
from ablation.report import FIGURES, TABLES, report_sweep, write_figures, write_tables
from ablation.schema import Ablation
from ablation.selection import select_only
from ablation.settings import Setting, in_order
from ablation.sweep import count_ranks, read_ablation
from ablation.worker import is_busy, run_jobs, train_all
from attention.plugins import as_arguments
from engine.run.load import find_config
from engine.runtime.arguments import PROCESSES, ArgumentParser
from engine.runtime.errors import ConfigError, refuse_bad_input
from engine.runtime.files import check_directory
from engine.runtime.ownership import RESULTS, check_claim, make_output
from engine.runtime.reading import read_text
from engine.runtime.signals import end_at_interrupt
from engine.runtime.terminal import warn_once

OUTPUT_FILES = (SWEEP_FILE, *TABLES, *FIGURES)
"""Names of the files of a sweep in its output."""


class Sweep(NamedTuple):
    """A sweep whose runs are all checked.

    Attributes:
        ablation: its file. all_settings: its rows. settings: the rows to train, which --only names.
        left_out: lines that name the settings without runs.
    """

    ablation: Ablation
    all_settings: list[Setting]
    settings: list[Setting]
    left_out: list[str]

    @property
    def cases(self) -> list[Case]:
        """The runs of all rows."""
        return [case for setting in self.all_settings for case in setting.cases]

    def report(self) -> str:
        """Returns the table of the first row and of those to train."""
        kept = (self.all_settings[0], *self.settings)
        return report_sweep(self.ablation.caption, [row for row in self.all_settings if row in kept], self.left_out)


class Results:
    """The tables and figures of a sweep in its output."""

    def __init__(self, sweep: Sweep, output: Path):
        self.sweep, self.output, self.drawn = sweep, output, time.monotonic()

    def write(self, is_last: bool = False) -> None:
        """Writes the tables, and the figures if the last ones are a minute old, or these are the last.

        Leaves them alone if a later command has added to the sweep.
        """
        ablation, all_settings = self.sweep.ablation, self.sweep.all_settings
        if is_extended(ablation, self.output):
            problem = f"{self.output / SWEEP_FILE} has runs that this command has not; the tables are left alone"
            return warn_once(f"{problem}; run the command again to write them")
        write_tables(ablation.caption, all_settings, self.output, self.sweep.left_out)
        if is_last or time.monotonic() - self.drawn > 60:
            write_figures(ablation.caption, all_settings, self.output)
            self.drawn = time.monotonic()


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with refuse_bad_input():
        launcher = shlex.split(args.launcher) or [sys.executable]
        if shutil.which(launcher[0]) is None:
            raise ConfigError(f"--launcher: {launcher[0]!r} is not a command here")
        check_directory(args.output)
        check_sweep(args.config, args.output)
        sweep = read_and_check(args, launcher)
        if args.dry_run:
            check_claim(args.output, RESULTS, OUTPUT_FILES)
    if args.dry_run:
        print(sweep.report())
        print(estimate_sweep(sweep.settings, count_ranks(launcher)))
        print(*(shlex.join(case.command) for case in in_order(sweep.settings)), sep="\n")
        return
    with refuse_bad_input():
        make_output(args.output, OUTPUT_FILES)
        store_sweep(args.config, args.overrides, args.output)
    failures = {case.directory: last_failure(case) for case in sweep.cases}
    results = Results(sweep, args.output)
    with refuse_bad_input():
        try:
            train(args, launcher, sweep.settings, failures, results)
        finally:
            print(sweep.report())
            results.write(is_last=True)
    exit_unless_finished(sweep.settings, failures, args.jobs)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description="Run an ablation: a YAML grid -> runs -> one table.")
    add = parser.add_argument
    add("config", type=find_config, help="YAML file, see configs/ablation/")
    add("overrides", nargs="*", metavar="key.path=value", help="options of every run")
    add("--output", type=Path, required=True, help="directory of the runs and the table")
    add("--launcher", default="", help='command that starts train.py, e.g. "torchrun --nproc_per_node=8"')
    add(
        "--jobs", type=PROCESSES, default=1, metavar="K", help="number of runs at the same time, each with its own GPUs"
    )
    add("--no-wait", action="store_true", help="end when all remaining runs are running elsewhere")
    add("--only", action="append", default=[], metavar="OPTION=VALUE", help="train rows with this value; repeatable")
    add("--dry-run", action="store_true", help="check all runs, show table, time and commands, and end")
    return parser.parse_intermixed_args(arguments)


def read_and_check(args: argparse.Namespace, launcher: Sequence[str]) -> Sweep:
    """Reads the sweep, and checks its runs and their directories; writes nothing.

    Raises:
        UserError, OptionError: the first problem.
    """
    ablation, all_settings, left_out = read_ablation(args.config, args.overrides, args.output, launcher)
    settings = select_only(all_settings, args.only)
    sweep = Sweep(ablation, all_settings, settings, left_out)
    for case in sweep.cases:
        check_directory(case.directory)
        if not case.result():
            check_claim(case.directory, RESULTS, [failure_mark(case).name])
    check_options(sweep.cases)
    check_data(in_order(settings))
    return sweep


def train(
    args: argparse.Namespace,
    launcher: Sequence[str],
    settings: Sequence[Setting],
    failures: Mapping[Path, int | None],
    results: Results,
) -> None:
    """Trains the runs of `settings` here, or by --jobs workers; for `failures` see `train_all`.

    Raises:
        SystemExit: stopped by a signal, after the runs have saved.
    """
    with end_at_interrupt(), Progress(settings, announces=args.jobs > 1) as progress:
        if args.jobs > 1:
            worker = [sys.executable, __file__, str(args.config), *args.overrides, "--output", str(args.output)]
            worker += ["--launcher", shlex.join(launcher), *["--no-wait"] * args.no_wait, *as_arguments()]
            worker += [part for text in args.only for part in ("--only", text)]
            return run_jobs(worker, args.jobs, args.output, progress)
        for _ in train_all(in_order(settings), failures, not args.no_wait, progress):
            results.write()


def exit_unless_finished(settings: Sequence[Setting], failures: Mapping[Path, int | None], jobs: int) -> None:
    """Names the runs that have failed since `failures`, or are unfinished, and exits unless others train the rest.

    Raises:
        SystemExit: a run has failed, or no process trains one that is unfinished.
    """
    cases = in_order(settings)
    failed = [case for case in cases if last_failure(case) != failures[case.directory]]
    unfinished = [case for case in cases if not case.result() and case not in failed]
    are_elsewhere = any(map(is_busy, unfinished))
    if are_elsewhere:
        print(f"{len(unfinished)} of {len(cases)} runs are running elsewhere: {list_directories(unfinished)}")
    if failed:
        if jobs > 1:  # their logs say it too
            print(*(read_text(failure_mark(case)) for case in failed), sep="\n", file=sys.stderr)
        sys.exit(f"error: {len(failed)} of {len(cases)} runs failed: {list_directories(failed)}")
    if unfinished and not are_elsewhere:
        sys.exit(f"error: {len(unfinished)} of {len(cases)} runs are not finished: {list_directories(unfinished)}")


def list_directories(cases: Sequence[Case]) -> str:
    return ", ".join(str(case.directory) for case in cases)


if __name__ == "__main__":
    main()
