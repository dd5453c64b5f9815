"""The GPU run, tried on the CPU: its tasks, its files, and what a failure leaves behind."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_run, gpu_tasks
from bench.gpu_tasks import COLUMNS, MODELS, OURS, Worker
from engine.runtime.files import dicts_to_csv


@pytest.fixture
def worker(tmp_path):
    for file, columns in COLUMNS.items():
        (tmp_path / file).write_bytes(dicts_to_csv([], columns))
    return Worker(tmp_path, smoke=True, turn=lambda: None)


def rows(directory, file: str) -> list[dict[str, str]]:
    with (directory / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_waves_have_every_task_once():
    found = [task for wave in gpu_run.WAVES for task in wave.split()]
    training = [f"{model}/{network}" for model in MODELS for network in ("timm", *OURS)]
    others = ["layers/784", "layers/3136", "layers/others", "inference/1", "inference/128", "errors/0", "errors/1"]
    assert sorted(found) == sorted({*training, *others} - {f"small8/{name}" for name in ("lara", "performer", "local")})


@pytest.mark.parametrize("model", MODELS)
def test_networks_are_those_of_configurations(worker, model):
    for network in OURS:
        run = worker.run_of(model, network)
        assert run.train.amp == "bf16"
        assert run.model["drop_path_rate"] == 0.1


def test_a_failure_is_a_row_and_another_execution_follows(worker, tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("too bad")

    monkeypatch.setattr(Worker, "ours", fail)
    worker.run("tiny8/eva")
    found = rows(tmp_path, "gpu_training.csv")
    assert [row["execution"] for row in found] == [gpu_tasks.BEST, "cuda-graph", "compiled", "eager"]
    assert all("too bad" in row["failure"] and row["name"] == "eva" and not row["seconds"] for row in found)


@pytest.mark.complete
def test_subjects_beside_one_that_fails_are_measured(worker, tmp_path, monkeypatch):
    def fail(comparison, device):
        if any(subject.name == "eva" for subject in comparison.subjects):
            raise RuntimeError("too bad")
        return set_up(comparison, device)

    set_up = gpu_tasks.set_up
    monkeypatch.setattr(gpu_tasks, "set_up", fail)
    subjects = [gpu_tasks.attention_layer(name, 12, 3) for name in ("softmax", "eva", "local")]
    where = (8, 9), 2, "forward+backward", "fp32", "eager"
    worker.compare("gpu_layers.csv", [gpu_tasks.Comparison("attention", subjects, "softmax", [], *where)])
    found = rows(tmp_path, "gpu_layers.csv")
    assert [row["name"] for row in found if row["failure"]] == ["eva local", "eva"]
    assert [row["name"] for row in found if row["speedup"]] == ["softmax", "local"]


@pytest.mark.complete
def test_every_step_on_the_cpu(tmp_path):
    tasks = "tiny8/timm", "tiny8/eva", "layers/784", "inference/1", "errors/0", "tiny8/nothing"
    command = [sys.executable, "-m", "bench.gpu_run", "--smoke", "--output", str(tmp_path), "--tasks", *tasks]
    root, environment = Path(gpu_run.__file__).parents[1], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert "tiny8/nothing: ended" in done.stdout  # a process that fails harms no other
    training = rows(tmp_path, "gpu_training.csv")
    assert [row["name"] for row in training] == ["timm"] * 3 + ["eva", "timm"]
    for file in COLUMNS:
        found = rows(tmp_path, file)
        assert found
        assert not any(row["failure"] for row in found)
        assert all(row["torch"] and row["device"] for row in found)
