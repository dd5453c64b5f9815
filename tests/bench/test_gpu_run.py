"""The GPU run, tried on the CPU: its tasks, its files, and what a failure leaves behind."""

import csv

import pytest

from bench import gpu_run, gpu_tasks
from bench.gpu_tasks import COLUMNS, MODELS, NETWORKS, STEPS, Worker, tasks
from engine.runtime.files import dicts_to_csv


@pytest.fixture
def worker(tmp_path):
    for file, columns in COLUMNS.items():
        (tmp_path / file).write_bytes(dicts_to_csv([], columns))
    return Worker(tmp_path, "time", smoke=True)


def rows(directory, file: str) -> list[dict[str, str]]:
    with (directory / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_both_phases_begin_with_the_most_valuable_task():
    for phase in ("warm", "time"):
        found = tasks(phase, STEPS, [*MODELS], NETWORKS)
        assert found[: len(NETWORKS)] == [f"training/tiny8/{network}" for network in NETWORKS]
        assert found.index("training/tiny4/timm") < found.index("inference/1") < found.index("training/small8/eva")
        assert ("layers/784" in found) == (phase == "time")
        assert ("errors/0" in found) == (phase == "warm")


@pytest.mark.parametrize("model", MODELS)
def test_networks_are_those_of_configurations(worker, model):
    for network in NETWORKS:
        run = worker.run_of(model, network)
        assert run.train.amp == "bf16"
        assert run.model["drop_path_rate"] == 0.1


def test_a_failure_is_a_row_and_another_execution_follows(worker, tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("too bad")

    monkeypatch.setattr(Worker, "ours", fail)
    worker.peer = "tiny8", {"eager": lambda: None}
    worker.run("training/tiny8/eva")
    found = rows(tmp_path, "gpu_training.csv")
    assert [row["execution"] for row in found] == [gpu_tasks.BEST, "cuda-graph", "compiled", "eager"]
    assert all("too bad" in row["failure"] and row["name"] == "eva" and not row["seconds"] for row in found)


@pytest.mark.complete
def test_every_step_on_the_cpu(tmp_path, capfd):
    options = ["--smoke", "--processes", "2", "--models", "tiny8", "--networks", "timm", "eva"]
    gpu_run.main([*options, "--output", str(tmp_path)])
    assert "time: finished" in capfd.readouterr().out
    training = rows(tmp_path, "gpu_training.csv")
    assert [row["name"] for row in training] == ["timm"] * 4 + ["eva"]
    assert [row["baseline"] for row in training] == ["timm, compiled-cuda-graph"] * 5
    for file in COLUMNS:
        found = rows(tmp_path, file)
        assert found
        assert not any(row["failure"] for row in found)
        assert all(row["torch"] and row["device"] for row in found)
