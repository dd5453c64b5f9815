"""Runs an ablation: a YAML grid -> runs -> one table.

    python ablate.py configs/ablation/quickstart.yaml --output runs/ablation
    python ablate.py configs/ablation/eva_table6.yaml data.root=/data/imagenet --output runs/eva_table6 \\
        --launcher "torchrun --nproc_per_node=8"

Every run is an ordinary run directory of train.py below --output. The same command again skips finished runs and
resumes unfinished ones. Started several times at once, also on several machines, it trains runs that are not running
elsewhere, and runs whose process was killed. --jobs K trains K runs at a time, each with its share of the GPUs or CPUs.
The tables (table.md, table.tex, table.csv, runs.csv) are rewritten after every run, the figures (table, pareto
and heat_map, as .png and .pdf) at the end or at a stop signal.
"""

import functools
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.runtime.signals import begin

if __name__ == "__main__":
    begin("ablation.command_line:parse_arguments")

from ablation.command_line import parse_arguments
from ablation.report import FIGURES, TABLES, count_finished, lost_runs, report_sweep, write_figures, write_tables
from ablation.runs import Case, check_begun, check_data, failure_mark, in_order
from ablation.sweep import read_ablation
from ablation.worker import is_busy, train_all
from engine.runtime.errors import ConfigError, refuse_bad_input
from engine.runtime.files import check_directory, write_file
from engine.runtime.locks import hold_lock
from engine.runtime.ownership import check_claim, make_output, remove_owned
from engine.runtime.reading import read_bounded
from engine.runtime.terminal import warn_once
from engine.runtime.text import one_line

SWEEP_FILE = "sweep.yaml"
"""File of the output: the ablation file, with the command above it."""

OUTPUT_FILES = (SWEEP_FILE, *TABLES, *FIGURES)
"""Names of the files of a sweep in its output."""


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with refuse_bad_input():
        launcher, output = shlex.split(args.launcher) or [sys.executable], args.output
        if shutil.which(launcher[0]) is None:
            raise ConfigError(f"--launcher: {launcher[0]!r} is not a command here")
        check_directory(output)
        ablation, settings, left_out = read_ablation(args.config, args.overrides, output, launcher)
        cases = in_order(settings)
        check_output(cases, output)
        report = functools.partial(report_sweep, ablation.caption, settings, left_out)
        if args.dry_run:
            check_claim(output, OUTPUT_FILES)
            seeds = ", ".join(map(str, sorted({seed for setting in settings for seed in setting.replicates})))
            print(report(), f"{len(settings)} rows, {settings[0].replicated_by} {seeds}", sep="\n", end="; ")
            return print(f"{count_finished(settings, args.jobs)}\nThe first run: {shlex.join(cases[0].command)}")
        if not args.launcher:  # which may have other machines train
            check_data(cases[: len(settings)])
        make_output(output, OUTPUT_FILES)
        store_sweep(args.config, args.overrides, output)
        for case in cases:  # this command tries failed runs again
            remove_owned(case.directory, [failure_mark(case).name])

        def write(is_last: bool = False) -> None:
            """Writes tables, and at last figures, unless a later command has added to the sweep."""
            print(report() if is_last else count_finished(settings, args.jobs), flush=True)
            if lost_runs(cases, output):
                problem = f"{output / TABLES[-1]} has runs that this command has not; the tables are left alone"
                return warn_once(f"{problem}; run the command again to write them")
            write_tables(ablation.caption, settings, output, left_out)
            if is_last:
                write_figures(ablation.caption, settings, output)

        try:
            train_all(cases, args.jobs, not args.no_wait, write)
        finally:
            write(is_last=True)
    exit_unless_finished(cases)


def check_output(cases: Sequence[Case], output: Path) -> None:
    """Refuses runs by the first problem: of the output's tables, or of the directory of a run."""
    if lost := lost_runs(cases, output):
        problem = f"{output}: holds another sweep, with {lost[0]}; rows, values and seeds may be added"
        raise ConfigError(f"{problem}; give another --output, or delete {output / TABLES[-1]} to keep its runs")
    for case in cases:
        check_directory(case.directory)
        if not case.result():
            check_claim(case.directory, [failure_mark(case).name])
    check_begun(cases)


def store_sweep(path: Path, overrides: Sequence[str], output: Path) -> None:
    """Writes the ablation file `path` into `output`, with the command in its first line."""
    command = shlex.join(["python", "ablate.py", str(path), *overrides, "--output", str(output)])
    with hold_lock(output / "lock", wait=True):
        write_file(output / SWEEP_FILE, f"# {one_line(command)}\n".encode() + read_bounded(path, 2**20))


def exit_unless_finished(cases: Sequence[Case]) -> None:
    """Names the runs that have failed, or are unfinished, and exits unless others train the rest.

    Raises:
        SystemExit: a run has failed, or no process trains one that is unfinished.
    """
    failed = [case for case in cases if case.has_failed()]
    unfinished = [case for case in cases if not case.result() and case not in failed]
    are_elsewhere = any(map(is_busy, unfinished))
    if are_elsewhere:
        print(f"{len(unfinished)} of {len(cases)} runs are running elsewhere: {list_directories(unfinished)}")
    if failed:
        sys.exit(f"error: {len(failed)} of {len(cases)} runs failed: {list_directories(failed)}")
    if unfinished and not are_elsewhere:
        sys.exit(f"error: {len(unfinished)} of {len(cases)} runs are not finished: {list_directories(unfinished)}")


def list_directories(cases: Sequence[Case]) -> str:
    return ", ".join(str(case.directory) for case in cases)


if __name__ == "__main__":
    main()
