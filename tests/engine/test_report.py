"""The records of a run: console, metrics.jsonl and TensorBoard, by the primary rank alone."""

import fcntl
import json
import math
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.bar import progress_bar
from engine.data import create_val_loader
from engine.distributed import World
from engine.evaluate import evaluate
from engine.progress import Progress
from engine.report import Report, peak_memory_mb, provenance
from engine.schema import Data, Run, Schedule, Train
from tests.support.launcher import use_few_images
from train import Trainer

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
    report.begin_epoch(1)
    report.end_step()
    report.train(1, loss=2.5, lr=1e-3, grad_norm=math.inf)
    report.eval(1, {"top1": 50.0, "top5": 90.0, "loss": 1.5, "ema_top1": 40.0})
    report.final(top1=50.0, best_top1=50.0, macs=5678)
    report.sync()
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


@contextmanager
def terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """stderr as a terminal of `width` columns; afterwards the list holds what was drawn on its lines."""
    (controller, terminal), drawn, content = os.openpty(), [], b""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with os.fdopen(terminal, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        yield drawn
    with suppress(OSError):  # the end of what the closed side has written
        while True:
            content += os.read(controller, 2**16)
    os.close(controller)
    drawn += [line for line in re.split(r"[\r\n]+", content.decode()) if line.strip()]


@pytest.mark.parametrize("width", [80, 120])
def test_progress_bar_on_a_terminal(tmp_path, capsys, monkeypatch, width):
    with terminal(width, monkeypatch) as drawn:
        record_run(tmp_path)
    assert "train " not in capsys.readouterr().out
    assert drawn[0].startswith("epoch 1/2:   0%|   ")
    assert re.fullmatch(r"epoch 1/2: 100%\|█{20,}\| ETA 00:00, [\d.]+k? images/s, loss 2\.5000", drawn[-1])
    assert {len(line) for line in drawn} == {width - 1}  # tqdm keeps out of the last column


@pytest.mark.parametrize(("width", "least"), [(80, 12), (120, 50)])
def test_a_long_run_leaves_room_for_the_bar(monkeypatch, width, least):
    with terminal(width, monkeypatch), progress_bar("epoch 300/300", 300 * 1_281_167) as bar:
        bar.set_postfix_str("loss 6.9078")
        state = {"n": 1_281_167, "elapsed": 7000, "rate": 999, "ncols": width}
        line = bar.format_meter(**bar.format_dict | state)
    shown = re.fullmatch(r"epoch 300/300:   0%\|(.+)\| ETA 106:30:52, 999 images/s, loss 6\.9078", line)
    assert len(line) == width
    assert len(shown[1]) >= least


@pytest.mark.parametrize("width", [80, 120])
def test_evaluation_has_a_bar_and_leaves_none(monkeypatch, width):
    def eager(*args, **kwargs):
        bar = progress_bar(*args, **kwargs)
        bar.mininterval = 0
        return bar

    use_few_images(8, 48, monkeypatch.setattr)
    monkeypatch.setattr("engine.evaluate.progress_bar", eager)
    run = Run(model={}, attention="softmax", data=Data(dataset="digits", workers=0))
    world = World(CPU)
    loader = create_val_loader(run, world, img_size=4, num_classes=10, batch_size=16)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10))
    with terminal(width, monkeypatch) as drawn:
        evaluate(model, loader, world, None)
    assert [line[:16] for line in drawn] == [f"evaluation: {share:3d}%" for share in (0, 33, 67, 100)]
    assert re.fullmatch(r"evaluation:  67%\|█+[^|]* *\| ETA 00:00, [\d.]+k? images/s", drawn[2])
    assert {len(line) for line in drawn} == {width - 1}


def test_no_bar_without_a_terminal(tmp_path, capsys):
    record_run(tmp_path)
    assert capsys.readouterr().err == ""


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


def test_records_are_on_disk_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report = Report(tmp_path, RUN, Progress(), total_steps=1, device=CPU)
    report.start(0, processes=1)
    done = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.path.samestat(os.fstat(descriptor), metrics)))
    metrics = os.stat(tmp_path / "metrics.jsonl")
    checkpoints = SimpleNamespace(save=lambda *what: done.append("checkpoint"))
    trainer = SimpleNamespace(
        report=report, checkpoints=checkpoints, guard=SimpleNamespace(settle=lambda: None), progress=None, stateful=None
    )
    Trainer.save(trainer)
    report.close()
    assert done == [True, "checkpoint"]


def test_other_ranks_record_nothing(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    record_run(None)
    assert capsys.readouterr() == ("", "")
    assert not any(tmp_path.iterdir())


def test_provenance_outside_a_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    assert provenance(CPU)["git"] is None


def test_provenance_installed_in_the_repository_of_another_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    commit = ["-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "--allow-empty", "--message=theirs"]
    for command in (["init", "--quiet"], commit):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr("engine.report.__file__", str(tmp_path / "report.py"))
    assert provenance(CPU)["git"] is None


def test_peak_memory_is_that_of_the_system():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert peak_memory_mb(CPU) == pytest.approx(int(status["VmHWM"].split()[0]) / 1024, rel=0.01)
