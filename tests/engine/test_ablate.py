"""Ablations: all runs are checked before the first starts; finished ones are skipped, a failed one stops no other."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import yaml

import ablate
import train
from ablation import worker
from ablation.runs import in_order
from ablation.sweep import read_ablation
from engine.checkpoints.files import newest_checkpoint, save_checkpoint
from engine.data.idx import IMAGES, LABELS, write_idx
from engine.run.load import dump_run
from engine.runtime import files
from engine.runtime.ownership import claim
from engine.runtime.processes import run_to_end
from engine.runtime.signals import STOPPED
from tests.support.launcher import no_space
from tests.support.partition import chosen
from tests.support.sweeps import BASE, GRID, finish, read, read_table

NAMES = [
    "attention.window_size=1,attention.position_bias=table",
    "attention.window_size=2,attention.position_bias=table",
    "attention=name=softmax",
]
ONE = "base: base.yaml\nruns:\n  - {attention: softmax}\n"
STOPPING = shlex.join([sys.executable, "-c", f"raise SystemExit({STOPPED})"])


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "windows.yaml"
    path.write_text(GRID)
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
        "import json, os, sys, time\n"
        "from pathlib import Path\n"
        "script, config, *overrides, flag, output = sys.argv[1:]\n"
        "assert Path(script).name == 'train.py' and flag == '--output'\n"
        "output, folder = Path(output), Path(config).parent\n"
        "with open(folder / 'log', 'a') as log: log.write(output.name + '\\n')\n"
        "if (folder / 'fail').exists() and 'window_size=1' in output.name:\n"
        "    print(os.environ['OMP_NUM_THREADS'])\n"
        "    sys.exit('====\\nerror: out of memory\\n====')\n"
        "while (folder / 'together').exists() and (folder / 'log').read_text().count('\\n') < 2: time.sleep(0.01)\n"
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


def announce(config: Path, *overrides: str, text: str = "") -> Path:
    """Tells the launcher which runs train.py would make of the configuration; returns the output."""
    if text:
        config.write_text(text)
    _, settings, _ = read_ablation(config, overrides, config.parent, [])
    dumped = {case.directory.name: yaml.safe_dump(dump_run(case.run)) for case in in_order(settings)}
    (config.parent / "announced").write_text(json.dumps(dumped))
    return config.parent / "out"


def sweep(config: Path, launcher: str, *arguments: str, status: int | str | None = None) -> None:
    """Runs a sweep, which ends with this status, or message."""
    command = [str(config), "--output", str(config.parent / "out"), "--launcher", launcher, *arguments]
    with pytest.raises(SystemExit) if status is not None else nullcontext() as ended:
        ablate.main(command)
    assert (ended and ended.value.code) == status


def rows(output: Path) -> list[dict[str, str]]:
    return read_table(output / "table.csv")


def trained(config: Path) -> list[str]:
    """The runs that the launcher has begun."""
    log = config.parent / "log"
    return log.read_text().split() if log.exists() else []


@pytest.mark.complete
def test_runs_are_trained_tabulated_and_skipped_once_finished(config, launcher, pictures, capfd):
    output = announce(config, "train.seed=3")
    sweep(config, launcher, "train.seed=3")
    assert trained(config) == NAMES
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
    report = (output / "table.md").read_text()
    assert report.startswith("Windows\n\n| attention.window_size |")
    assert report in capfd.readouterr().out
    assert (output / "table.png").read_bytes().startswith(b"\x89PNG")
    sweep(config, launcher, "train.seed=3")
    assert trained(config) == NAMES
    (output / NAMES[1] / "metrics.jsonl").write_text('{"kind": "final", "top')  # interrupted while it was written
    sweep(config, launcher, "train.seed=3")
    assert trained(config) == [*NAMES, NAMES[1]]


@pytest.mark.parametrize("trace", ["metrics.jsonl", pytest.param("step_4.pt", marks=pytest.mark.complete)])
def test_runs_made_with_other_options_are_refused_before_any_run(config, launcher, capsys, trace):
    """By overrides, or an edited base: the results stay, and no other row is trained as theirs is not."""
    output = announce(config, "schedule.epochs=2", text=GRID + "  - {schedule.epochs: 3}\n")
    (config.parent / "fail").touch()  # so that the first run alone is not finished
    sweep(config, launcher, "schedule.epochs=2", status=f"error: 1 of 4 runs failed: {output / NAMES[0]}")
    directory, others = output / NAMES[1], trained(config)
    if trace != "metrics.jsonl":
        (directory / "metrics.jsonl").rename(directory / trace)
    before = {name: (output / name).read_bytes() for name in ("table.csv", "sweep.yaml")}
    capsys.readouterr()

    def refusal(*more: str) -> str:
        sweep(config, launcher, *more, status=2)
        assert trained(config) == others
        assert {name: (output / name).read_bytes() for name in before} == before
        return capsys.readouterr().err

    problem = f"error: {directory}: was trained with other options; give them again, another --output, or move it elsew"
    problem += "here: {}: {} there, {} here\n"
    assert refusal() == refusal("--dry-run") == problem.format("schedule.epochs", 2, 1)
    assert refusal("schedule.epochs=2", "train.seed=4") == problem.format("train.seed", 0, 4)
    (config.parent / "base.yaml").write_text(BASE.replace("depth: 1", "depth: 2"))
    assert refusal("schedule.epochs=2") == problem.format("model.depth", 1, 2)


@pytest.mark.parametrize(
    ("first", "second", "change", "is_same"),
    [
        ([], ["data.workers=3", "train.log_every=7"], {}, True),
        ([], [], {"attention": "softmax"}, True),  # by its name alone
        ([], [], {"data": {"dataset": "digits"}}, True),  # another number of workers
        ([], [], {"attention": "nystrom"}, False),  # which cannot be built
    ],
)
def test_a_finished_run_may_be_asked_for_or_written_otherwise(config, launcher, capsys, first, second, change, is_same):
    """A run is the same if its options mean the same, or are those with which train.py resumes it."""
    output = announce(config, *first, text=ONE)
    sweep(config, launcher, *first)
    (path,) = output.glob("*/config.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    sweep(config, launcher, *second, status=None if is_same else 2)
    assert (f"{path.parent}: was trained with other options" in capsys.readouterr().err) != is_same
    assert len(trained(config)) == 1
    assert [row["top-1 (%)"] for row in rows(output)] == ["97.50"]


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
    config.write_text(ONE)

    def sweep_on(root: Path, *overrides: str, status: int | None = None) -> str:
        sweep(config, "false", "data.dataset=idx", f"data.root={root}", *overrides, status=status)
        return capsys.readouterr().err

    directory = config.parent / "out" / "attention=softmax"
    options = ["attention=softmax", "data.dataset=idx", f"data.root={roots[0]}"]
    train.main([str(config.parent / "base.yaml"), *options, "--output", str(directory)])
    capsys.readouterr()
    assert sweep_on(roots[0]) == sweep_on(roots[2]) == ""
    table = (config.parent / "out" / "table.csv").read_bytes()
    assert rows(config.parent / "out")[0]["top-1 (%)"]
    problem = f"error: {directory}: was trained on other data; name its data again, or another --output: "
    classes = f"data.classes={config.parent / 'classes'}"
    assert sweep_on(roots[1], status=2).startswith(f"{problem}train_content: ")
    assert sweep_on(roots[0], classes, status=2).startswith(f"{problem}classes: the same names")
    absent = config.parent / "absent"
    assert sweep_on(absent, status=2) == f"error: data.root: no directory '{absent}'\n"
    assert (config.parent / "out" / "table.csv").read_bytes() == table

    path, checkpoint = newest_checkpoint(directory)
    for path in directory.glob("*.pt"):
        path.unlink()
    assert sweep_on(roots[0]).endswith("which data it was trained on is not known: no checkpoint there\n")
    save_checkpoint(path, checkpoint)
    (directory / "metrics.jsonl").unlink()  # as within the run
    assert sweep_on(roots[1], status=2).startswith(f"{problem}train_content: ")


@contextmanager
def held_elsewhere(path: Path):
    """Another process holds this lock."""
    path.parent.mkdir(parents=True)
    hold = "file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    other = [sys.executable, "-c", f"import fcntl, sys; {hold}", str(path)]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.communicate()


@pytest.mark.parametrize("lock", ["lock", "ablate.lock"], ids=["of train.py", "of ablate.py"])
def test_a_run_that_another_process_trains_is_left_to_it(config, launcher, capfd, lock):
    output = announce(config, text=ONE + "  - {attention: linear}\n")
    directory = output / "attention=softmax"
    with held_elsewhere(directory / lock):
        sweep(config, launcher, "--no-wait")
    assert trained(config) == ["attention=linear"]
    assert f"1 of 2 runs are running elsewhere: {directory}\n" in capfd.readouterr().out
    assert [row["top-1 (%)"] for row in rows(output)] == ["", "97.50"]
    sweep(config, launcher)
    assert trained(config) == ["attention=linear", "attention=softmax"]
    assert [row["top-1 (%)"] for row in rows(output)] == ["97.50"] * 2


def test_a_run_that_another_process_begins_first_is_left_to_it(config, monkeypatch, capfd):
    """The run was free when it was looked at, and train.py refuses it."""
    config.write_text(ONE)
    answers = chain([False], repeat(True))
    monkeypatch.setattr(worker, "is_locked", lambda directory: next(answers))
    sweep(config, shlex.join([sys.executable, "-c", "raise SystemExit(2)"]), "--no-wait")
    assert "run 1/1 is running elsewhere\n" in capfd.readouterr().out


def test_a_run_whose_process_is_killed_is_taken_over(config, launcher, monkeypatch, capfd):
    """A sweep that waits, without another run left, takes it over."""
    output = announce(config, text=ONE)
    with held_elsewhere(output / "attention=softmax/ablate.lock") as process:

        def sleep(seconds):
            if seconds == worker.POLL_SECONDS:
                process.kill()
                process.wait()

        monkeypatch.setattr(worker.time, "sleep", sleep)
        sweep(config, launcher)
    assert rows(output)[0]["top-1 (%)"] == "97.50"
    assert "run 1/1 is running elsewhere\nwaiting for 1 runs elsewhere" in capfd.readouterr().out


def test_a_run_that_failed_in_another_process_is_tried_again_by_the_next_command_only(config, launcher):
    announce(config, text=ONE)
    _, [setting], _ = read_ablation(config, [], config.parent / "out", shlex.split(launcher))
    (case,) = setting.cases
    assert not worker.is_busy(case)
    claim(case.directory, [worker.failure_mark(case).name])
    worker.failure_mark(case).touch()
    worker.train_all([case], 1, True, lambda: None)
    assert not case.result()
    sweep(config, launcher)
    assert case.result()
    assert not case.has_failed()


@pytest.mark.parametrize(
    ("gpus", "visible", "jobs", "expected"),
    [
        (0, None, 2, [None, None]),
        (4, None, 2, ["0,2", "1,3"]),
        (2, None, 3, ["0", "1", "0"]),
        (2, "4,GPU-5", 2, ["4", "GPU-5"]),
    ],
)
def test_runs_at_the_same_time_share_the_devices(monkeypatch, gpus, visible, jobs, expected):
    monkeypatch.setattr(worker.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(worker.os, "sched_getaffinity", lambda process: range(7))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environments = worker.share_devices(jobs)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments] == expected
    assert [environment["OMP_NUM_THREADS"] for environment in environments] == [str(7 // jobs)] * jobs
    assert worker.share_devices(1) == [None]


def test_jobs_train_runs_at_the_same_time(config, launcher, capfd):
    """Two runs wait for each other; a failed one is told with its error, and the third run takes its place."""
    output = announce(config)
    for name in ("fail", "together"):
        (config.parent / name).touch()
    sweep(config, launcher, "--jobs", "2", status=f"error: 1 of 3 runs failed: {output / NAMES[0]}")
    assert sorted(trained(config)) == sorted(NAMES)
    shown = capfd.readouterr()
    assert shown.err.startswith("run 1/3 failed, status 1: error: out of memory\n  ")
    assert shown.err.count("out of memory") == 1
    assert f"run 2/3: {output / NAMES[1]}\n" in shown.out
    assert "2 of 3 runs finished\n" in shown.out


SWEEP = """\
base: base.yaml
seeds: 2
grid: {optim.lr: [1.0e-3], attention.window_size: [1, 2]}
runs: [{attention: softmax}]
"""
ADDED = {
    "a value": ("[1, 2]", "[4, 2, 1]"),
    "a row": ("runs: [", "runs: [{attention: linear}, "),
    "seeds": ("seeds: 2", "seeds: [1, 0, 5]"),
    "the caption": ("base:", "caption: Others\nbase:"),
}
LOST = {
    "a value": ("[1, 2]", "[1]"),
    "an option": ("optim.lr: [1.0e-3], ", ""),
    "a row": ("runs: [{attention: softmax}]\n", ""),
    "seeds": ("seeds: 2", "seeds: [1, 5]"),
    "all seeds": ("seeds: 2\n", ""),
    "the base": ("base: base.yaml", "bases: [base.yaml]"),
}


@pytest.mark.parametrize("change", chosen(ADDED, ("a row", "seeds").__contains__))
def test_a_sweep_goes_on_with_what_is_added(config, change):
    config.write_text(SWEEP)
    sweep(config, STOPPING, status=STOPPED)
    stored, output = config.parent / "out/sweep.yaml", config.parent / "out"
    assert stored.read_text() == f"# python ablate.py {config} --output {output}\n{SWEEP}"
    config.write_text(SWEEP.replace(*ADDED[change]))
    sweep(config, STOPPING, status=STOPPED)
    assert stored.read_text().endswith(config.read_text())


@pytest.mark.parametrize("change", LOST)
def test_a_sweep_without_an_earlier_run_is_refused(config, capsys, change):
    config.write_text(SWEEP)
    sweep(config, STOPPING, status=STOPPED)
    runs = {row["directory"] for row in read_table(config.parent / "out/runs.csv")}
    config.write_text(SWEEP.replace(*LOST[change]))
    capsys.readouterr()
    sweep(config, STOPPING, "--dry-run", status=2)
    error = capsys.readouterr().err
    (name,) = re.findall(rf"^error: {config.parent}/out: holds another sweep, with (\S+); rows, values and se", error)
    assert name in runs
    assert error.endswith(f"or delete {config.parent}/out/runs.csv to keep its runs\n")


def test_tables_are_left_to_a_later_command_that_adds_rows(config, capsys, monkeypatch):
    """The first command begins before the row is added, and ends last."""
    config.write_text(SWEEP)
    longer, table = SWEEP.replace("runs: [", "runs: [{attention: linear}, "), config.parent / "out/table.csv"

    def add_row(*_: object) -> None:
        if config.read_text() == SWEEP:
            config.write_text(longer)
            with pytest.raises(SystemExit, match="8 of 8 runs are not finished"):
                ablate.main(arguments)
            assert table.read_text().count("\n") == 5

    arguments = [str(config), "--output", str(config.parent / "out"), "--no-wait"]
    monkeypatch.setattr(ablate, "train_all", add_row)
    with pytest.raises(SystemExit, match="6 of 6 runs are not finished"):
        ablate.main(arguments)
    assert table.read_text().count("\n") == 5
    assert (config.parent / "out/sweep.yaml").read_text().endswith(longer)
    problem = "has runs that this command has not; the tables are left alone; run the command again to write them"
    assert capsys.readouterr().err == f"warning: {config.parent}/out/runs.csv {problem}\n"


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


@pytest.mark.stress
@pytest.mark.parametrize(("trainer", "amount"), [("stand-in", KILLS or 3), ("train.py", KILLS or 1)])
def test_a_sweep_whose_workers_are_killed_is_that_of_one_worker(trainer, amount, config, fork_server, figure):
    """Two of three workers are killed at random moments, one of them with the run that it trains."""
    announce(config, text="base: base.yaml\nseeds: 3\ngrid: {attention.window_size: [1, 2], schedule.epochs: [2, 3]}\n")
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
            (process,), children = job.pids, []
            while job is jobs[1] and not children:
                time.sleep(0.01)
                children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
            job.signal("SIGKILL")
            for child in children:
                os.kill(int(child), signal.SIGKILL)
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
                row.pop("step (s)", None)
        assert tables[0] == tables[1]
        assert all(row["seeds"] == "3" for row in tables[0])
    figure("X3", f"two of three workers killed, {amount} times ({trainer}): as one worker; {taken_over} runs resumed")


def test_data_are_opened_before_any_run(config, capsys):
    config.write_text("base: base.yaml\nruns:\n  - {data.subset: 100}\n  - {data.folds: 150, data.fold: 0}\n")
    with pytest.raises(SystemExit, match="2"):
        ablate.main([str(config), "--output", str(config.parent / "out")])
    problem = "data.folds = 150, but class '0' has 142 images; lower it"
    assert capsys.readouterr().err == f"error: data.folds=150,data.fold=0: {problem}\n"
    assert not (config.parent / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--output /dev/null/sweep", "--output /dev/null/sweep: cannot be made: Not a directory"),
        ("--output /dev/null/sweep --dry-run", "--output /dev/null/sweep: cannot be made: Not a directory"),
        (f"--output {256 * 'x'} --dry-run", f"--output {256 * 'x'}: cannot be made: File name too long"),
        ("--output /nowhere/out --dry-run", "--output /nowhere/out: cannot be made: / is not writable"),
        ("--output run --dry-run", f"--output run/{NAMES[1]}: cannot be made: Not a directory"),
        ("--output table", "table/table.md: cannot be written: Is a directory"),
        ("--output figure", "figure/pareto.png: cannot be written: Is a directory"),
        ("--output out --launcher torchrum", "--launcher: 'torchrum' is not a command here"),
        ("base.yaml", "base.yaml: the configuration of one run; give it to train.py, or name it as base of a sweep"),
    ],
)
def test_what_cannot_begin_is_one_line_before_any_run(config, launcher, capsys, monkeypatch, arguments, problem):
    for name in ("table/table.md", "figure/pareto.png", "run"):
        (config.parent / name).mkdir(parents=True)
    (config.parent / "run" / NAMES[1]).touch()
    monkeypatch.chdir(config.parent)
    if "/nowhere" in arguments:
        monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
    words = arguments.split() if arguments.startswith("base") else [config.name, *arguments.split()]
    for option, value in {"--output": "out", "--launcher": launcher}.items():
        words += [option, value] * (option not in words)
    with pytest.raises(SystemExit, match="2"):
        ablate.main(words)
    assert capsys.readouterr().err == f"error: {problem}\n"
    assert not trained(config)


def test_a_disk_that_is_full_ends_a_sweep_in_one_line(config, launcher, capsys, monkeypatch):
    output = announce(config)

    monkeypatch.setattr(ablate, "store_sweep", lambda *_: monkeypatch.setattr(files, "write_atomically", no_space))
    sweep(config, launcher, status=2)
    shown = capsys.readouterr()
    problem = f"{output}/table.md: cannot be written: No space left on device; what was there is unchanged"
    assert shown.err == f"error: {problem}\n"
    assert "97.50" in shown.out


@pytest.mark.complete
def test_a_failed_run_is_reported_and_the_others_go_on(config, launcher, pictures, capfd):
    (config.parent / "fail").touch()
    # nothing to plot when the first run has failed
    output = announce(config, text=GRID.replace(", paper: 77.16", ""))
    sweep(config, launcher, status=f"error: 1 of 3 runs failed: {output / NAMES[0]}")
    lines = capfd.readouterr().err.splitlines()
    assert lines[:3] == ["====", "error: out of memory", "===="]
    assert lines[3] == "run 1/3 failed, status 1: error: out of memory"
    assert [row["top-1 (%)"] for row in rows(output)] == ["", "97.50", "97.50"]
    (config.parent / "fail").unlink()
    sweep(config, launcher)
    assert [row["top-1 (%)"] for row in rows(output)] == ["97.50"] * 3
    assert trained(config) == [*NAMES, NAMES[0]]


def test_a_failure_is_told_with_its_status_and_the_last_error(config, capfd):
    config.write_text(ONE)
    say = "print('error: out of memory', file=sys.stderr); print('====', file=sys.stderr)"
    torchrun = "raise type('ChildFailedError', (Exception,), {})('train.py FAILED')"
    for program, told in (
        ("print('Killed', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)", "signal SIGKILL: Killed"),
        ("raise ValueError('bad size')", "status 1: ValueError: bad size"),
        (f"{say}; {torchrun}", "status 1: error: out of memory"),
        ("sys.exit(0)", "status 0 without a result: it has printed no error"),
        ("sys.exit(137)", "signal SIGKILL: it has printed no error"),
    ):
        launcher = shlex.join([sys.executable, "-c", f"import os, sys; {program}"])
        directory = config.parent / "out/attention=softmax"
        sweep(config, launcher, status=f"error: 1 of 1 runs failed: {directory}")
        assert f"run 1/1 failed, {told}\n  {launcher} " in capfd.readouterr().err
        assert (directory / "ablate.failed").read_text().startswith(f"run 1/1 failed, {told}\n")


STOPPED_BY_SIGNALS = (  # blocked until it is waited for, so that the signal cannot come too early
    "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
    "[os.kill(os.getppid(), number) for number in (signal.SIGINT, signal.SIGTERM)];"
    "signal.sigwait([signal.SIGTERM]); raise SystemExit(75)"
)


@pytest.mark.parametrize("status", ["75", "1"], ids=["train.py", "torchrun, of stopped ranks"])
def test_a_signal_is_left_to_the_run_which_saves(config, capfd, status):
    """Ctrl-C reaches both processes, SIGTERM ablate.py alone; the run ends with the status of a stopped one."""
    launcher = [sys.executable, "-c", STOPPED_BY_SIGNALS.replace("75", status)]
    assert run_to_end(launcher) == STOPPED
    sweep(config, shlex.join(launcher), status=STOPPED)
    assert "run 1/3 is stopped; the same command goes on" in capfd.readouterr().out
    sweep(config, STOPPING, status=STOPPED)
    assert "run 1/3 is stopped; the same command goes on" in capfd.readouterr().out


def test_a_signal_that_nohup_ignores_ends_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hang_up = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
    assert run_to_end([sys.executable, "-c", hang_up]) == 0
    signal.signal(signal.SIGHUP, before)


def test_a_sweep_that_is_stopped_shows_what_it_has(config, pictures, capfd):
    _, settings, _ = read(config)
    finish(settings[0].cases[0], top1=91.25)
    sweep(config, STOPPING, status=STOPPED)
    assert "| 91.25 |" in capfd.readouterr().out
    for name in ("table", "pareto"):
        assert (config.parent / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_of_twelve_rows_fits_a_screen_and_names_the_seeds_of_all(config, capsys):
    """40 lines of 80 columns."""
    config.write_text("base: base.yaml\nseeds: 3\ngrid: {attention.window_size: [1, 2, 4], optim.lr: [1, 2, 3, 4]}\n")
    ablate.main([str(config), "--output", str(config.parent / "out"), "--dry-run"])
    out = capsys.readouterr().out
    assert "\n12 rows, train.seed 0, 1, 2; 0 of 36 runs finished\n" in out
    assert sum(max(1, -(-len(line) // 80)) for line in out.splitlines()) <= 40
    config.write_text("base: base.yaml\ngrid: {train.seed: [3, 1]}\n")
    ablate.main([str(config), "--output", str(config.parent / "out"), "--dry-run"])
    assert "\n2 rows, train.seed 1, 3; 0 of 2 runs finished\n" in capsys.readouterr().out


def test_a_dry_run_shows_everything_and_writes_nothing(config, capsys):
    before = sorted(config.parent.rglob("*"))
    ablate.main([str(config), "--output", str(config.parent / "out"), "--dry-run"])
    out = capsys.readouterr().out
    assert "\n3 rows, train.seed 0; 0 of 3 runs finished\nThe first run: " in out
    assert out.endswith(f"attention.position_bias=table --output {config.parent / 'out' / NAMES[0]}\n")
    assert sorted(config.parent.rglob("*")) == before


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
