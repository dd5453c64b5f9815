"""The table of all runs, and the comparison of several."""

import fcntl
import json
import multiprocessing
from pathlib import Path

import pytest

from engine.reporting.metrics import epochs_csv
from engine.reporting.runs import COLUMNS, main, summarise

START = {"kind": "start", "epoch": 0, "step": 0, "epochs": 4, "total_steps": 40, "elapsed_seconds": 10.0}
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
        (TRAIN, "interrupted"),
        ({**START, "epoch": 1, "step": 20, "elapsed_seconds": 50.0}, "interrupted"),  # resumed, and killed at once
    ],
)
def test_states(tmp_path: Path, end: dict, state: str):
    row = summarise(make_run(tmp_path / "run", START, EVAL, TRAIN, {**TRAIN, **end}))
    assert row == dict(zip(COLUMNS, (state, "2/4", "87.50", "100", "0:00:50", "", "", ""), strict=True))


def test_options_that_were_changed_within_a_run_are_named(tmp_path: Path):
    changes = [
        {"kind": "change", "epoch": 1, "step": 10, "option": "optim.lr", "before": 1e-3, "now": 5e-4},
        {"kind": "change", "epoch": 2, "step": 20, "option": "processes", "before": 2, "now": 1},
    ]
    row = summarise(make_run(tmp_path / "run", START, EVAL, changes[0], TRAIN, changes[1]))
    assert row["changed"] == "optim.lr 0.001 -> 0.0005 at step 10; processes 2 -> 1 at step 20"


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


def test_a_run_of_an_earlier_version(tmp_path: Path):
    old = {"kind": "start", "epoch": 0, "step": 0}, {"kind": "eval", "epoch": 1, "step": 9, "top1": 50.0}
    row = summarise(make_run(tmp_path / "run", *old, {"kind": "final", "epoch": 1, "step": 9, "top1": 50.0}))
    assert [*row.values()] == ["finished", "1/?", "50.00", "", "", "", "", ""]


def test_runs_below_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture):
    make_run(tmp_path / "sweep/b", START, EVAL)
    make_run(tmp_path / "a")
    (tmp_path / "sweep/lock").touch()
    main([str(tmp_path)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", *" ".join(COLUMNS).split()]
    assert [line[:3] for line in lines[1:]] == [
        [f"{tmp_path}/a", "not", "begun"],
        [f"{tmp_path}/sweep/b", "interrupted", "1/4"],
    ]


def test_comparison(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Run directories and files are compared, also if one has more epochs."""
    second = {**EVAL, "epoch": 2, "step": 20, "top1": 90.25}
    a = make_run(tmp_path / "a", START, EVAL)
    (tmp_path / "b.csv").write_bytes(epochs_csv([EVAL | {"top1": 88.0}, TRAIN, second]))
    main([str(a), str(tmp_path / "b.csv"), "--compare", "eval_top1"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["epoch", str(a), f"{tmp_path}/b.csv", "difference"], ["1", "87.5", "88", "+0.5"], ["2", "90.25"]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["absent"], "absent: no such folder"),
        (["empty"], "empty: no run in it"),
        (["a", "--compare", "eval_top"], "--compare: 'eval_top' is no column of a; did you mean 'eval_top1'?"),
        (["a", "absent.csv", "--compare", "eval_top1"], "absent.csv: cannot be read as epochs.csv: "),
        (["empty", "--compare", "eval_top1"], "empty: no epochs of a run; name its directory or its epochs.csv"),
        (["a/lock", "--compare", "eval_top1"], "a/lock: no epochs of a run; name its directory or its epochs.csv"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, monkeypatch, capsys, arguments: list[str], problem: str):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", START, EVAL)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: {problem}")
