"""Sweeps: rows that options name, keys of stages, tables of every format, the stored file, progress and estimates."""

import csv
import fcntl
import json
import os
import pty
import re
import select
import shlex
import struct
import sys
import termios
from pathlib import Path

import pytest

import ablate
from ablation import progress, worker
from ablation.cases import Case
from ablation.estimate import Estimate, estimate_sweep
from ablation.identity import SWEEP_FILE
from ablation.names import short_names
from ablation.progress import Progress
from ablation.report import latex_table, make_report, to_json, to_latex, write_tables
from ablation.settings import in_order
from ablation.sweep import read_ablation
from ablation.tables import tabulate
from ablation.worker import ErrorLines, describe_status
from engine.runtime.processes import run_to_end
from tests.support.partition import chosen
from tests.support.sweeps import BASE, read, refusal, write_records

SWEEP = """\
caption: Windows & more
base: base.yaml
seeds: 2
baseline: {attention: softmax}
runs:
  - {attention.window_size: 1}
  - {schedule.epochs: 2}
  - {attention: softmax}
"""
PYRAMID = """\
model: {name: pvtv2_b0, img_size: 64}
attention: {name: local, window_size: 2}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE.replace("epochs: 1", "epochs: 4"))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path / "sweep.yaml"


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch) -> None:
    monkeypatch.setattr(ablate, "write_figures", lambda *arguments: None)


def finish(case: Case, **values: float) -> None:
    record = {"kind": "final", "epoch": 4, "step": 40, "top1": 90.0, "elapsed_seconds": 36.0}
    write_records(case, record | values)


def output_of(config: Path) -> Path:
    return config.parent / "out"


def dry_run(config: Path, *arguments: str) -> None:
    ablate.main([str(config), "--output", str(output_of(config)), "--dry-run", *arguments])


def test_the_baseline_becomes_the_first_row(config):
    _, settings, _ = read(config)
    assert [setting.run.attention["name"] for setting in settings] == ["softmax", "local", "local"]
    for setting, top1 in zip(settings, (90, 92, 89), strict=True):
        finish(setting.cases[0], top1=top1)
    assert tabulate(settings).programs["top-1 difference"] == ["", "+2.00", "-1.00"]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("{attention: linear}", "sweep.yaml:4: baseline: attention = linear: no row has it; rows have local, {name:"),
        ("{attention.name: local}", "sweep.yaml:4: baseline: {attention.name: local} is in 2 rows (E=1; epochs=2); na"),
        ("{attention.windw: 1}", "sweep.yaml:4: baseline: attention.windw = 1: no row has it; did you mean 'attention"),
        ("softmax", "sweep.yaml:4: baseline: expected"),
    ],
)
def test_a_baseline_that_is_not_one_row_is_one_line(config, baseline, expected):
    config.write_text(
        SWEEP.replace("{attention: softmax}\nruns", f"{baseline}\nruns").replace("- {attention: s", "- {attention: s")
    )
    assert refusal(config).replace("rows have local, softmax", "rows have local, {name:").startswith(expected)


def test_empty_cells_have_the_values_that_hold(config):
    """Softmax attention has no windows."""
    _, settings, _ = read(config)
    table = tabulate(settings).programs
    assert table["attention.window_size"] == ["", "1", "2"]
    assert table["schedule.epochs"] == ["4", "4", "2"]
    assert table["attention"] == ["softmax", "local", "local"]


@pytest.mark.complete
def test_only_some_rows_are_trained_and_shown_with_the_first(config, capsys, tmp_path):
    launcher = shlex.join([sys.executable, "-c", "raise SystemExit(75)"])
    dry_run(config, "--only", "attention.window_size=1", "--launcher", launcher)
    out = capsys.readouterr().out
    assert len(re.findall("--output", out)) == 2
    assert "| softmax |" in out
    assert "| local | 1 |" in out
    assert "| 2 |" not in out.partition("\n\n±")[0].replace("| seeds | 2 |", "")
    assert "2 runs of 1 rows, train.seed 0, 1; 0 are finished." in out
    for only, problem in (
        ("attention.window_size=5", "--only: attention.window_size = 5: no row has it; rows have 1, 2"),
        ("window", "--only 'window': expected OPTION=VALUE"),
    ):
        with pytest.raises(SystemExit, match="2"):
            dry_run(config, "--only", only)
        assert capsys.readouterr().err == f"error: {problem}\n"


def test_tables_of_some_rows_are_those_of_all(config):
    """Another worker trains the other rows into the same output."""
    launcher = shlex.join([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit):
        ablate.main(
            [str(config), "--output", str(output_of(config)), "--only", "schedule.epochs=2", "--launcher", launcher]
        )
    with (output_of(config) / "table.csv").open() as file:
        assert len([*csv.DictReader(file)]) == 3
    assert len([*output_of(config).glob("*/ablate.failed")]) == 2


def test_failures_of_workers_are_told_at_the_end(config, capfd, monkeypatch):
    """The workers write their lines into logs."""

    def fail(command: list[str], jobs: int, output: Path, shown: Progress) -> None:
        assert command[-2:] == ["--only", "attention.window_size=1"]
        for case in cases:
            worker.train(case, "run 1/2", shown)
        capfd.readouterr()

    say = "import sys; print('error: no', file=sys.stderr); sys.exit(3)"
    launcher = shlex.join([sys.executable, "-c", say])
    cases = read_ablation(config, [], output_of(config), shlex.split(launcher))[1][1].cases[:1]
    cases[0].directory.mkdir(parents=True)
    monkeypatch.setattr(ablate, "run_jobs", fail)
    arguments = [str(config), "--output", str(output_of(config)), "--launcher", launcher, "--jobs", "2"]
    with pytest.raises(SystemExit, match="error: 1 of 2 runs failed"):
        ablate.main([*arguments, "--only", "attention.window_size=1"])
    assert capfd.readouterr().err.startswith(f"run 1/2 failed, status 3: error: no\n  {launcher} ")


def test_keys_of_stages_are_those_of_the_size_and_of_one_mechanism(config):
    """The base gives neither a list of mechanisms nor depths: they are written out."""
    (config.parent / "base.yaml").write_text(PYRAMID + "data: {dataset: digits}\ntrain: {device: cpu, amp: null}\n")
    config.write_text(
        "base: base.yaml\ngrid:\n  attention.0-1.window_size: [2, 4]\n"
        "  attention.2: [softmax]\n  model.depths.2: [1, 2]\n"
    )
    _, settings, _ = read(config)
    run = settings[2].run
    assert run.model["depths"] == [2, 2, 1, 2]
    assert [entry["name"] for entry in run.attention] == ["local", "local", "softmax", "softmax"]
    assert [entry.get("window_size") for entry in run.attention[:2]] == [4, 4]
    assert short_names(settings)[2] == "0-1: E=16, depths.2=1"
    assert "attention.1.window_size=4" in settings[2].cases[0].command
    config.write_text("base: base.yaml\ngrid: {attention.1-0.window_size: [2]}\n")
    assert refusal(config).startswith(
        "sweep.yaml:2: grid: attention.1-0.window_size = '1-0': expected a number, a range"
    )


def test_numbers_are_numbers_in_json_and_runs_have_their_figures(config):
    _, settings, _ = read(config)
    finish(settings[1].cases[0], loss=0.25, top5=99.0)
    stored = json.loads(to_json("", settings))["rows"]
    assert stored[1]["changes"] == {"attention.window_size": 1}
    assert stored[2]["changes"] == {"schedule.epochs": 2}
    write_tables("Windows", settings, config.parent)
    with (config.parent / "runs.csv").open() as file:
        run = [*csv.DictReader(file)][1]
    columns = ("epochs", "loss", "top-1 (%)", "top-5 (%)", "hours", "attention.window_size")
    assert [float(run[column]) for column in columns] == [4, 0.25, 90, 99, 0.01, 1]


def test_the_latex_table_is_that_of_markdown(config):
    _, settings, _ = read(config)
    for case in in_order(settings):
        finish(case, top1=90.0 + case.run.train.seed)
    text = to_latex("Windows & more", make_report(settings, tabulate(settings).readers))
    assert "  \\caption{Windows \\& more. All rows: seeds = 2.}\n" in text
    assert text.count(" \\\\\n") == 4
    assert "attention.window\\_size & schedule.epochs" in text
    assert "$90.50 \\pm 0.71$ & $+0.00 \\pm 0.00$ (noise) \\\\\n" in text
    assert text.index("\\toprule") < text.index("\\midrule") < text.index("\\bottomrule")
    assert "\n% ± is the standard deviation over seeds." in text
    assert latex_table("", ["a", "b"], [["{x: 1}", "-2"]]).count("{lr}") == 1


CHANGES = {
    "a value": ("runs:", "grid: {optim.lr: [1.0e-3]}\nruns:"),
    "a row": ("runs:", "runs:\n  - {attention: linear}"),
    "seeds": ("seeds: 2", "seeds: [1, 0, 5]"),
    "the caption": ("Windows & more", "Others"),
    "the baseline": ("baseline: {attention: softmax}\n", ""),
}


@pytest.mark.parametrize("change", chosen(CHANGES, ("a row", "seeds").__contains__))
def test_a_sweep_goes_on_with_what_is_added(config, change):
    stop = [
        "--output",
        str(output_of(config)),
        "--launcher",
        shlex.join([sys.executable, "-c", "raise SystemExit(75)"]),
    ]
    with pytest.raises(SystemExit, match="75"):
        ablate.main([str(config), *stop])
    stored = (output_of(config) / SWEEP_FILE).read_text()
    assert stored == f"# python ablate.py {config} --output {output_of(config)}\n{SWEEP}"
    config.write_text(SWEEP.replace(*CHANGES[change]))
    with pytest.raises(SystemExit, match="75"):
        ablate.main([str(config), *stop])
    assert (output_of(config) / SWEEP_FILE).read_text().endswith(config.read_text())


def test_tables_are_left_to_a_later_command_that_adds_rows(config, capsys, monkeypatch):
    """The first worker begins before the row is added, and ends last."""
    longer = SWEEP.replace("runs:", "runs:\n  - {attention: linear}")

    def add_row(cases: list[Case], *_: object) -> list[Case]:
        if config.read_text() == SWEEP:
            config.write_text(longer)
            with pytest.raises(SystemExit, match="8 of 8 runs are not finished"):
                ablate.main(arguments)
            assert table.read_text().count("\n") == 5
        return []

    table, arguments = output_of(config) / "table.csv", [str(config), "--output", str(output_of(config)), "--no-wait"]
    monkeypatch.setattr(ablate, "train_all", add_row)
    with pytest.raises(SystemExit, match="6 of 6 runs are not finished"):
        ablate.main(arguments)
    assert table.read_text().count("\n") == 5
    stored = output_of(config) / SWEEP_FILE
    assert stored.read_text().endswith(longer)
    problem = "has runs that this command has not; the tables are left alone; run the command again to write them"
    assert capsys.readouterr().err == f"warning: {stored} {problem}\n"


GRID = "base: base.yaml\nseeds: 2\ngrid: {optim.lr: [1.0e-3, 2.0e-3], schedule.epochs: [3]}\n"


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        (SWEEP, SWEEP.replace("base.yaml", "other.yaml"), "base: base.yaml -> other.yaml"),
        (SWEEP, SWEEP.replace("seeds: 2", "seeds: [0, 3]"), "seeds: [1] was removed"),
        (SWEEP, SWEEP.replace("seeds: 2\n", ""), "seeds: 2 was removed"),
        (SWEEP, SWEEP.replace("{attention.window_size: 1}", "{}"), "runs.0: {attention.window_size: 1} was removed"),
        (SWEEP, GRID, "runs.0: {attention.window_size: 1} was removed; runs.1"),
        (GRID, GRID.replace("2.0e-3", "3.0e-3"), "grid.optim.lr: [0.002] was removed"),
        (GRID, GRID.replace(", schedule.epochs: [3]", ""), "grid.schedule.epochs: [3] was removed"),
        (
            GRID,
            GRID.replace("[3]", "[3], train.ema_decay: [0.9]"),
            "grid.train.ema_decay: [0.9] was not set before, and would change all runs",
        ),
        (
            GRID,
            GRID + "match: {layer_macs: 1.0}\n",
            "match: {layer_macs: 1.0} was not set before, and would change all runs",
        ),
        ("bases: [base.yaml]\n", "bases: [base.yaml]\nruns: [{}]\n", "bases: as they are -> changed by all settings"),
    ],
)
def test_another_sweep_is_refused_with_the_difference(config, capsys, before, now, difference):
    output_of(config).mkdir()
    (output_of(config) / SWEEP_FILE).write_text(before)
    config.write_text(now)
    with pytest.raises(SystemExit, match="2"):
        dry_run(config)
    error = capsys.readouterr().err
    head = f"error: {output_of(config)}: holds another sweep; values and runs may be added, but {difference}"
    assert error.startswith(head)
    assert error.endswith(
        "; give another --output, --only to leave rows out,"
        f" or delete {output_of(config)}/sweep.yaml to keep its runs\n"
    )
    assert error.count("\n") == 1


def test_a_dry_run_plans_runs_and_their_time(config, monkeypatch):
    """By a timed step, then by finished runs: their own row's, else all rows', for each epoch."""
    _, settings, _ = read(config)
    text = estimate_sweep(settings, 1)
    assert text.startswith("6 runs of 3 rows, train.seed 0, 1; 0 are finished.\nThey take about 0:")
    assert re.search(r"a training step of the first row was timed on .+ with 8 images; other rows in prop", text)
    finish(settings[0].cases[0])  # 4 epochs of 9 seconds
    finish(settings[1].cases[0], elapsed_seconds=4 * 60.0)
    assert estimate_sweep(settings, 1).endswith(
        "2 are finished.\nThe others take about 0:06:54, one after the other, at the speed of the runs so far."
    )  # 36 + 240 + 2 runs of 2 epochs of 34.5 seconds on average


def test_a_run_that_has_begun_goes_on_at_its_speed(config):
    _, settings, _ = read(config)
    estimate = Estimate(settings)
    assert (estimate.look(), len(estimate.cases), estimate.seconds_left()) == (0, 6, None)
    start = {"kind": "start", "epoch": 0, "step": 0, "elapsed_seconds": 0.0, "total_steps": 40}
    write_records(settings[0].cases[0], start, {"kind": "train", "epoch": 1, "step": 10, "elapsed_seconds": 20.0})
    # 80 seconds for 40 steps, of which 60 are left; 3 other runs of 4 epochs, and 2 of 2 epochs, are not begun
    assert estimate.seconds_left() == pytest.approx(60 + 3 * 80 + 2 * 40)
    finish(settings[1].cases[0], elapsed_seconds=8.0)
    assert estimate.look() == 1
    assert estimate.seconds_left() == pytest.approx(60 + 8 + 8 + 2 * 4)


def test_a_sweep_without_a_terminal_prints_lines(config, capsys, monkeypatch):
    """Runs that other processes train are announced, with their last line and the time left."""
    _, settings, _ = read(config)
    case, other = in_order(settings)[:2]
    locked = {case.directory}
    monkeypatch.setattr(progress, "is_locked", lambda directory: directory in locked)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0)
    monkeypatch.setattr(progress, "REPORT_SECONDS", 0)
    case.directory.mkdir(parents=True)
    with Progress(settings, announces=True) as shown:
        shown.tick()
        assert capsys.readouterr().out == (f"run 1/6: {case.directory}\n0 of 6 runs finished\n  run 1/6: starting\n")
        (case.directory / "console.log").write_text("train  epoch 1/4  step 5/88\n")
        monkeypatch.setattr(progress, "REPORT_SECONDS", 9)
        shown.tick()
        assert capsys.readouterr().out == ""
        locked |= {other.directory}
        locked.remove(case.directory)
        finish(case)
        shown.tick()
    assert capsys.readouterr().out == (
        f"run 2/6: {other.directory}\nrun 1/6 is finished, top-1 90.00 %\n"
        "1 of 6 runs finished, about 0:02:24 left\n  run 2/6: starting\n"
    )


def test_a_terminal_shows_runs_under_way_below_what_is_printed(config, monkeypatch):
    """In a pseudo-terminal of 80 columns and 30 lines."""
    _, settings, _ = read(config)
    case = settings[0].cases[0]
    case.directory.mkdir(parents=True)
    (case.directory / "console.log").write_text(f"first\ntrain  epoch 1/4  step 5/88  {99 * 'x'}\n")
    monkeypatch.setattr(progress, "is_locked", lambda directory: directory == case.directory)
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    with os.fdopen(terminal, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        with Progress(settings) as shown:
            shown.write("printed")
        file.flush()
        text = ""
        while select.select([screen], [], [], 0.1)[0]:
            text += os.read(screen, 65536).decode()
    os.close(screen)
    assert "\r0 of 6 runs finished" in text
    (line,) = {line for line in re.split(r"[\r\n]", text) if "run 1/6: train epoch 1/4 step 5/88 x" in line}
    assert len(re.sub(r"\x1b\[\w", "", line)) <= 80
    assert "printed\r\n" in text


def test_a_failure_is_told_with_its_status_and_the_last_error(capfd):
    def run(program: str) -> tuple[str, str]:
        with ErrorLines(passes_on=True) as errors:
            status = run_to_end([sys.executable, "-c", f"import os, sys; {program}"], stderr=errors.pipe)
        return describe_status(status), errors.last()

    say = "print('error: out of memory', file=sys.stderr); print('====', file=sys.stderr)"
    assert run(f"{say}; sys.exit(3)") == ("status 3", "error: out of memory")
    assert capfd.readouterr().err == "error: out of memory\n====\n"
    assert run("print('Killed', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)") == ("signal SIGKILL", "Killed")
    assert run("raise ValueError('bad size')") == ("status 1", "ValueError: bad size")
    torchrun = "raise type('ChildFailedError', (Exception,), {})('train.py FAILED')"
    assert run(f"{say}; {torchrun}") == ("status 1", "error: out of memory")
    assert run("sys.exit(0)") == ("status 0 without a result", "")
    assert run("sys.exit(137)") == ("signal SIGKILL", "")
