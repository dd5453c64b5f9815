"""Runs an ablation: a YAML grid -> runs -> one table.

    python ablate.py configs/ablation/quickstart.yaml --output runs/ablation_quickstart
    python ablate.py configs/ablation/eva_table6.yaml data.root=/data/imagenet --output runs/eva_table6 \\
        --launcher "torchrun --nproc_per_node=8"

Every run is an ordinary run directory of train.py below --output. The same command again skips finished runs and
resumes unfinished ones; at the same time, on another machine perhaps, it takes those that are not running elsewhere.
table.md, table.csv and table.png are rewritten after every run.
"""

import argparse
import csv
import functools
import itertools
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from matplotlib.figure import Figure

from attention.options import OptionError, option, parse_options
from bench.costs import Costs, count_costs
from engine.checkpoint import list_differences
from engine.config import ConfigError, dump_run, find_config, flatten, load_run, parse_run, read_yaml, refuse_bad_input
from engine.files import hold_lock, is_locked
from engine.schema import Run
from engine.signals import STOPPED, handle_signals

TRAIN = str(Path(__file__).with_name("train.py"))


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """An ablation file: the runs of `grid`, then those of `runs`. `base` is relative to the file."""

    base: str
    caption: str = option("", "title of the table")
    grid: dict[str, Any] | None = option(None, "option key.path -> list of values; one run per combination")
    runs: tuple[dict[str, Any], ...] = option((), "options key.path -> value of each run; paper: its top-1 in a paper")


@dataclass(frozen=True)
class Case:
    """One run of an ablation.

    Attributes:
        changes: option -> YAML text of its value. paper: top-1 that a paper reports, percent. command: trains the run.
    """

    changes: dict[str, str]
    paper: float | None
    run: Run
    directory: Path
    command: list[str]

    @functools.cached_property
    def costs(self) -> Costs:
        """Parameters and MACs of the run's model."""
        return count_costs(self.run.model, self.run.attention)

    def result(self) -> dict[str, Any] | None:
        """The final record of train.py; None if the run is not finished, or was made with other options."""
        try:
            config = yaml.safe_load((self.directory / "config.yaml").read_text())
            records = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
            finals = [record for record in records if record["kind"] == "final"]
        except (FileNotFoundError, json.JSONDecodeError):  # an interrupted run may have been cut off within a line
            return None
        return finals[-1] if finals and is_same_run(config, self.run, self.directory) else None


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
        ablation, cases = read_ablation(args.config, args.overrides, args.output, launcher)

    if args.dry_run:
        print(markdown(ablation.caption, tabulate(cases)))
        for case in cases:
            print(shlex.join(case.command))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    failed, elsewhere = [], []
    for number, case in enumerate(cases, start=1):
        name = f"run {number}/{len(cases)}"
        print(f"{name}: {case.directory}", "(finished)" * bool(case.result()), flush=True)
        case.directory.mkdir(parents=True, exist_ok=True)
        with hold_lock(case.directory / "ablate.lock", wait=False) as is_held:  # train.py locks later than it begins
            is_free = is_held and not is_locked(case.directory)
            status = run_to_end(case.command) if is_free and not case.result() else 0
        if status == STOPPED:
            print(f"{name} is stopped; the same command goes on", flush=True)
            sys.exit(STOPPED)
        if status or not case.result():
            if not is_free or is_locked(case.directory):
                elsewhere.append(str(case.directory))
                print(f"{name} is running elsewhere", flush=True)
            else:
                failed.append(str(case.directory))
                print(f"{name} failed: {shlex.join(case.command)}", file=sys.stderr, flush=True)
        write_tables(ablation.caption, cases, args.output)
    print(markdown(ablation.caption, tabulate(cases)))
    if elsewhere:
        print(f"{len(elsewhere)} of {len(cases)} runs are running elsewhere: {', '.join(elsewhere)}")
    if failed:
        sys.exit(f"error: {len(failed)} of {len(cases)} runs failed: {', '.join(failed)}")


def is_same_run(config: dict[str, Any], run: Run, source: Path) -> bool:
    """Whether `config`, perhaps written by an older version, describes `run` as far as its results go."""
    if config == dump_run(run):
        return True
    try:
        config = dump_run(parse_run(config, str(source)))
    except ConfigError:
        return False
    return not list_differences(flatten(config), flatten(dump_run(run)))


def run_to_end(command: Sequence[str]) -> int:
    """Runs `command`, passes stop signals on to it, which a run answers by saving, and returns its exit status.

    After a signal that is `STOPPED`, whatever the status: torchrun ends with 1 when its ranks are stopped.
    """
    stopped = False
    with subprocess.Popen(command) as process:

        def pass_on(number: int, frame: FrameType | None) -> None:
            nonlocal stopped
            stopped = True
            if number != signal.SIGINT:  # which a terminal sends to both
                process.send_signal(number)

        with handle_signals(pass_on):
            while process.poll() is None:
                # A signal may interrupt another thread than this one, which an endless wait would not notice.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
    return STOPPED if stopped else process.returncode


def read_ablation(
    path: Path, overrides: Sequence[str], output: Path, launcher: Sequence[str]
) -> tuple[Ablation, list[Case]]:
    """The ablation file `path` and its runs, all checked; nothing is written.

    Raises:
        ConfigError: anything that cannot be honoured, in the file or in a run.
    """
    tree, cases = read_yaml(path), {}
    try:
        ablation = parse_options(Ablation, tree.values)
        grid = ablation.grid or {}
        for key, values in grid.items():
            if not isinstance(values, list) or not values:
                raise OptionError(f"grid.{key}", f"expected a list of values, got {values!r}")
        product = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()) if values]
        if not product and not ablation.runs:
            raise OptionError("runs", "no runs; give grid or runs")
    except OptionError as error:
        raise ConfigError(f"{tree.origin(error.key)}: {error}") from None

    base = path.parent / ablation.base
    keys = ["grid"] * len(product) + [f"runs.{i}" for i in range(len(ablation.runs))]
    for key, options in zip(keys, [*product, *ablation.runs], strict=True):
        changes = {option: to_text(value) for option, value in options.items() if option != "paper"}
        settings = [f"{option}={text}" for option, text in changes.items()]
        name = re.sub(r"[^\w.=,]+", "-", re.sub(r"[{}\s]", "", ",".join(settings)).replace(":", "=")) or "base"
        paper = options.get("paper")
        try:
            if name in cases:
                raise ConfigError(f"a second run with {name}")
            if not isinstance(paper, float | int | None):
                raise ConfigError(f"paper: expected a number, got {paper!r}")
            run = load_run(base, [*overrides, *settings])
        except ConfigError as error:
            raise ConfigError(f"{tree.origin(key)}: {key}: {error}") from None
        command = [*launcher, TRAIN, str(base), *overrides, *settings, "--output", str(output / name)]
        cases[name] = Case(changes, paper, run, output / name, command)
    return ablation, list(cases.values())


def to_text(value: Any) -> str:
    """`value` as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").strip()


def tabulate(cases: Sequence[Case]) -> list[dict[str, str]]:
    """One row of texts per run; values not known yet are empty.

    Accuracies are those after the last epoch: "top-1" of the plain weights, "EMA top-1" of averaged ones, if any run
    keeps them.
    """
    changed = dict.fromkeys(option for case in cases for option in case.changes)
    averages, rows = any(case.run.train.ema_decay for case in cases), []
    for case in cases:
        result = case.result() or {}
        averaged = {"EMA top-1 (%)": (result.get("ema_top1"), ".2f")} if averages else {}
        numbers = {
            "parameters (M)": (case.costs.parameters / 1e6, ".3f"),
            "MACs (G)": (case.costs.macs / 1e9, ".3f"),
            "step (s)": (result.get("step_seconds"), ".3f"),
            "peak memory (MB)": (result.get("memory_mb"), ".0f"),
            "top-1 (%)": (result.get("top1"), ".2f"),
            **averaged,
            "paper (%)": (case.paper, ".2f"),
        }
        texts = {name: "" if number is None else f"{number:{form}}" for name, (number, form) in numbers.items()}
        rows.append({option: case.changes.get(option, "") for option in changed} | texts)
    return rows


def markdown(caption: str, rows: Sequence[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return f"{caption}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short_names(cases: Sequence[Case]) -> list[str]:
    """A name for each run from the options in which the runs differ: "window_size=7, num_landmarks=49"."""
    changed = dict.fromkeys(option for case in cases for option in case.changes)
    varied = [option for option in changed if len({case.changes.get(option) for case in cases}) > 1]
    return [
        ", ".join(f"{o.rpartition('.')[2]}={case.changes[o]}" for o in varied if o in case.changes) or "base"
        for case in cases
    ]


def write_tables(caption: str, cases: Sequence[Case], output: Path) -> None:
    """Writes table.md, table.csv and table.png into `output`."""
    with hold_lock(output / "lock", wait=True):
        _write_tables(caption, cases, output)


def _write_tables(caption: str, cases: Sequence[Case], output: Path) -> None:
    rows = tabulate(cases)
    (output / "table.md").write_text(markdown(caption, rows))
    with (output / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)

    figure = Figure(figsize=(9, 1.5 + 0.35 * len(cases)), layout="constrained")
    axes = figure.add_subplot(title=caption, xlabel="top-1 (%)")
    names = short_names(cases)
    for label, column, marker in (("measured", "top-1 (%)", "o"), ("paper", "paper (%)", "x")):
        points = [(float(row[column]), name) for row, name in zip(rows, names, strict=True) if row[column]]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, label=label)
            axes.legend()
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="x")
    figure.savefig(output / "table.png", dpi=150)


if __name__ == "__main__":
    main()
