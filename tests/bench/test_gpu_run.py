"""The GPU run, tried on the CPU: its tasks, its files, and what a failure leaves behind."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import gpu_run, gpu_tasks
from bench.gpu_tasks import COLUMNS, FILE, MODELS, OURS, Worker
from engine.runtime.distributed import precision
from engine.runtime.files import dicts_to_csv


@pytest.fixture
def worker(tmp_path):
    (tmp_path / FILE).write_bytes(dicts_to_csv([], COLUMNS))
    return Worker(tmp_path, smoke=True, turn=lambda: None)


def rows(directory) -> list[dict[str, str]]:
    with (directory / FILE).open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_waves_have_every_task_once():
    found = [task for wave in gpu_run.WAVES for task in wave.split()]
    training = [f"{model}/{network}" for model in MODELS for network in ("timm", *OURS)]
    assert sorted(found) == sorted({*training} - {f"small8/{name}" for name in ("lara", "performer", "local")})


@pytest.mark.parametrize("model", MODELS)
def test_networks_are_those_of_configurations(worker, model):
    for network in OURS:
        run = worker.run_of(model, network)
        assert precision(run.train.amp, torch.device("cuda")) == "bf16"
        assert run.model["drop_path_rate"] == 0.1


def test_a_failure_is_a_row_and_another_execution_follows(worker, tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("too bad")

    monkeypatch.setattr(Worker, "ours", fail)
    worker.run("tiny8/eva")
    found = rows(tmp_path)
    assert [row["execution"] for row in found] == [gpu_tasks.BEST, "cuda-graph", "compiled", "eager"]
    assert all("too bad" in row["failure"] and row["name"] == "eva" and not row["seconds"] for row in found)


def test_a_process_that_dies_while_it_waits_loses_only_its_own_rows(tmp_path, monkeypatch, capfd):
    def work(task, output, smoke, connection):
        connection.send(None)
        if task != "dies":
            connection.recv()
            time.sleep(0.5)  # meanwhile the next one dies
            (output / task).touch()

    monkeypatch.setattr(gpu_tasks, "main", work)
    gpu_run.run_wave(["first", "dies", "last"], tmp_path, False, time.monotonic() + 60)
    assert {path.name for path in tmp_path.iterdir()} == {"first", "last"}
    assert "dies: ended" in capfd.readouterr().out


@pytest.mark.complete
def test_every_step_on_the_cpu(tmp_path):
    tasks = "tiny8/timm", "tiny8/eva", "tiny8/nothing"
    command = [sys.executable, "-m", "bench.gpu_run", "--smoke", "--output", str(tmp_path), "--tasks", *tasks]
    root, environment = Path(gpu_run.__file__).parents[1], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert "tiny8/nothing: ended" in done.stdout  # a process that fails harms no other
    found = rows(tmp_path)
    assert [row["name"] for row in found] == ["timm"] * 3 + ["eva", "timm"]
    assert not any(row["failure"] for row in found)
    assert all(row["torch"] and row["device"] for row in found)
