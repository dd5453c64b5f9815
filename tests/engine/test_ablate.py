"""Ablations: all runs are checked before the first starts; finished ones are skipped, a failed one stops no other."""

import csv
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, combinations, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import ablate
import train
from ablation import worker
from ablation.cases import Case
from ablation.figures import draw_curves, draw_heat_map, draw_pareto, draw_results, non_dominated, read_curve
from ablation.names import short_names
from ablation.progress import Progress
from ablation.report import FIGURES, report_sweep, to_json, write_figures, write_tables
from ablation.settings import Setting, in_order
from ablation.sweep import count_ranks, read_ablation, to_directory
from ablation.tables import ONE_RUN, measure, tabulate
from engine.checkpoints.files import find_checkpoint, save_checkpoint
from engine.data.idx import IMAGES, LABELS, write_idx
from engine.reporting.plots import in_style
from engine.reporting.tables import T_975, Spread, spread
from engine.run.load import dump_run
from engine.runtime import files
from engine.runtime.errors import ConfigError
from engine.runtime.ownership import RESULTS, claim
from engine.runtime.processes import run_to_end
from engine.runtime.signals import STOPPED
from engine.training.differences import NAMES_ONLY
from tests.support.sweeps import BASE, write_records

ABLATION = """\
caption: Windows
base: base.yaml
grid:
  attention.window_size: [1, 2]
  attention.position_bias: [table]
runs:
  - {attention: {name: softmax}, paper: 77.16}
"""
NAMES = [
    "attention.window_size=1,attention.position_bias=table",
    "attention.window_size=2,attention.position_bias=table",
    "attention=name=softmax",
]


REPLICATED = """\
caption: Windows
base: base.yaml
seeds: 3
runs:
  - {attention: softmax}
  - {attention.window_size: 1}
  - {attention.window_size: 2}
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "windows.yaml"
    path.write_text(ABLATION)
    return path


@pytest.fixture
def pictures() -> None:
    """Marks a test that looks at the figures."""


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch) -> None:
    """Figures take a second of each sweep."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(ablate, "write_figures", lambda *arguments: None)


@pytest.fixture
def launcher(tmp_path) -> str:
    """Stands for train.py: notes the run, and finishes it with the configuration that `announce` wrote."""
    path = tmp_path / "launcher.py"
    path.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "script, config, *overrides, flag, output = sys.argv[1:]\n"
        "assert Path(script).name == 'train.py' and flag == '--output'\n"
        "output, folder = Path(output), Path(config).parent\n"
        "with open(folder / 'log', 'a') as log: log.write(output.name + '\\n')\n"
        "if (folder / 'fail').exists() and 'window_size=1' in output.name: sys.exit(3)\n"
        "output.mkdir(parents=True, exist_ok=True)\n"
        "run = json.loads((folder / 'announced').read_text())[output.name]\n"
        "(output / 'config.yaml').write_text(run)\n"
        "evaluation = {'kind': 'eval', 'epoch': 1, 'step': 9, 'loss': 1.0}\n"
        "final = {'kind': 'final', 'epoch': 1, 'step': 9, 'top1': 97.5, 'ema_top1': 98.5}\n"
        "final |= {'step_seconds': 0.0123, 'memory_mb': 321.4}\n"
        "lines = json.dumps(evaluation) + '\\n' + json.dumps(final) + '\\n'\n"
        "(output / 'metrics.jsonl').write_text(lines)\n"
    )
    return shlex.join([sys.executable, str(path)])


def announce(config: Path, *overrides: str) -> None:
    """Tells the launcher which runs train.py would make of the configuration."""
    _, settings, _ = read_ablation(config, overrides, config.parent, [])
    dumped = {case.directory.name: yaml.safe_dump(dump_run(case.run)) for case in in_order(settings)}
    (config.parent / "announced").write_text(json.dumps(dumped))


def sweep(config: Path, launcher: str, *arguments: str) -> None:
    ablate.main([str(config), "--output", str(config.parent / "out"), "--launcher", launcher, *arguments])


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def rows(output: Path) -> list[dict[str, str]]:
    return read_csv(output / "table.csv")


@pytest.mark.complete
def test_runs_are_trained_tabulated_and_skipped_once_finished(config, launcher, pictures, capfd):
    output, log = config.parent / "out", config.parent / "log"
    announce(config, "train.seed=3")
    arguments = [str(config), "train.seed=3", "--output", str(output), "--launcher", launcher]
    ablate.main(arguments)
    assert log.read_text().split() == NAMES
    assert [yaml.safe_load((output / name / "config.yaml").read_text())["train"]["seed"] for name in NAMES] == [3] * 3
    table = rows(output)
    assert [row["attention.window_size"] for row in table] == ["1", "2", ""]
    assert [row["attention"] for row in table] == ["local", "local", "{name: softmax}"]
    assert [row["paper (%)"] for row in table] == ["", "", "77.16"]
    # 16 tokens, 1 layer; MACs by hand: patches + projections + attention + MLP + head
    patches, linear, head = 16 * 12 * 192, 12 * 16 * 12 * 12, 120
    macs = [patches + linear + 2 * 16 * keys * 12 + head for keys in (1, 4, 16)]
    assert [row["MACs (G)"] for row in table] == [f"{count / 1e9:#.4g}" for count in macs]
    for row in table:
        assert (row["step (s)"], row["peak memory (MB)"], row["top-1 (%)"]) == ("0.012", "321", "97.50")
    report_sweep = (output / "table.md").read_text()
    assert report_sweep.startswith("Windows\n\n| attention.window_size |")
    assert report_sweep in capfd.readouterr().out
    assert (output / "table.png").read_bytes().startswith(b"\x89PNG")

    ablate.main(arguments)
    assert log.read_text().split() == NAMES
    (output / NAMES[1] / "metrics.jsonl").write_text('{"kind": "final", "top')  # interrupted while it was written
    ablate.main(arguments)
    assert log.read_text().split() == [*NAMES, NAMES[1]]


def test_averaged_weights_have_a_column_of_their_own(config, launcher):
    config.write_text("base: base.yaml\nruns:\n  - {train.ema_decay: 0.9}\n  - {}\n")
    announce(config)
    sweep(config, launcher)
    assert [(row["top-1 (%)"], row["EMA top-1 (%)"]) for row in rows(config.parent / "out")] == [("97.50", "98.50")] * 2


@pytest.mark.parametrize("trace", ["metrics.jsonl", pytest.param("step_4.pt", marks=pytest.mark.complete)])
def test_runs_made_with_other_options_are_refused_before_any_run(config, launcher, capsys, trace):
    """By overrides, or an edited base: the results stay, and no other row is trained as theirs is not."""
    output, log = config.parent / "out", config.parent / "log"
    config.write_text(ABLATION + "  - {schedule.epochs: 3}\n")
    announce(config, "schedule.epochs=2")
    only, others = ["--only", "attention.window_size=1"], ["--only", "attention.name=softmax"]
    sweep(config, launcher, "schedule.epochs=2", *only)
    directory = output / NAMES[0]
    if trace != "metrics.jsonl":
        (directory / "metrics.jsonl").rename(directory / trace)
    before = {name: (output / name).read_bytes() for name in ("table.csv", "sweep.yaml")}
    capsys.readouterr()

    def refusal(*more: str) -> str:
        with pytest.raises(SystemExit) as ended:
            sweep(config, launcher, *more)
        assert ended.value.code == 2
        assert log.read_text().split() == NAMES[:1]
        assert {name: (output / name).read_bytes() for name in before} == before
        return capsys.readouterr().err

    problem = f"error: {directory}: was trained with other options; give them again, another --output, or move it elsew"
    problem += "here: {}: {} there, {} here\n"
    assert refusal() == refusal(*others) == refusal("--dry-run") == problem.format("schedule.epochs", 2, 1)
    assert refusal("schedule.epochs=2", "train.seed=4") == problem.format("train.seed", 0, 4)
    (config.parent / "base.yaml").write_text(BASE.replace("depth: 1", "depth: 2"))
    assert refusal("schedule.epochs=2") == problem.format("model.depth", 1, 2)


@pytest.mark.parametrize(
    ("change", "is_finished"),
    [({"attention": "softmax"}, True), ({"data": {"dataset": "digits"}}, True), ({"attention": "nystrom"}, False)],
    ids=["the mechanism by its name alone", "another number of workers", "a mechanism that cannot be built"],
)
def test_a_finished_run_may_be_written_otherwise(config, launcher, capsys, change, is_finished):
    """A run is the same if its options mean the same, however its config.yaml writes them."""
    output = config.parent / "out"
    config.write_text("base: base.yaml\nruns:\n  - {attention: softmax}\n")
    announce(config)
    sweep(config, launcher)
    (path,) = output.glob("*/config.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with nullcontext() if is_finished else pytest.raises(SystemExit, match="2"):
        sweep(config, launcher)
    assert (f"{path.parent}: was trained with other options" in capsys.readouterr().err) != is_finished
    assert len((config.parent / "log").read_text().splitlines()) == 1


def test_a_finished_run_may_be_asked_for_otherwise(config, launcher):
    """Its result stands when only options change with which a run may be resumed."""
    output = config.parent / "out"
    config.write_text("base: base.yaml\nruns:\n  - {attention: softmax}\n")
    announce(config)
    sweep(config, launcher)
    sweep(config, launcher, "data.workers=3", "train.log_every=7")
    assert len((config.parent / "log").read_text().splitlines()) == 1
    assert [row["top-1 (%)"] for row in rows(output)] == ["97.50"]


@pytest.mark.complete
def test_a_run_that_was_changed_within_is_marked(config, launcher):
    """Its result belongs to no setting alone."""
    output = config.parent / "out"
    announce(config)
    sweep(config, launcher)
    assert "changed" not in read_csv(output / "runs.csv")[0]
    with (output / NAMES[1] / "metrics.jsonl").open("a") as file:
        change = {"kind": "change", "epoch": 0, "step": 3, "option": "optim.lr", "before": 1e-3, "now": 5e-4}
        print(json.dumps(change), file=file)
    sweep(config, launcher)
    text = "optim.lr 0.001 -> 0.0005 at step 3"
    assert [row["changed"] for row in read_csv(output / "runs.csv")] == ["", text, ""]
    assert f"\n{NAMES[1]} changed options during training: {text}.\n" in (output / "table.md").read_text()


@pytest.mark.complete
def test_a_run_finished_on_other_data_is_refused(config, capsys):
    """One rule for the same data: that of train.py, which the checkpoint of the finished run answers."""
    rng, roots = np.random.default_rng(0), [config.parent / name for name in ("first", "second", "moved")]
    for root in roots[:2]:
        root.mkdir()
        for split in ("train", "val"):
            write_idx(root / f"{split}{IMAGES}.gz", rng.integers(0, 256, (64, 8, 8)))
            write_idx(root / f"{split}{LABELS}.gz", np.arange(64) % 10)
    shutil.copytree(*roots[::2])
    (config.parent / "classes").write_text("\n".join("1023456789"))
    config.write_text("base: base.yaml\nruns:\n  - {attention: softmax}\n")

    def sweep(root: Path, *overrides: str, status: int | None = None) -> str:
        options = ["data.dataset=idx", f"data.root={root}", *overrides]
        with pytest.raises(SystemExit) if status else nullcontext() as ended:
            ablate.main([str(config), *options, "--output", str(config.parent / "out"), "--launcher", "false"])
        assert (ended and ended.value.code) == status
        return capsys.readouterr().err

    directory = config.parent / "out" / "attention=softmax"
    options = ["attention=softmax", "data.dataset=idx", f"data.root={roots[0]}"]
    train.main([str(config.parent / "base.yaml"), *options, "--output", str(directory)])
    capsys.readouterr()
    assert sweep(roots[0]) == sweep(roots[2]) == ""
    table = (config.parent / "out" / "table.csv").read_bytes()
    assert rows(config.parent / "out")[0]["top-1 (%)"]
    problem = f"error: {directory}: was trained on other data; name its data again, or another --output: "
    classes = f"data.classes={config.parent / 'classes'}"
    assert sweep(roots[1], status=2).startswith(f"{problem}train_content: ")
    assert sweep(roots[0], classes, status=2).startswith(f"{problem}classes: the same names")
    assert sweep(config.parent / "absent", status=2) == f"error: data.root: no directory '{config.parent / 'absent'}'\n"
    assert (config.parent / "out" / "table.csv").read_bytes() == table

    path, checkpoint = find_checkpoint(directory, "last")
    save_checkpoint(path, {name: value for name, value in checkpoint.items() if not name.endswith("_content")})
    assert sweep(roots[1]) == f"warning: {path}: {NAMES_ONLY}\n"
    assert sweep(roots[0], classes, status=2).startswith(problem)
    for path in directory.glob("*.pt"):
        path.unlink()
    assert sweep(roots[0]).endswith("which data it was trained on is not known: no checkpoint there\n")
    save_checkpoint(path, checkpoint)
    (directory / "metrics.jsonl").unlink()  # as within the run
    assert sweep(roots[1], status=2).startswith(f"{problem}train_content: ")


@pytest.mark.parametrize("lock", ["lock", "ablate.lock"], ids=["of train.py", "of ablate.py"])
def test_a_run_that_another_process_trains_is_left_to_it(config, launcher, capfd, lock):
    config.write_text("base: base.yaml\nruns:\n  - {attention: softmax}\n  - {attention: linear}\n")
    announce(config)
    output, log = config.parent / "out", config.parent / "log"
    directory = output / "attention=softmax"
    directory.mkdir(parents=True)
    hold = "file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    other = [sys.executable, "-c", f"import fcntl, sys; {hold}", str(directory / lock)]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        sweep(config, launcher, "--no-wait")
        process.communicate()
    assert log.read_text().split() == ["attention=linear"]
    assert f"1 of 2 runs are running elsewhere: {directory}\n" in capfd.readouterr().out
    assert [row["top-1 (%)"] for row in rows(output)] == ["", "97.50"]
    sweep(config, launcher)
    assert log.read_text().split() == ["attention=linear", "attention=softmax"]
    assert [row["top-1 (%)"] for row in rows(output)] == ["97.50"] * 2


def test_a_run_that_another_process_begins_first_is_left_to_it(config, monkeypatch, capfd):
    """The run was free when the worker checked it, and train.py refuses it."""
    config.write_text("base: base.yaml\nruns:\n  - {attention: softmax}\n")
    answers = chain([False], repeat(True))
    monkeypatch.setattr(worker, "is_locked", lambda directory: next(answers))
    refusing = shlex.join([sys.executable, "-c", "raise SystemExit(2)"])
    ablate.main([str(config), "--output", str(config.parent / "out"), "--launcher", refusing, "--no-wait"])
    assert "run 1/1 is running elsewhere\n" in capfd.readouterr().out


def test_a_run_whose_process_is_killed_is_taken_over(config, launcher, monkeypatch, capfd):
    """A waiting worker, which has no other run left, takes it over."""
    config.write_text("base: base.yaml\nruns:\n  - {attention: softmax}\n")
    announce(config)
    _, [setting], _ = read_ablation(config, [], config.parent / "out", shlex.split(launcher))
    (case,) = setting.cases
    case.directory.mkdir(parents=True)
    hold = "file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    other = [sys.executable, "-c", f"import fcntl, sys; {hold}", str(case.directory / "ablate.lock")]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        monkeypatch.setattr(worker.time, "sleep", lambda seconds: (process.kill(), process.wait()))
        [*worker.train_all([case], {case.directory: None}, True, Progress([setting]))]
    assert case.result()
    assert "run 1/1 is running elsewhere\nwaiting for 1 runs elsewhere" in capfd.readouterr().out


def test_a_run_that_failed_in_another_worker_is_tried_again_by_the_next_command_only(config, launcher):
    config.write_text("base: base.yaml\nruns:\n  - {attention: softmax}\n")
    announce(config)
    _, [setting], _ = read_ablation(config, [], config.parent / "out", shlex.split(launcher))
    (case,) = setting.cases
    before = {case.directory: worker.last_failure(case)}
    assert not worker.is_busy(case)
    claim(case.directory, RESULTS, [worker.failure_mark(case).name])
    worker.failure_mark(case).touch()
    [*worker.train_all([case], before, True, Progress([setting]))]
    assert not case.result()
    failures = {case.directory: worker.last_failure(case)}
    [*worker.train_all([case], failures, True, Progress([setting]))]
    assert case.result()


@pytest.mark.parametrize(
    ("gpus", "visible", "jobs", "expected"),
    [
        (0, None, 2, [None, None]),
        (4, None, 2, ["0,2", "1,3"]),
        (2, None, 3, ["0", "1", "0"]),
        (2, "4,GPU-5", 2, ["4", "GPU-5"]),
    ],
)
def test_workers_share_the_devices(monkeypatch, gpus, visible, jobs, expected):
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(worker.os, "sched_getaffinity", lambda process: range(7))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environments = worker.share_devices(jobs)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments] == expected
    assert [environment["OMP_NUM_THREADS"] for environment in environments] == [str(7 // jobs)] * jobs


def test_jobs_are_processes_with_a_log_each(config, tmp_path, capfd):
    _, settings, _ = read_ablation(config, [], tmp_path / "out", [])
    progress = Progress(settings)
    say = "import os, sys; print(os.environ['OMP_NUM_THREADS']); print('oh', file=sys.stderr); raise SystemExit(9)"
    worker.run_jobs([sys.executable, "-c", say], 2, tmp_path, progress)
    for number in (1, 2):
        assert (tmp_path / f"worker_{number}.log").read_text().endswith("oh\n")
    assert f"a worker ended with status 9: {tmp_path}/worker_2.log\n" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        worker.run_jobs([sys.executable, "-c", f"raise SystemExit({STOPPED})"], 2, tmp_path, progress)
    assert ended.value.code == STOPPED


TWELVE = """\
base: base.yaml
seeds: 3
grid:
  attention.window_size: [1, 2]
  schedule.epochs: [2, 3]
"""
STAND_IN = """\
import fcntl, hashlib, json, sys, time
from pathlib import Path

output = Path(sys.argv[-1])
file = (output / "lock").open("a")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(2)
epochs = output / "epochs"
with (output / "metrics.jsonl").open("a") as metrics:
    print(json.dumps({"kind": "start", "epoch": 0, "step": 0}), file=metrics, flush=True)
    for epoch in range(int(epochs.read_text()) if epochs.exists() else 0, 4):
        time.sleep(0.05)
        epochs.write_text(str(epoch + 1))
    run = json.loads((Path(sys.argv[2]).parent / "announced").read_text())[output.name]
    (output / "config.yaml").write_text(run)
    top1 = int(hashlib.sha256(output.name.encode()).hexdigest()[:4], 16) / 1000
    final = {"kind": "final", "epoch": 1, "step": 9, "top1": top1, "step_seconds": 1, "memory_mb": 1}
    print(json.dumps(final), file=metrics)
"""
"""Script that locks, resumes and records as train.py does, within a moment."""

KILLS = int(os.environ.get("SWEEP_KILLS", "0"))
"""Number of disturbed sweeps in a full examination; a few by default."""


def children_of(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


@pytest.mark.stress
@pytest.mark.parametrize(("trainer", "amount"), [("stand-in", KILLS or 3), ("train.py", KILLS or 1)])
def test_a_sweep_whose_workers_are_killed_is_that_of_one_worker(trainer, amount, config, fork_server, figure):
    """Two of three workers are killed at random moments, one of them with the run that it trains."""
    config.write_text(TWELVE)
    announce(config)
    (config.parent / "stand_in.py").write_text(STAND_IN)
    launcher = [sys.executable, *([str(config.parent / "stand_in.py")] if trainer == "stand-in" else [])]
    outputs = {}

    def start(number: int, worker: int):
        output = outputs[number] = config.parent / f"out_{number}"
        command = [str(config), "--output", str(output), "--launcher", shlex.join(launcher)]
        return fork_server.start(command, config.parent / f"log_{number}_{worker}", script="ablate")

    began = time.monotonic()
    assert start(0, 0).wait(timeout=1800) == [0]
    seconds, taken_over = time.monotonic() - began, 0
    for number in range(1, amount + 1):
        rng = random.Random(number)
        jobs = [start(number, worker) for worker in range(3)]
        for job, num_begun in zip(jobs[:2], sorted(rng.sample(range(1, 9), 2)), strict=True):
            while len(list(outputs[number].glob("*/metrics.jsonl"))) < num_begun:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, seconds / 36))
            while not (children := children_of(job.pids[0])) and job is jobs[1]:
                time.sleep(0.01)
            job.signal("SIGKILL")
            if job is jobs[1]:
                for child in children:
                    os.kill(child, signal.SIGKILL)
        statuses = [job.wait(timeout=1800)[0] for job in jobs]
        assert statuses == [-9, -9, 0], jobs[2].text
        for path in outputs[number].glob("*/metrics.jsonl"):
            kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
            assert kinds.count("final") == 1
            taken_over += kinds.count("start") - 1
        assert len(list(outputs[number].glob("*/metrics.jsonl"))) == 12
        tables = [rows(outputs[i]) for i in (0, number)]
        for table in tables:
            for row in table:
                del row["step (s)"]
        assert tables[0] == tables[1]
        assert all(row["seeds"] == "3" for row in tables[0])
    figure("X3", f"two of three workers killed, {amount} times ({trainer}): as one worker; {taken_over} runs resumed")


@pytest.mark.stress
def test_two_ablations_share_one_output(config, figure):
    """Two sweeps of real runs at the same time end with status 0, and the table is complete."""
    output = config.parent / "out"
    command = [sys.executable, ablate.__file__, str(config), "--output", str(output)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=config.parent) for _ in range(2)]
    texts = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(row["top-1 (%)"] for row in rows(output))
    for path in output.glob("*/metrics.jsonl"):
        assert path.read_text().count('"kind": "start"') == 1
    shared = sum(text.count("is running elsewhere\n") for text in texts)
    assert shared
    figure("X2", f"two ablate.py on one output: both 0, no run trained twice, {shared} left to the other")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--output /dev/null/sweep", "--output /dev/null/sweep: cannot be made: Not a directory"),
        ("--output /dev/null/sweep --dry-run", "--output /dev/null/sweep: cannot be made: Not a directory"),
        (f"--output {256 * 'x'} --dry-run", f"--output {256 * 'x'}: cannot be made: File name too long"),
        ("--output /nowhere/out --dry-run", "--output /nowhere/out: cannot be made: / is not writable"),
        ("--output run --dry-run", f"--output run/{NAMES[1]}: cannot be made: Not a directory"),
        ("--output table", "table/table.md: cannot be written: Is a directory"),
        ("--output figure", "figure/heat_map.png: cannot be written: Is a directory"),
        ("--output out --launcher torchrum", "--launcher: 'torchrum' is not a command here"),
        (
            "base.yaml --output out",
            "base.yaml: the configuration of one run; give it to train.py, or name it as base of a sweep",
        ),
    ],
)
def test_what_cannot_begin_is_one_line_before_any_run(config, launcher, capsys, monkeypatch, arguments, problem):
    for name in ("table/table.md", "figure/heat_map.png", "run"):
        (config.parent / name).mkdir(parents=True)
    (config.parent / "run" / NAMES[1]).touch()
    monkeypatch.chdir(config.parent)
    if "/nowhere" in arguments:
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
    words = arguments.split() if arguments.startswith("base") else [config.name, *arguments.split()]
    with pytest.raises(SystemExit, match="2"):
        ablate.main(words if "--launcher" in words else [*words, "--launcher", launcher])
    assert capsys.readouterr().err == f"error: {problem}\n"
    assert not (config.parent / "log").exists()


def test_a_disk_that_is_full_ends_a_sweep_in_one_line(config, launcher, capsys, monkeypatch):
    announce(config)
    output = config.parent / "out"

    def fill_disk(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ablate, "store_sweep", lambda *_: monkeypatch.setattr(files, "write_atomically", fill_disk))
    with pytest.raises(SystemExit) as ended:
        sweep(config, launcher)
    shown = capsys.readouterr()
    problem = f"{output}/table.md: cannot be written: No space left on device; what was there is unchanged"
    assert (ended.value.code, shown.err) == (2, f"error: {problem}\n")
    assert "97.50" in shown.out


@pytest.mark.complete
def test_a_failed_run_is_reported_and_the_others_go_on(config, launcher, pictures, capfd):
    output = config.parent / "out"
    (config.parent / "fail").touch()
    config.write_text(ABLATION.replace(", paper: 77.16", ""))  # nothing to plot when the first run has failed
    announce(config)
    with pytest.raises(SystemExit) as ended:
        sweep(config, launcher)
    assert ended.value.code == f"error: 1 of 3 runs failed: {output / NAMES[0]}"
    assert "run 1/3 failed, status 3: it has printed no error\n  " in capfd.readouterr().err
    assert [row["top-1 (%)"] for row in rows(output)] == ["", "97.50", "97.50"]
    (config.parent / "fail").unlink()
    sweep(config, launcher)
    assert [row["top-1 (%)"] for row in rows(output)] == ["97.50"] * 3
    assert (config.parent / "log").read_text().split() == [*NAMES, NAMES[0]]


def test_a_signal_is_left_to_the_run_which_saves(config, capfd):
    """Ctrl-C reaches both processes, SIGTERM ablate.py alone; the run ends with the status of a stopped one."""
    stopping = (  # blocked until it is waited for, so that the signal cannot come too early
        "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
        "[os.kill(os.getppid(), number) for number in (signal.SIGINT, signal.SIGTERM)];"
        "signal.sigwait([signal.SIGTERM]); raise SystemExit(75)"
    )
    assert run_to_end([sys.executable, "-c", stopping]) == 75
    assert run_to_end([sys.executable, "-c", stopping.replace("75", "1")]) == 75  # torchrun, of stopped ranks
    launcher = shlex.join([sys.executable, "-c", "raise SystemExit(75)"])
    with pytest.raises(SystemExit) as ended:
        sweep(config, launcher)
    assert ended.value.code == 75
    assert "run 1/3 is stopped; the same command goes on" in capfd.readouterr().out


def test_a_signal_that_nohup_ignores_ends_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hang_up = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
    assert run_to_end([sys.executable, "-c", hang_up]) == 0
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("text", "override", "problem"),
    [
        ("grid:\n  attention.window_size: [1, 2]\n", "attention.window_size=3", "attention.window_size itself"),
        ("grid:\n  attention: [softmax, linear]\n", "attention.window_size=3", "attention itself; change it there"),
        ("runs:\n  - {attention: softmax}\n  - {model.depth: 1}\n", "attention.window_size=3", None),
        ("grid:\n  attention.window_size: [1, 2]\n", "attention={name: local}", None),
    ],
)
def test_overrides_that_every_run_replaces_are_refused(config, text, override, problem, capsys):
    config.write_text(f"base: base.yaml\n{text}")
    arguments = [str(config), override, "--output", str(config.parent / "out"), "--dry-run"]
    if problem:
        with pytest.raises(SystemExit, match="2"):
            ablate.main(arguments)
        assert f"override {override!r}: every run of {config} sets {problem}" in capsys.readouterr().err
    else:
        ablate.main(arguments)


def test_dry_run_shows_everything_and_writes_nothing(config, capsys):
    before = sorted(config.parent.rglob("*"))
    ablate.main([str(config), "--output", str(config.parent / "out"), "--dry-run"])
    out = capsys.readouterr().out
    for name in NAMES:
        assert f"--output {config.parent / 'out' / name}\n" in out
    assert "attention.position_bias=table --output" in out
    assert sorted(config.parent.rglob("*")) == before


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("caption", "captoin", "windows.yaml:1: captoin: unknown option; did you mean 'caption'?"),
        ("base: base.yaml\n", "", "windows.yaml:1: base: required, but not given"),
        ("base.yaml", "absent.yaml", "windows.yaml:3: grid: absent.yaml: No such file or directory"),
        ("[1, 2]", "1", "windows.yaml:4: grid.attention.window_size: expected a list of values, got 1"),
        ("[1, 2]", "[]", "windows.yaml:4: grid.attention.window_size: expected a list of values, got []"),
        ("[1, 2]", "[1, 1]", "windows.yaml:3: grid: a second run with attention.window_size=1"),
        (
            "[1, 2]",
            "[1, -2]",
            "windows.yaml:3: grid: override 'attention.window_size=-2': attention(local).window_size",
        ),
        (
            "softmax}, ",
            "softmacks}, ",
            "windows.yaml:7: runs.0: override 'attention={name: softmacks}': attention.name",
        ),
        ("77.16", "high", "windows.yaml:7: runs.0: paper: expected a number, or a mapping of top1, "),
        ("77.16", "{step: 3}", "windows.yaml:7: runs.0: paper.step: unknown figure; did you mean 'step_ms'?"),
        ("77.16", "{step_ms: 0}", "windows.yaml:7: runs.0: paper.step_ms = 0.0 must be greater than 0"),
        ("grid:", "seeds: 0\ngrid:", "windows.yaml:3: seeds: expected a number of seeds, or a list of different ones"),
        ("grid:", "seeds: [1, 1]\ngrid:", "windows.yaml:3: seeds: expected a number of seeds, or a list of different"),
        ("grid:", "seeds: [-1, 1]\ngrid:", "windows.yaml:3: seeds: expected a number of seeds, or a list of different"),
        ("grid:", "seeds: three\ngrid:", "windows.yaml:3: seeds: expected"),
        (
            "grid:",
            "seeds: 2\ngrid:\n  train.seed: [3, 4]",
            "windows.yaml:4: grid: train.seed is given beside seeds; leave one of them out",
        ),
        ("[1, 2]", "{a: 1}", "windows.yaml:4: grid.attention.window_size: expected a list of values, got {'a': 1}"),
        ("grid:", f"grid:\n  x: {[*range(101)]}\n  y: {[*range(100)]}", "windows.yaml:3: grid: 20,200 combinations"),
        ("grid:", "seeds: 1000000000\ngrid:", "windows.yaml:3: seeds: 1,000,000,000 seeds, more than 10,000"),
        (
            "base: base.yaml",
            "base: base.yaml\nbases: [base.yaml]",
            "windows.yaml:3: bases: given beside base; leave one",
        ),
        ("base: base.yaml", "bases: [base.yaml, absent.yaml]", "windows.yaml:3: grid: absent.yaml: No such file"),
        (ABLATION, "bases:\n  - base.yaml\n  - absent.yaml", "windows.yaml:3: bases.1: absent.yaml: No such file"),
        (ABLATION, "bases: [base.yaml, base.yaml]", "windows.yaml:1: bases.1: a second run with"),
        (
            "caption: Windows",
            "paper: EVA Table 22",
            "windows.yaml:1: paper: 'EVA Table 22' is no source in engine/config/papers.yaml;"
            " did you mean 'EVA Table 2'?",
        ),
        (ABLATION, "base: base.yaml\n", "windows.yaml:1: runs: no runs; give grid or runs"),
        (
            "grid:",
            "folds: 3\nseeds: 2\ngrid:",
            "windows.yaml:3: folds = 3 is given beside seeds; leave one of them out",
        ),
        ("grid:", "folds: 1\ngrid:", "windows.yaml:3: folds = 1 is below the least valid value 2"),
        (
            "grid:",
            "folds: 3\ngrid:\n  data.fold: [0, 1]",
            "windows.yaml:4: grid: data.fold is given beside folds; leave",
        ),
        (
            "grid:",
            "folds: 3\ngrid:\n  data.val_fraction: [0.1]",
            "windows.yaml:4: grid: data.val_fraction = 0.1: folds",
        ),
    ],
)
def test_all_runs_are_checked_before_the_first_starts(config, launcher, capsys, old, new, expected):
    config.write_text(ABLATION.replace(old, new))
    before = sorted(config.parent.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        sweep(config, launcher)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.replace(f"{config.parent}/", "").startswith(f"error: {expected}")
    assert error.count("\n") == 1
    assert sorted(config.parent.rglob("*")) == before


def test_a_long_name_of_a_directory_ends_in_a_hash(config):
    """The names differ, stay the same at every start, and can be made; those that fit are as they were."""
    grid = {f"augment.{name}": [0.111111111] for name in ("hflip", "vflip", "reprob", "smoothing", "color_jitter")}
    grid |= {"attention.window_size": [1], "schedule.warmup_lr": [1.0e-6], "augment.mixup_switch_prob": [0.5]}
    grid |= {"schedule.min_lr": [1.0e-5], "optim.weight_decay": [0.05], "data.crop_pct": [0.8, 0.9, 0.95]}
    config.write_text(yaml.safe_dump({"base": "base.yaml", "grid": grid, "seeds": [7, 100]}, sort_keys=False))
    _, settings, _ = read_ablation(config, [], config.parent / "out", ["python"])
    names = [case.directory.name for case in in_order(settings)]
    assert len(set(names)) == len(names) == 6
    for name, case in zip(names, in_order(settings), strict=True):
        assert re.fullmatch(r"augment\..*-[0-9a-f]{12},train\.seed=(7|100)", name)
        assert len(name) == 255
        case.directory.mkdir(parents=True)
    _, again, _ = read_ablation(config, [], config.parent / "out", ["python"])
    assert [case.directory.name for case in in_order(again)] == names
    assert to_directory("é" * 127, []) == "é" * 127
    assert len(to_directory("é" * 128, []).encode()) == 255


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("python", 1),
        ("torchrun --nproc_per_node=8", 8),
        ("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id=3", 16),
        ("torchrun --nnodes=1:4 --nproc_per_node=gpu", 1),
    ],
)
def test_ranks_of_a_launcher(launcher, ranks):
    assert count_ranks(launcher.split()) == ranks


def test_a_batch_that_the_launchers_ranks_cannot_share_is_refused(config):
    with pytest.raises(ConfigError, match="total_batch_size = 64 is not divisible by 3 ranks x 1 accumulation steps"):
        read_ablation(config, [], config.parent, ["torchrun", "--nproc_per_node=3"])


@pytest.mark.complete
def test_a_run_is_trained_for_real(config):
    output = config.parent / "out"
    config.write_text("base: base.yaml\nruns:\n  - {}\n")
    ablate.main([str(config), "--output", str(output)])
    (row,) = rows(output)
    final = json.loads((output / "base" / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["kind"] == "final"
    assert row["top-1 (%)"] == f"{final['top1']:.2f}"
    assert row["step (s)"] == f"{final['step_seconds']:.3f}"
    assert "peak memory (MB)" not in row  # on a CPU
    assert row["parameters (M)"] == f"{final['parameters'] / 1e6:#.4g}"


def finish(case: Case, **final: float) -> None:
    """Writes the files of a finished run of train.py."""
    record = {"kind": "final", "epoch": 1, "step": 9, "step_seconds": 0.0123, "memory_mb": 321.4}
    write_records(case, record | final)


def test_seeds_are_runs_of_their_own_and_a_row_together(config):
    """Means and deviations by hand. Window 1 is 2, 3 and 4 below softmax: 4.303 / sqrt(3) from 3; window 2 is noise."""
    config.write_text(REPLICATED)
    output = config.parent / "out"
    ablation, settings, _ = read_ablation(config, [], output, ["python"])
    names = ["attention=softmax", "attention.window_size=1", "attention.window_size=2"]
    names = [f"{name},train.seed={seed}" for seed in range(3) for name in names]
    cases = in_order(settings)
    assert [case.directory.name for case in cases] == names  # every row once before any row twice
    assert [case.run.train.seed for case in cases] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [case.command[-3] for case in cases] == [f"train.seed={case.run.train.seed}" for case in cases]
    reached = [90, 88, 90.5, 91, 88, 92.5, 92, 88, 91]
    for case, top1 in zip(cases, reached, strict=True):
        finish(case, top1=top1)
    output.mkdir(exist_ok=True)
    write_tables(ablation.caption, settings, output)
    softmax, small, large = rows(output)
    assert [row["seeds"] for row in (softmax, small, large)] == ["3", "3", "3"]
    assert (softmax["top-1 (%)"], softmax["top-1 std"], softmax["top-1 difference"]) == ("91.00", "1.00", "")
    assert (small["top-1 difference"], small["top-1 difference std"]) == ("-3.00", "1.00")
    assert small["top-1 difference 95 % half width"] == f"{4.303 / 3**0.5:.2f}"
    assert (large["top-1 difference"], large["top-1 difference std"]) == ("+0.33", "1.26")
    table = (output / "table.md").read_text()
    assert "\n\nAll rows: seeds = 3.\n\n" in table
    assert "| 91.00 ± 1.00 |  |" in table
    assert "| 88.00 ± 0.00 | -3.00 ± 1.00 |" in table
    assert "| 91.33 ± 1.04 | +0.33 ± 1.26 (noise) |" in table
    assert "noise where the 95 % interval of Student's t" in table
    runs = read_csv(output / "runs.csv")
    assert [(run["directory"], float(run["top-1 (%)"])) for run in runs] == list(zip(names, reached, strict=True))
    assert [run["train.seed"] for run in runs] == [*"000111222"]


def test_folds_are_runs_of_their_own_and_a_row_together(config):
    """As seeds are, with differences between runs of the same fold, and a note on what folds share."""
    config.write_text(REPLICATED.replace("seeds: 3", "folds: 3"))
    output = config.parent / "out"
    ablation, settings, _ = read_ablation(config, [], output, ["python"])
    cases = in_order(settings)
    assert [case.run.data.fold for case in cases] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert {(case.run.data.folds, case.run.train.seed) for case in cases} == {(3, 0)}
    assert [case.command[-4:-2] for case in cases[::3]] == [["data.folds=3", f"data.fold={fold}"] for fold in range(3)]
    assert len({case.directory for case in cases}) == 9
    for case, top1 in zip(cases, [90, 88, 90.5, 91, 88, 92.5, 92, 88, 91], strict=True):
        finish(case, top1=top1)
    write_tables(ablation.caption, settings, output)
    _, small, _ = rows(output)
    assert (small["folds"], small["top-1 difference"], small["top-1 difference std"]) == ("3", "-3.00", "1.00")
    table = (output / "table.md").read_text()
    assert "standard deviation over folds" in table
    assert "runs of the same fold" in table
    assert "share training images" in table
    assert [run["data.fold"] for run in read_csv(output / "runs.csv")] == [*"000111222"]
    assert [*json.loads((output / "table.json").read_bytes())["rows"][0]["runs"]] == [*"012"]


def test_what_is_the_same_in_all_rows_goes_to_the_caption(config):
    config.write_text(ABLATION[: ABLATION.index("runs:")])
    ablation, settings, _ = read_ablation(config, [], config.parent, ["python"])
    caption, same, header, *_ = filter(None, report_sweep(ablation.caption, settings).split("\n"))
    assert caption == "Windows"
    assert same == "All rows: attention.position_bias = table."
    columns = ["attention.window_size", "parameters (M)", "MACs (G)", "step (s)", "top-1 (%)"]
    assert header == f"| {' | '.join(columns)} |"  # without a paper's, which gives none
    assert "attention.position_bias" in tabulate(settings).programs


@pytest.mark.complete
def test_a_papers_table_is_a_list_of_configurations_with_the_papers_figures(tmp_path):
    path = Path(ablate.__file__).parent / "configs/ablation/eva_table2.yaml"
    ablation, settings, _ = read_ablation(path, [], tmp_path, ["python"])
    assert settings[1].cases[0].directory == tmp_path / "deit_tiny_p8-performer"
    assert settings[1].cases[0].command[2].endswith("/deit_tiny_p8/performer.yaml")
    table = tabulate(settings[:2]).programs
    assert table["base"] == ["deit_tiny_p8/softmax", "deit_tiny_p8/performer"]
    assert [table[title][1] for title in ("MACs (G)", "paper: MACs (G)", "paper (%)")] == ["4.655", "4.9", "67.19"]
    note = "deit_tiny_p8/performer, not as the paper prints it: 4.9 G is the cost of 96 features"
    assert note in report_sweep(ablation.caption, settings[:2])


@pytest.mark.complete
def test_a_row_may_give_the_papers_time_and_memory(tmp_path):
    """EVA Table 6 prints both."""
    path = Path(ablate.__file__).parent / "configs/ablation/eva_table6.yaml"
    ablation, settings, _ = read_ablation(path, [], tmp_path, ["python"])
    table = tabulate(settings).programs
    assert table["paper: step (ms)"] == ["87", "65", "77", "87", "89", "94", "119", "108", "99"]
    assert table["paper: memory (GB)"] == ["8.1", "7.8", "8.4", "9.1", "9.4", "9.9", "12.5", "11.9", "17.7"]
    assert table["paper (%)"][-1] == "77.16"
    assert "| paper: memory (GB) |" in report_sweep(ablation.caption, settings)


def test_bases_are_changed_in_turn(config):
    (config.parent / "other.yaml").write_text(BASE.replace("depth: 1", "depth: 2"))
    config.write_text(ABLATION.replace("base: base.yaml", "bases: [base.yaml, other.yaml]"))
    _, settings, _ = read_ablation(config, [], config.parent, ["python"])
    depths = [setting.cases[0].run.model["depth"] for setting in settings]
    assert depths == [1, 1, 1, 2, 2, 2]
    assert settings[3].cases[0].directory.name.endswith(f"-other,{NAMES[0]}")
    assert [setting.paper and setting.paper.top1 for setting in settings] == [None, None, 77.16] * 2


def test_a_row_shows_the_seeds_that_are_finished(config):
    """The first row has three seeds, the second one, without a deviation, and the third none."""
    config.write_text(REPLICATED)
    ablation, settings, _ = read_ablation(config, [], config.parent, ["python"])
    for case in (*settings[0].cases, settings[1].cases[1]):
        finish(case, top1=97.5)
    table = tabulate(settings).programs
    assert list(zip(table["seeds"], table["top-1 (%)"], table["top-1 std"], strict=True)) == [
        ("3", "97.50", "0.00"),
        ("1", "97.50", ""),
        ("0", "", ""),
    ]
    assert "| 1 | 97.50 | +0.00 (one run) |" in report_sweep(ablation.caption, settings)
    assert len(draw_results(ablation.caption, settings).axes) == 2


def test_runs_that_take_no_part_are_named(config):
    """The first row has a run that has diverged, the second two that have failed, the third one that is to come."""
    config.write_text(REPLICATED)
    ablation, settings, _ = read_ablation(config, [], config.parent, ["python"])
    for case in (*settings[0].cases[:2], settings[1].cases[1], *settings[2].cases[:2]):
        finish(case, top1=97.5)
    diverged = settings[0].cases[2]
    finish(diverged)
    record = {"kind": "fail", "epoch": 0, "step": 9, "reason": "the loss is not finite"}
    (diverged.directory / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    for case in (diverged, *settings[1].cases[::2]):
        case.directory.mkdir(exist_ok=True)
        worker.failure_mark(case).touch()
    report = report_sweep(ablation.caption, settings)
    assert "\nsoftmax: 1 of 3 runs has diverged and takes no part.\n" in report
    assert "\nE=1: 2 of 3 runs have failed and take no part.\n" in report
    assert "E=4:" not in report
    assert "Not finished" not in report  # the column of seeds shows that
    finish(settings[1].cases[0], top1=97.5)  # tried again
    report = report_sweep(ablation.caption, settings)
    assert "\nE=1: 1 of 3 runs has failed and takes no part.\n" in report
    assert "All rows: seeds = 2." in report
    assert "\nNot finished: every row has 2 of its 3 runs.\n" in report
    worker.failure_mark(settings[2].cases[2]).parent.mkdir()
    worker.failure_mark(settings[2].cases[2]).touch()
    report = report_sweep(ablation.caption, settings)
    assert report.count(": 1 of 3 runs has ") == 3
    assert "Not finished" not in report


def test_without_seeds_the_table_says_what_one_run_is_worth(config):
    ablation, settings, _ = read_ablation(config, [], config.parent, ["python"])
    assert ONE_RUN in report_sweep(ablation.caption, settings)


def grid_of_numbers(config: Path) -> list[Setting]:
    """3 x 2 settings: the first has three seeds, the last none, each other setting one."""
    config.write_text(
        "base: base.yaml\nseeds: 3\ngrid:\n  attention.window_size: [4, 1, 2]\n  schedule.epochs: [10, 9]\n"
    )
    _, settings, _ = read_ablation(config, [], config.parent, ["python"])
    for number, setting in enumerate(settings[:-1]):
        for case in setting.cases[: 3 if number == 0 else 1]:
            finish(case, top1=90 + number, step_seconds=0.1 * abs(number - 2))
    return settings


def test_two_axes_of_numbers_make_a_heat_map(config):
    settings = grid_of_numbers(config)
    figure = draw_heat_map("Windows", settings)
    axes = figure.axes[0]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("|E| (tokens)", "schedule.epochs")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "4", "16"]  # ascending, as is no list above
    assert [label.get_text() for label in axes.get_xticklabels()] == ["9", "10"]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(1, 2): "90.00 ± 0.00", (0, 2): "91.00", (1, 0): "92.00", (0, 0): "93.00", (1, 1): "94.00"}
    assert draw_heat_map("Windows", settings[:-1]) is None  # a combination is missing
    assert draw_heat_map("Windows", settings[::2]) is None  # one axis


@pytest.mark.complete
def test_a_figure_that_a_sweep_has_no_longer_is_removed(config):
    settings = grid_of_numbers(config)
    claim(config.parent, RESULTS, FIGURES)
    write_figures("Windows", settings, config.parent)
    assert {path.name for path in config.parent.glob("*.png")} == set(FIGURES)
    write_figures("Windows", settings[:-1], config.parent)
    assert {path.name for path in config.parent.glob("*.png")} == set(FIGURES) - {"heat_map.png"}


@pytest.mark.complete
def test_the_settings_that_no_other_beats_are_named(config):
    """By step time: the third takes none; the fourth and fifth take 0.1 s and 0.2 s more for one percent each."""
    settings = grid_of_numbers(config)
    by_macs, by_time = draw_pareto("Windows", settings).axes
    names = short_names(settings)
    assert {text.get_text() for text in by_time.texts} == set(names[2:5])
    assert {text.get_text() for text in by_macs.texts} == {names[3], names[4]}  # windows of 1 and 2 cost less than of 4
    assert non_dominated([(1, 5), (1, 5), (1, 4), (2, 5), (2, 6)]) == [True, True, False, False, True]
    for number, setting in enumerate(settings[:-1]):
        for path in (case.directory / "metrics.jsonl" for case in setting.cases if case.directory.exists()):
            path.write_text(path.read_text().replace("321.4", str(300 + number)))
    assert len(draw_pareto("Windows", settings).axes) == 3
    for path in config.parent.rglob("metrics.jsonl"):  # as on a CPU
        path.write_text(re.sub('"memory_mb": [0-9.]+', '"memory_mb": null', path.read_text()))
    assert len(draw_pareto("Windows", settings).axes) == 2


@in_style
def boxes(figure: Figure, texts: Sequence[Text]) -> list[Bbox]:
    """Where the texts are in the figure, in pixels, without the lines that join them to points."""
    figure.draw_without_rendering()
    return [Text.get_window_extent(text) for text in texts]


def assert_apart(found: Sequence[Bbox]) -> None:
    assert not [pair for pair in combinations(found, 2) if Bbox.intersection(*pair)]


@pytest.mark.complete
def test_names_in_a_figure_of_costs_are_apart_though_points_are_near(config):
    config.write_text("base: base.yaml\ngrid:\n  attention.window_size: [1, 2, 4]\n  train.seed: [1, 2, 3, 4]\n")
    _, settings, _ = read_ablation(config, [], config.parent, ["python"])
    for number, setting in enumerate(settings):
        finish(setting.cases[0], top1=90 + 0.01 * number, step_seconds=1 + 1e-4 * number)
    figure = draw_pareto("Windows", settings)
    by_time = figure.axes[1]
    assert len(by_time.texts) == len(settings) == 12
    assert_apart(boxes(figure, by_time.texts))


def test_a_cost_that_seeds_vary_as_settings_do_has_no_panel(config):
    settings = grid_of_numbers(config)
    for number, case in enumerate(settings[0].cases):
        shutil.rmtree(case.directory)
        finish(case, top1=90, step_seconds=0.1 * number)
    figure = draw_pareto("Windows", settings)
    assert [axes.get_xlabel() for axes in figure.axes] == ["multiply-accumulates of an image (M)"]
    assert "Not shown: step time, in which settings differ no more than seeds." in figure.get_suptitle()


def test_curves_are_of_all_runs_finished_or_not(config):
    settings = grid_of_numbers(config)
    old, new, cut = (setting.cases[0].directory / "metrics.jsonl" for setting in settings[:3])
    train = [{"kind": "train", "epoch": 1, "step": step, "step_seconds": 36} for step in (50, 100)]
    evaluation = {"kind": "eval", "epoch": 1, "step": 100, "loss": 0.5}
    old.write_text("".join(json.dumps(record) + "\n" for record in (*train, evaluation)))
    new.write_text(json.dumps(evaluation | {"elapsed_seconds": 7200}) + "\n")
    cut.write_text(json.dumps(evaluation) + '\n{"kind": "ev')
    assert read_curve(old.parent) == [(1, 1.0, 0.5)]  # 100 steps of 36 seconds
    assert read_curve(new.parent) == [(1, 2.0, 0.5)]
    figure = draw_curves(10 * "Windows ", settings)
    by_epoch, by_hours = figure.axes
    assert len(by_epoch.lines) == len(by_hours.lines) == 3
    assert {text.get_text() for text in by_hours.texts} == set(short_names(settings)[:3])
    assert_apart(boxes(figure, [*by_hours.texts, *figure.texts]))
    assert read_curve(config.parent / "none") == []


def test_a_curve_is_the_mean_of_its_seeds_with_a_band_over_them(config):
    settings = grid_of_numbers(config)[:2]
    first, second = settings
    losses = {0: [1.0, 0.5], 1: [3.0, 1.5], 2: [9.0]}  # the last seed is behind
    for case, values in zip([*first.cases, second.cases[0]], [*losses.values(), [2.0, 1.0]], strict=True):
        records = [{"kind": "eval", "epoch": 1 + i, "step": 9, "loss": x} for i, x in enumerate(values)]
        (case.directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (axes,) = draw_curves("Windows", settings).axes  # no run has a final record, and so a time of a step
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 2], [2, 1]], [[1, 2], [2, 1]]]
    (band,) = axes.collections  # the second setting has one seed
    assert {tuple(point) for point in band.get_paths()[0].vertices.tolist()} == {(1, 1), (1, 3), (2, 0.5), (2, 1.5)}


def test_the_json_has_every_final_record(config):
    settings = grid_of_numbers(config)
    rows = json.loads(to_json("Windows", settings))["rows"]
    assert [row["name"] for row in rows] == short_names(settings)
    assert rows[0]["changes"] == {"attention.window_size": 4, "schedule.epochs": 10}
    assert [record["top1"] for record in rows[0]["runs"].values()] == [90, 90, 90]
    assert rows[-1]["runs"] == {}
    assert rows[0]["macs"] == settings[0].costs.macs


def test_a_sweep_that_is_stopped_shows_what_it_has(config, pictures, capfd):
    announce(config)
    stopping = f"raise SystemExit({STOPPED})"
    arguments = [str(config), "--output", str(config.parent / "out"), "--launcher"]
    _, settings, _ = read_ablation(config, [], config.parent / "out", ["python"])
    finish(settings[0].cases[0], top1=91.25)
    with pytest.raises(SystemExit) as ended:
        ablate.main([*arguments, shlex.join([sys.executable, "-c", stopping])])
    assert ended.value.code == STOPPED
    assert "| 91.25 |" in capfd.readouterr().out
    for name in ("table", "pareto", "curves"):
        assert (config.parent / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_grid_takes_options_of_an_entry_and_whole_lists(config):
    hybrid = "attention: [{blocks: 0-1, name: local, window_size: 2}, {blocks: 2, name: softmax}]"
    base = BASE.replace("depth: 1", "depth: 3").replace("attention: {name: local, window_size: 2}", hybrid)
    (config.parent / "base.yaml").write_text(base)
    config.write_text(
        "caption: Hybrids\nbase: base.yaml\n"
        "grid:\n  attention.0.window_size: [1, 2]\n  attention.0.local: [true, false]\n"
        "runs:\n  - {attention: [{blocks: 0, name: softmax}, {blocks: 1-2, name: mean}]}\n  - {attention: softmax}\n"
    )
    _, settings, _ = read_ablation(config, [], config.parent, [])
    found = [setting.cases[0].run.attention for setting in settings]
    assert [entries[0]["window_size"] for entries in found[:4]] == [1, 1, 2, 2]
    assert [(entry["blocks"], entry["name"]) for entry in found[4]] == [("0", "softmax"), ("1-2", "mean")]
    assert found[5]["name"] == "softmax"
    assert len({setting.cases[0].directory for setting in settings}) == 6
    stages = [{"stage": s, "name": "local" if s < 2 else "softmax"} for s in range(4)]
    pyramid = yaml.safe_load(BASE) | {"model": {"name": "pvtv2_b0"}, "attention": stages}
    (config.parent / "base.yaml").write_text(yaml.safe_dump(pyramid))
    config.write_text("caption: Stages\nbase: base.yaml\ngrid:\n  attention.1.window_size: [2, 4]\n")
    _, settings, _ = read_ablation(config, [], config.parent, [])
    assert [setting.cases[0].run.attention[1]["window_size"] for setting in settings] == [2, 4]


def test_quantiles_are_those_of_students_t():
    for freedom in (1, 2, 3, 10, 30):
        t = torch.linspace(0, T_975[freedom - 1], 100_001, dtype=torch.float64)
        density = torch.distributions.StudentT(torch.tensor(float(freedom), dtype=torch.float64)).log_prob(t).exp()
        assert torch.trapezoid(density, t).item() == pytest.approx(0.475, abs=2e-5)
    assert len(T_975) == 30


def test_what_a_run_did_not_measure_is_left_out():
    """A run that stops after its last step and resumes has no step time."""
    (measured,) = measure([{0: {"step_seconds": None}, 1: {"step_seconds": 0.5}, 2: {}}], "step_seconds")
    assert (measured.values, measured.spread.n) == ({1: 0.5}, 1)


def test_one_difference_is_never_clear():
    (_, second) = measure([{0: {"top1": 1.0}, 1: {"top1": 2.0}}, {1: {"top1": 90.0}, 2: {"top1": 90.0}}], "top1")
    assert second.difference.mean == 88.0
    assert second.difference.n == 1
    assert second.difference.is_noise
    assert not Spread(mean=0.5, std=0.0, n=2).is_noise


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_has_no_deviation_and_is_no_difference(bad):
    found = spread([bad, 1.0])
    assert (repr(found.mean), math.isnan(found.std), found.n) == (repr(bad), True, 2)
    assert found.is_noise
    results = [{0: {"loss": 1.0}, 1: {"loss": 2.0}}, {0: {"loss": bad}, 1: {"loss": 2.5}}]
    first, second = measure(results, "loss")
    assert (first.values, second.values, second.difference.mean) == ({0: 1.0, 1: 2.0}, {1: 2.5}, 0.5)


def test_an_accuracy_is_rounded_to_images():
    """Three equal differences of one image are no effect, of ten they are; other measurements have no steps."""
    for images, is_noise in ((1, True), (10, False)):
        values = 80.0, 80 + images / 5
        results = [{seed: {"top1": x, "loss": x, "images": 500} for seed in range(3)} for x in values]
        assert measure(results, "top1")[1].difference.is_noise == is_noise
        assert not measure(results, "loss")[1].difference.is_noise


@pytest.mark.parametrize(("seeds", "deviation"), [(2, 0.7), (3, 2.0)])
def test_at_most_one_in_twenty_rows_without_effect_seems_to_have_one(seeds, deviation):
    """Accuracies of 500 images whose right ones vary by so many between seeds."""
    right = torch.randn(2, 1000, seeds, generator=torch.Generator().manual_seed(0)).mul(deviation).add(400.37).round()
    rows = [[{seed: {"top1": x / 5, "images": 500} for seed, x in enumerate(row)} for row in n] for n in right.tolist()]
    found = [measure(pair, "top1")[1].difference for pair in zip(*rows, strict=True)]
    assert sum(not difference.is_noise for difference in found) <= 0.05 * 1000 + 4 * math.sqrt(1000 * 0.05 * 0.95)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (["attention.num_landmarks: 4", "attention.num_landmarks: 9"], ["C=4", "C=9"]),
        (["attention: {name: local, window_size: 2}", "attention: sra"], ["local, E=4", "sra"]),
        (["attention: {name: local, window_size: 4, causal: true}", "attention: softmax"], ["local, E=4", "softmax"]),
        (["attention: {name: linear}", "attention: {name: linear, local: true}"], ["linear", "linear, local=true"]),
        (["schedule.epochs: 2", "schedule.epochs: 3", "optim.lr: 2.0e-3"], ["epochs=2", "epochs=3", "lr=0.002"]),
        (
            ["attention.window_size: 2", "attention.position_bias: none", "schedule.epochs: 2"],
            ["E=4", "position_bias=none", "epochs=2"],
        ),
        (
            ["attention: [{blocks: 0, name: softmax}]", "attention: {name: eva, window_size: 2, num_landmarks: 4}"],
            ["0: softmax", "eva, E=4, C=4"],
        ),
    ],
)
def test_names_have_the_sizes_of_a_mechanism_and_what_varies(config, rows, names):
    base = BASE.replace("local, window_size: 2", "eva, window_size: 4, num_landmarks: 1") if "C=" in names[0] else BASE
    (config.parent / "base.yaml").write_text(base)
    config.write_text("base: base.yaml\nruns:\n" + "".join(f"  - {{{row}}}\n" for row in rows))
    assert short_names(read_ablation(config, [], config.parent, ["python"])[1]) == names


def test_settings_of_the_same_name_have_the_size_that_is_solved(config):
    """`match: false` is no option of the run."""
    config.write_text(
        "base: base.yaml\nmatch: {layer_macs: 24.0e3}\nruns:\n"
        "  - {attention: {name: performer}}\n  - {attention: {name: performer}, match: false}\n"
        "  - {attention: {name: softmax}, match: false}\n"
    )
    _, settings, _ = read_ablation(config, [], config.parent, ["python"])
    names = [f"performer, num_samples={settings[0].matched.value}", "performer", "softmax"]
    assert short_names(settings) == names
    for setting in settings:
        finish(setting.cases[0])
        evaluation = {"kind": "eval", "epoch": 1, "step": 9, "loss": 1.0}
        (setting.cases[0].directory / "metrics.jsonl").write_text(json.dumps(evaluation) + "\n")
    (axes,) = draw_curves("", settings).axes
    assert [text.get_text() for text in axes.texts] == names


def test_where_short_names_would_be_the_same_they_are_in_full(tmp_path):
    paths = [f"{'long' * 9}/{end}" for end in "ab"]
    settings = [Setting({"init.weights": path}, None, {None: (Case(None, tmp_path, []),)}) for path in paths]
    assert short_names(settings) == [f"init.weights={path}" for path in paths]
