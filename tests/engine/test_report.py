"""The records of a run: console, metrics.jsonl and TensorBoard, by the primary rank alone."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.checkpoint import Progress
from engine.report import Report, peak_memory_mb, provenance
from engine.schema import Data, Run, Schedule, Train

CPU = torch.device("cpu")
RUN = Run(
    model={"name": "deit"},
    attention=[{"name": "eva", "window_size": 7}],
    data=Data(mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0)),
    schedule=Schedule(epochs=2),
    train=Train(total_batch_size=8),
)
IMAGES = torch.tensor([0.0, 0.5, 1.0])[:, None, None, None] * torch.ones(3, 3, 4, 4)


def record_run(directory: Path | None) -> None:
    """A run of one update."""
    report = Report(directory, RUN, Progress(), total_steps=1, device=CPU)
    report.start(0, processes=1, parameters=1234, macs=5678)
    mean, std = (torch.tensor(values)[:, None, None] for values in (RUN.data.mean, RUN.data.std))
    report.images((IMAGES - mean) / std, RUN.data.mean, RUN.data.std)
    report.begin_epoch()
    report.end_step()
    report.train(1, loss=2.5, lr=1e-3, grad_norm=math.inf)
    report.eval(1, {"top1": 50.0, "top5": 90.0, "loss": 1.5, "ema_top1": 40.0})
    report.final(top1=50.0, best_top1=50.0, macs=5678)
    report.close()


def records(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_records(tmp_path: Path):
    record_run(tmp_path)
    start, train, evaluation, final = records(tmp_path)
    assert {**start, "processes": 1, "parameters": 1234, "macs": 5678} == start
    assert {"kind": "start", "epoch": 0, "step": 0}.items() <= start.items()
    assert start["torch"] == torch.__version__.partition("+")[0]
    assert {"kind": "train", "epoch": 1, "step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": None}.items() <= train.items()
    assert train["images_per_second"] == pytest.approx(8 / train["step_seconds"])
    assert evaluation == {
        "kind": "eval", "epoch": 1, "step": 1, "top1": 50.0, "top5": 90.0, "loss": 1.5, "ema_top1": 40.0
    }  # fmt: skip
    assert final["kind"] == "final"
    assert final["step_seconds"] == train["step_seconds"]
    assert 50 < final["memory_mb"] < 100_000


def test_console(tmp_path: Path, capsys: pytest.CaptureFixture):
    record_run(tmp_path)
    start, train, evaluation, final = capsys.readouterr().out.splitlines()
    assert start == "start  epoch 0/2  step 0/1  1,234 parameters  5,678 MACs"
    assert train.startswith("train  epoch 1/2  step 1/1  loss 2.5000  lr 1.00e-03  gradient inf  ")
    assert all(unit in train for unit in (" images/s  ", " MB  ", "ETA 0:00:00"))
    assert evaluation == "eval   epoch 1/2  step 1/1  top-1 50.00 %  top-5 90.00 %  loss 1.5000  EMA top-1 40.00 %"
    assert final.startswith("final  epoch 2/2  step 1/1  top-1 50.00 %  best top-1 50.00 %  5,678 MACs  ")


def test_progress_bar_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    record_run(tmp_path)
    out, err = capsys.readouterr()
    assert "train " not in out
    assert "1/1" in err
    assert "loss 2.5000  lr 1.00e-03" in err


def test_tensorboard(tmp_path: Path):
    record_run(tmp_path)
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == 0  # hyper-parameters are no run of their own
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    shown = {"train/loss": 2.5, "eval/top1": 50.0, "eval/top5": 90.0, "eval/loss": 1.5, "eval/ema_top1": 40.0}
    assert shown.items() <= scalars.items()
    assert {"train/lr", "train/grad_norm", "train/images_per_second", "train/memory_mb"} <= scalars.keys()
    assert b"total_batch_size: 8" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    hparams = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"attention.0.window_size" in hparams
    assert "final/top1" in scalars


def test_images_are_shown_as_they_look(tmp_path: Path):
    record_run(tmp_path)
    grid = EventAccumulator(str(tmp_path)).Reload().Images("train/images")[0]
    (tmp_path / "grid.png").write_bytes(grid.encoded_image_string)
    with Image.open(tmp_path / "grid.png") as image:
        pixels = np.asarray(image)
    assert pixels.shape == (4 + 2 * 2, 3 * (4 + 2) + 2, 3)
    assert [pixels[4, x].tolist() for x in (4, 10, 16)] == [[0, 0, 0], [127, 127, 127], [255, 255, 255]]


def test_grey_images_are_shown_as_they_look(tmp_path: Path):
    """With the normalisation that they have: the mean of the channels' means, 0.25, and of their deviations."""
    report = Report(tmp_path, RUN, Progress(), total_steps=1, device=CPU)
    report.images((IMAGES[:, :1] - 0.25) / (1.75 / 3), RUN.data.mean, RUN.data.std)
    report.close()
    grid = EventAccumulator(str(tmp_path)).Reload().Images("train/images")[0]
    (tmp_path / "grid.png").write_bytes(grid.encoded_image_string)
    with Image.open(tmp_path / "grid.png") as image:
        pixels = np.asarray(image)
    assert [pixels[4, x].tolist() for x in (4, 10, 16)] == [[0, 0, 0], [127, 127, 127], [255, 255, 255]]


def test_what_will_be_repeated_is_dropped(tmp_path: Path):
    record_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # the process died while writing
    Report(tmp_path, RUN, Progress(), total_steps=1, device=CPU).close()
    assert [record["kind"] for record in records(tmp_path)] == ["start"]


def test_other_ranks_record_nothing(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    record_run(None)
    assert capsys.readouterr() == ("", "")
    assert not any(tmp_path.iterdir())


def test_provenance_outside_a_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    assert provenance(CPU)["git"] is None


def test_peak_memory_is_that_of_the_system():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert peak_memory_mb(CPU) == pytest.approx(int(status["VmHWM"].split()[0]) / 1024, rel=0.01)
