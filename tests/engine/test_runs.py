"""The table of all runs."""

import fcntl
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from ablation.runs import Case
from ablation.worker import is_busy
from engine.checkpoints.progress import Progress
from engine.reporting import metrics
from engine.reporting.metrics import EpochTable, epochs_csv, find_records
from engine.reporting.recorder import Recorder
from engine.reporting.runs import main, summarise
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.runtime.locks import lock_directory
from engine.runtime.terminal import ConsoleLog
from tests.engine.test_recorder import CPU, RUN, WORLD
from tests.support.refusals import refusal
from tests.support.sweeps import read_table

START = {"kind": "start", "epoch": 0, "step": 0, "epochs": 4, "total_steps": 40, "elapsed_seconds": 10.0}
START |= {"command": "train.py configs/quickstart.yaml --output run"}
TRAIN = {"kind": "train", "epoch": 2, "step": 20, "elapsed_seconds": 50.0, "loss": 1.0, "images_per_second": 99.6}
EVAL = {"kind": "eval", "epoch": 1, "step": 10, "elapsed_seconds": 30.0, "top1": 87.5}


def make_run(directory: Path, *records: dict) -> Path:
    directory.mkdir(parents=True)
    (directory / "lock").write_text("process 5 on node1 since Sun Nov 22 09:00:00 2026\n")
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return directory


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"kind": "final", "epoch": 4, "step": 40}, "finished"),
        ({"kind": "stop", "epoch": 1, "step": 20}, "stopped"),
        ({"kind": "fail", "epoch": 1, "step": 20, "reason": "out of memory"}, "failed: out of memory"),
        ({"kind": "fail", "epoch": 1, "step": 20, "reason": 99 * "x"}, f"failed: {57 * 'x'}..."),
        (TRAIN, "interrupted"),
        ({**START, "epoch": 1, "step": 20, "elapsed_seconds": 50.0}, "interrupted"),  # resumed, and killed at once
    ],
)
def test_states(tmp_path: Path, end: dict, state: str):
    row = summarise(make_run(tmp_path / "run", START, EVAL, TRAIN, {**TRAIN, **end}))
    values = state, "configs/quickstart.yaml", "", "", "2/4", "top1 87.5 (epoch 1)", "100", "0:00:50", "", "", ""
    assert (*row.values(),) == values


def test_the_best_epoch_is_shown_by_best_by(tmp_path: Path):
    values = [(92.0, 10.0, 0.5), (10.0, 92.5, 0.3), (60.0, 50.0, None)]
    names = "top1", "ema_top1", "loss"
    evaluations = [EVAL | {"epoch": i} | dict(zip(names, x, strict=True)) for i, x in enumerate(values, 1)]
    run = make_run(tmp_path / "run", START, *evaluations)
    for best_by, best in {"null": "ema_top1 92.5 (epoch 2)", "loss": "loss 0.3 (epoch 2)", "[loss]": ""}.items():
        (run / "config.yaml").write_text(f"train: {{best_by: {best_by}}}\n")
        assert summarise(run)["best"] == best


def test_options_that_were_changed_within_a_run_are_named(tmp_path: Path):
    changes = [
        {"kind": "change", "epoch": 1, "step": 10, "option": "optim.lr", "before": 1e-3, "now": 5e-4},
        {"kind": "change", "epoch": 2, "step": 20, "option": "processes", "before": 2, "now": 1},
    ]
    row = summarise(make_run(tmp_path / "run", START, EVAL, changes[0], TRAIN, changes[1]))
    assert row["changed"] == "optim.lr 0.001 -> 0.0005 at step 10; processes 2 -> 1 at step 20"


TAMPERED = [
    *(b"\xff\xfe", b"[1, 2]", b"null", b"{}", b"[" * 100_000, b"9" * 5000),
    *(b'{"kind": ["train"], "epoch": 1, "step": 1}', b'{"kind": "train", "epoch": "1", "step": 1}'),
    *(b'{"kind": "train", "epoch": 1, "step": -1}', b'{"kind": "train", "epoch": 1}'),
    b'{"kind": "train", "epoch": 1, "step": 5, "loss": NaN}',
    b'{"kind": "train", "epoch": 1, "step": 5, "loss": 1e999}',
    b'{"kind": "train", "epoch": 1, "step": 5, "images_per_second": "fast"}',
    b'{"kind": "eval", "epoch": 1, "step": 5, "top1": [1]}',
    b'{"kind": "eval", "epoch": 1, "step": 5, "elapsed_seconds": null}',
    *(b'{"kind": "final", "epoch": 1, "step": 5, "gpu_hours": {"a": 1}}', b'{"kind": "fail", "epoch": 1, "step": 5}'),
    b'{"kind": "fail", "epoch": 1, "step": 5, "reason": 5}',
    b'{"kind": "start", "epoch": 1, "step": 5, "total_steps": "many"}',
    b'{"kind": "train", "epoch": 1, "step": 5, "time": 5, "images_seen": 9}',
]


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("line", TAMPERED, ids=range(len(TAMPERED)))
def test_a_line_that_is_no_record_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture, line: bytes, number: int):
    """It is named, once, and neither a table nor a run that resumes fails, wherever it stands."""
    run = make_run(tmp_path / "run", START, EVAL, TRAIN)
    expected = summarise(run)
    whole = (run / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[: number - 1], line + b"\n", *lines[number - 1 :]]))
    assert (summarise(run), find_records(run)) == (expected, [START, EVAL, TRAIN])
    error = capsys.readouterr().err
    assert error == f"warning: {run}/metrics.jsonl:{number}: holds no record of a run; left out\n"
    progress = Progress(epoch=1, step=20)
    with Recorder(run, RUN, progress, total_steps=40, world=WORLD):
        assert (run / "metrics.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "train", "epoch": 1, "step": 0, "images_per_second": -5, "loss": 0},
        {"kind": "train", "epoch": 1, "step": 0, "images_per_second": None, "loss": None},
        {"kind": "eval", "epoch": 1, "step": 1, "elapsed_seconds": 1e90, "top1": None, "images_seen": 9},
        {"kind": "start", "epoch": 1, "step": 0, "elapsed_seconds": -1e90, "epochs": 1e90},
        {"kind": "train", "epoch": 3, "step": 30},
        {"kind": "eval", "epoch": 2, "step": 20},
    ],
)
def test_a_record_that_no_run_makes_stops_nothing(tmp_path: Path, record: dict):
    run = make_run(tmp_path / "run", START, {**EVAL, "loss": 1.0}, {**TRAIN, "step_seconds": 0.1}, record)
    summarise(run)
    epochs_csv(EpochTable(find_records(run)).rows)
    Recorder(run, RUN, Progress(epoch=3, step=30), total_steps=40, world=WORLD).bar.close()


def test_what_a_run_says_reaches_the_terminal_as_text(tmp_path: Path, capsys: pytest.CaptureFixture):
    change = {"kind": "change", "epoch": 1, "step": 9, "option": "optim\x1b[2J", "before": "\x1b]0;", "now": ["\x9b"]}
    make_run(tmp_path / "r\x1b[2Jn", START, change, {**TRAIN, "kind": "fail", "reason": "\x1b[31mred\n"})
    main([str(tmp_path)])
    shown = capsys.readouterr().out
    assert "failed: \\x1b[31mred\\n" in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_a_configuration_of_many_aliases_is_that_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = make_run(tmp_path / "run", START, {"kind": "final", "epoch": 4, "step": 40, "top1": 1.0})
    levels = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 30)]
    (run / "config.yaml").write_text("x0: &x0 [0]\n" + "\n".join(levels))
    assert Case(RUN, run, []).result() is None
    warning = f"warning: {run}/config.yaml:1: more than 2000 values; the run counts as another\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize("name", ["metrics.jsonl", "lock", "ablate.lock", "console.log", "config.yaml"])
def test_a_pipe_in_a_run_directory_blocks_nothing(tmp_path: Path, capsys: pytest.CaptureFixture, name: str):
    run = make_run(tmp_path / "run", START, EVAL, TRAIN)
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    make_run(tmp_path / "other", START, EVAL, TRAIN)
    main([str(tmp_path)])
    assert f"{tmp_path}/other" in capsys.readouterr().out
    with ConsoleLog() as log:
        log.keep(run)
        log.add("line")
    case = Case(RUN, run, [])
    assert case.result() is None
    if name == "ablate.lock":
        with pytest.raises(UserError, match="cannot be locked: a pipe or device, not a regular file"):
            is_busy(case)
    else:
        assert is_busy(case) is False
    if name == "lock":
        with pytest.raises(UserError, match="cannot be written: a pipe or device"), lock_directory(run, World(CPU)):
            pass


def test_records_that_are_too_large_are_neither_read_nor_lost(tmp_path: Path, capsys: pytest.CaptureFixture):
    run = make_run(tmp_path / "run", START, EVAL, TRAIN)
    with (run / "metrics.jsonl").open("r+b") as file:
        file.truncate(50 * 2**30)
    assert summarise(run)["state"] == "not begun"
    assert capsys.readouterr().err == f"warning: {run}/metrics.jsonl: larger than 268,435,456 bytes\n"
    assert (run / "metrics.jsonl").stat().st_size == 50 * 2**30


def test_a_run_goes_on_from_any_number_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It keeps the rows of its table, and reads no record again."""
    run = make_run(tmp_path / "run", START, EVAL, TRAIN, {**TRAIN, "step": 30})
    monkeypatch.setattr(metrics, "MAX_METRICS", 100)
    assert find_records(run) == []
    with Recorder(run, RUN, Progress(epoch=1, step=20), total_steps=40, world=WORLD) as recorder:
        monkeypatch.setattr(metrics, "open_regular", None)
        recorder.eval(2, {"top1": 88.0})
        recorder.begin_epoch(3)
    rows = read_table(run / "epochs.csv")
    assert [(row["epoch"], row["step"], row["eval_top1"]) for row in rows] == [("1", "10", "87.5"), ("2", "20", "88.0")]
    assert float(rows[1]["train_images_per_second"]) == pytest.approx(99.6)


def hold(path: Path, pipe) -> None:
    with (path / "lock").open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        pipe.send(True)
        pipe.recv()


def test_a_run_that_is_running(tmp_path: Path):
    """The table shows its host, and the time left by the speed since its launch, with evaluations."""
    again = {**START, "epoch": 1, "step": 10, "elapsed_seconds": 30.0}
    run = make_run(tmp_path / "run", START, EVAL, {"kind": "stop", "epoch": 1, "step": 10}, again, TRAIN)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(run, there))
    process.start()
    here.recv()
    row = summarise(run)
    here.send(True)
    process.join()
    assert row["state"] == "running: process 5 on node1 since Sun Nov 22 09:00:00 2026"
    assert row["ETA"] == "0:00:40"


@pytest.mark.parametrize(
    ("config", "names"),
    {
        "model: {name: deit_tiny_p8}\nattention: {name: eva, window_size: 7}": ("deit_tiny_p8", "eva"),
        "model: {name: x}\nattention: [{name: eva}, {name: softmax}, {name: eva}]": ("x", "eva+softmax"),
        "model: {name: timm:vit}\nattention: null": ("timm:vit", ""),
        "model: 3\nattention: [4]": ("", ""),
        "not: [a yaml": ("", ""),
    }.items(),
)
def test_the_model_and_the_attention_of_a_run(config: str, names: tuple[str, str], tmp_path: Path):
    run = make_run(tmp_path / "run", START)
    (run / "config.yaml").write_text(config)
    row = summarise(run)
    assert (row["model"], row["attention"]) == names


def test_runs_below_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture):
    make_run(tmp_path / "sweep/b", START, EVAL)
    make_run(tmp_path / "a")
    (tmp_path / "sweep/lock").touch()
    main([str(tmp_path)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", *" ".join(summarise(tmp_path / "a")).split()]
    rows = [[f"{tmp_path}/a", "not", "begun"], [f"{tmp_path}/sweep/b", "interrupted", "configs/quickstart.yaml"]]
    assert [line[:3] for line in lines[1:]] == rows


@pytest.mark.parametrize(("path", "problem"), [("absent", "no such folder"), ("empty", "no run in it")])
def test_bad_input_is_one_line(tmp_path: Path, monkeypatch, capsys, path: str, problem: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert refusal(main, [path], capsys) == f"error: {path}: {problem}\n"
