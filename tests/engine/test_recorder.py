"""The records of a run: console, metrics.jsonl and TensorBoard, by the primary rank alone."""

import csv
import fcntl
import io
import json
import math
import os
import platform
import re
import resource
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

from engine.checkpoints.progress import Progress, Resumption
from engine.config.schema import Data, Run, Schedule, Train
from engine.reporting.charts import chosen_options
from engine.reporting.metrics import TOTALS
from engine.reporting.prometheus import Heartbeat
from engine.reporting.recorder import Recorder, SilentRecorder
from engine.run.load import load_run
from engine.runtime.distributed import World, precision
from engine.runtime.files import append_whole
from engine.runtime.provenance import provenance
from engine.runtime.terminal import ConsoleLog
from tests.support.launcher import no_space
from train import Trainer

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
WORLD = World(CPU)
RUN = Run(
    model={"name": "deit"},
    attention=[{"name": "eva", "window_size": 7}],
    data=Data(mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0)),
    schedule=Schedule(epochs=2),
    train=Train(total_batch_size=8),
)
IMAGES = torch.tensor([0.0, 0.5, 1.0])[:, None, None, None] * torch.ones(3, 3, 4, 4)


def record_run(directory: Path, kind: type[SilentRecorder] = Recorder) -> None:
    """A run of one update."""
    progress = Progress()
    recorder = kind(directory, RUN, progress, total_steps=1, world=WORLD)
    recorder.start(0, processes=1, parameters=1234, macs=5678)
    mean, std = (torch.tensor(values)[:, None, None] for values in (RUN.data.mean, RUN.data.std))
    recorder.images((IMAGES - mean) / std)
    recorder.begin_epoch(1)
    recorder.end_step()
    recorder.train(1, loss=2.5, lr=1e-3, grad_norm=math.inf)
    recorder.eval(1, {"top1": 50.0, "top5": 90.0, "loss": 1.5, "ema_top1": 40.0, "recall/cat": 75.0})
    progress.epoch = 2
    recorder.final(top1=50.0, best_top1=50.0, macs=5678)
    recorder.sync()
    recorder.saved()
    if kind is Recorder:
        recorder.bar.close()


def records(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture):
    record_run(tmp_path)
    assert f"train.amp = auto: {precision('auto', CPU)} on this device\n" in capsys.readouterr().out
    start, train, evaluation, final = records(tmp_path)
    assert {**start, "processes": 1, "parameters": 1234, "macs": 5678} == start
    assert {"kind": "start", "epoch": 0, "step": 0}.items() <= start.items()
    assert start["torch"] == torch.__version__.partition("+")[0]
    assert {"kind": "train", "epoch": 1, "step": 1, "loss": 2.5, "lr": 1e-3, "grad_norm": None}.items() <= train.items()
    assert train["images_per_second"] == pytest.approx(8 / train["step_seconds"])
    assert {name: value for name, value in evaluation.items() if name not in TOTALS} == {
        "kind": "eval", "epoch": 1, "step": 1,
        "top1": 50.0, "top5": 90.0, "loss": 1.5, "ema_top1": 40.0, "recall/cat": 75.0
    }  # fmt: skip
    assert final["kind"] == "final"
    assert final["step_seconds"] == train["step_seconds"]
    assert "memory_mb" not in final  # on a CPU it would be that of the process


def test_slow_updates_are_told_to_a_log_and_to_the_heartbeat(tmp_path: Path, capsys: pytest.CaptureFixture):
    recorder = Recorder(tmp_path, RUN, Progress(), total_steps=9, world=WORLD)
    recorder.start(0, processes=1)
    recorder.begin_epoch(1)
    for _ in range(3):
        recorder.heartbeat.values["record_time_seconds"] -= 20
        recorder.end_step()
    recorder.bar.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("train ")] == ["train  epoch 1/2  step 2/9"]
    assert " 2.0\n" in (tmp_path / "metrics.prom").read_text()


@pytest.mark.parametrize("total_steps", [1000, 9])
def test_the_hours_that_are_left_are_told_once_after_a_minute(tmp_path: Path, capsys, total_steps: int):
    """A tenth of an hour is left at least."""
    recorder = Recorder(tmp_path, RUN, Progress(), total_steps, world=WORLD)
    recorder.start(0, processes=4)
    recorder.speed = SimpleNamespace(since_last=lambda: {"step_seconds": 36.0})
    recorder.num_gpus = 4
    for seconds in (0, 61, 61):
        recorder.began -= seconds
        recorder.train(1, loss=2.5)
    recorder.bar.close()
    told = [line for line in capsys.readouterr().out.splitlines() if "hours" in line]
    line = "by these steps, 10.0 hours, 40.0 GPU-hours are left, without evaluations"
    assert told == [line] * (total_steps == 1000)


def test_a_metric_that_is_no_score_is_said(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Only where it ranks epochs."""
    progress = Progress(metrics={"top1": 50.0, "loss": math.nan, "ema_top1": 50.0, "ema_loss": math.inf})
    for directory, best_by, lines in ((tmp_path, "loss", 2), (tmp_path, "top1", 0)):
        progress.rank(7, 3, best_by)
        Recorder(directory, RUN, progress, total_steps=1, world=WORLD).eval(7, progress.metrics)
        err = capsys.readouterr().err
        assert err.count("warning: ") == lines
        if lines:
            assert "warning: loss = nan of epoch 7 is no score: by it, the epoch is not among the best\n" in err
            assert "warning: ema_loss = inf of epoch 7 is no score" in err


class Clock:
    """Takes the place of `time.monotonic` in reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr("engine.reporting.recorder.time.monotonic", lambda: self.now)


def launch(directory: Path, progress: Progress, device: torch.device = CPU) -> Recorder:
    """Returns the recorder of a run of two epochs of two updates, without drawing anything."""
    recorder = Recorder(directory, RUN, progress, total_steps=4, world=World(device))
    recorder.start(progress.epoch, processes=4)
    return recorder


def make_step(recorder: Recorder, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    recorder.end_step()
    recorder.train(1 + (recorder.step - 1) // 2, loss=2.0)


def test_totals_go_on_after_stops_and_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stops do not count; work that a kill has lost does, as it has been paid for, but its images are counted once."""
    clock, cuda = Clock(monkeypatch), torch.device("cuda")
    monkeypatch.setattr(World, "gather", lambda self, values: [values])
    monkeypatch.setattr("engine.reporting.speed.DataWait._now", lambda self: 0.0)
    monkeypatch.setattr("engine.reporting.speed.DataWait.seconds", lambda self: 0.0)
    monkeypatch.setattr("engine.runtime.provenance.device_name", lambda device: "a GPU")
    progress = Progress()
    with launch(tmp_path, progress, cuda) as recorder:
        recorder.begin_epoch(1)
        make_step(recorder, clock, 9.0)
        progress.step = 1
    clock.now += 1e6  # stopped
    recorder = launch(tmp_path, Progress(step=1), cuda)
    recorder.begin_epoch(1)
    make_step(recorder, clock, 18.0)
    make_step(recorder, clock, 9.0)
    recorder.bar.close()  # killed, and the last checkpoint is that of step 2
    clock.now += 1e6
    recorder = launch(tmp_path, Progress(step=2, epoch=1), cuda)
    recorder.begin_epoch(2)
    make_step(recorder, clock, 9.0)
    recorder.bar.close()

    found = records(tmp_path)
    assert [record["kind"] for record in found] == ["start", "train", "stop", "start", "train", "start", "train"]
    assert [record["images_seen"] for record in found] == [0, 8, 8, 8, 16, 16, 24]
    assert [record["elapsed_seconds"] for record in found] == [0, 9, 9, 9, 27, 36, 45]
    assert [record.get("gpu_hours", 0) for record in found] == [0, 0.01, 0.01, 0.01, 0.03, 0.04, 0.05]
    assert (found[0]["epochs"], found[0]["total_steps"]) == (2, 4)
    for record in found:
        assert abs(datetime.now(UTC) - datetime.fromisoformat(f"{record['time']}+00:00")) < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (None, "stop", None),
        (FloatingPointError("step 3: the loss is not finite\nmore"), "fail", "step 3: the loss is not finite"),
        (KeyboardInterrupt(), "fail", "KeyboardInterrupt"),
    ],
)
def test_the_last_record_says_how_a_launch_ended(tmp_path: Path, capsys: pytest.CaptureFixture, error, kind, reason):
    (directory := tmp_path / "a run").mkdir()
    with suppress(FloatingPointError, KeyboardInterrupt), launch(directory, Progress(epoch=1, step=2)):
        if error is not None:
            raise error
    last = records(directory)[-1]
    assert (last["kind"], last["epoch"], last["step"], last.get("reason")) == (kind, 1, 2, reason)
    line = capsys.readouterr().out.splitlines()[-1]
    names_files = line.startswith(f"logs of {directory}:  epochs.csv ") and line.endswith(f" --logdir '{directory}'")
    assert names_files == (error is None)  # the error is the last line of a launch that fails


def test_a_full_disk_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorder = launch(tmp_path, Progress())
    monkeypatch.setattr(os, "write", no_space)
    with pytest.raises(OSError, match="No space left"), recorder:
        recorder.eval(1, {"top1": 50.0})
    with pytest.raises(KeyError, match="first"), recorder:
        raise KeyError("first")


def test_epochs_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A row has means over the updates of its epoch, also without an evaluation."""
    clock = Clock(monkeypatch)
    recorder = launch(tmp_path, Progress())
    monkeypatch.setattr("engine.reporting.speed.time.perf_counter", lambda: clock.now)
    recorder.begin_epoch(1)
    for _ in range(2):
        clock.now += 2.0
        recorder.end_step()
    recorder.train(1, loss=4.0, lr=0.1, grad_norm=math.inf)
    clock.now += 1.0
    recorder.end_step()
    recorder.train(1, loss=1.0, lr=0.2, grad_norm=0.5)
    recorder.begin_epoch(2)
    with (tmp_path / "epochs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    numbers = {name: float(value) for name, value in row.items() if name != "time"}
    assert numbers == pytest.approx({
        "epoch": 1, "step": 3, "elapsed_seconds": 5.0, "images_seen": 24, "train_loss": 3.0, "train_lr": 0.2,
        "train_grad_norm": 0.5, "train_step_seconds": 5 / 3, "train_images_per_second": 4.8, "train_data_wait": 0.0,
    })  # fmt: skip
    clock.now += 3.0
    recorder.eval(2, {"top1": 50.0})
    recorder.final(top1=50.0)
    recorder.bar.close()
    with (tmp_path / "epochs.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first == row | {"eval_top1": ""}
    assert (second["epoch"], second["eval_top1"], second["elapsed_seconds"]) == ("2", "50.0", "8.0")
    assert [*second][:6] == ["epoch", "step", "time", "elapsed_seconds", "images_seen", "train_loss"]


class Drawn(list[str]):
    """Text that was drawn on a terminal, line by line; `content` has every byte."""

    content: bytes


@contextmanager
def terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> Iterator["Drawn"]:
    """stdout and stderr as a terminal of `width` columns; afterwards the list holds what was drawn on its lines."""
    (controller, terminal), drawn, content = os.openpty(), Drawn(), b""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with os.fdopen(terminal, "w") as file, monkeypatch.context() as patch:
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, file)
        yield drawn
    with suppress(OSError):  # the end of what the closed side has written
        while True:
            content += os.read(controller, 2**16)
    os.close(controller)
    drawn.content = content
    drawn += [line for line in re.split(r"[\r\n]+", content.decode()) if line.strip()]


@pytest.mark.parametrize("width", [80, 200])
def test_progress_bar_on_a_terminal(tmp_path, monkeypatch, width):
    """The bar makes way for the lines, which a narrow terminal breaks between fields."""
    with terminal(width, monkeypatch) as drawn, ConsoleLog() as console:
        console.keep(tmp_path)
        record_run(tmp_path)
    bars = [line for line in drawn if "|" in line]
    lines = [line for line in drawn if line not in bars]
    assert bars[0].startswith("epoch 1/2:   0%|   ")
    assert re.fullmatch(r"epoch 1/2: 100%\|█{20,}\| ETA 00:00, [\d.]+k? images/s, loss 2\.5000", bars[-1])
    assert {len(line) for line in bars} == {width - 1}  # tqdm keeps out of the last column
    assert [line.split()[0] for line in lines if line[0] != " "] == ["train.amp", "start", "train", "eval", "final"]
    assert len(lines) == (8 if width == 80 else 5)
    assert all(len(line) < width for line in lines)
    logged = (tmp_path / "console.log").read_text().splitlines()
    assert [line.split() for line in logged] == [text.split() for text in re.split(r"\n(?! )", "\n".join(lines))]


def test_tensorboard(tmp_path: Path):
    record_run(tmp_path)
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    assert scalars["recall/cat"] == 75.0
    shown = {"train/loss": 2.5, "eval/top1": 50.0, "eval/top5": 90.0, "eval/loss": 1.5, "eval/ema_top1": 40.0}
    assert shown.items() <= scalars.items()
    assert {"train/lr", "train/grad_norm", "train/images_per_second", "train/data_wait"} <= scalars.keys()
    constant = {"broken", "memory_mb", "images", "parameters", "macs", "processes"}
    assert not constant.intersection(tag.partition("/")[2] for tag in scalars)
    assert not any(tag.startswith("final") for tag in scalars)  # charts of a single dot
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []  # hyper-parameters are no run of their own
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = parse_session_start_info_plugin_data(content).hparams
    chosen = {"model.name": "deit", "attention.0.name": "eva", "data.mean": "[0.5, 0.25, 0.0]"}
    chosen |= {"data.std": "[0.5, 0.25, 1.0]", "schedule.epochs": 2, "train.total_batch_size": 8}
    found = {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}
    assert found == chosen | {"final.best_top1": 50.0, "final.macs": 5678}


def test_hyper_parameters_are_no_defaults():
    """Neither those of the model's size, nor options that follow from others."""
    chosen = chosen_options(load_run(ROOT / "configs/deit_small_p16/eva.yaml", ["optim.lr=0.5"]))
    names = {"model.name": "deit_small_p16", "attention.name": "eva"}
    assert chosen == names | {"model.drop_path_rate": 0.1, "attention.released": True, "optim.lr": 0.5}


@pytest.mark.parametrize("is_grey", [False, True])
def test_images_are_shown_as_they_look(tmp_path: Path, is_grey: bool):
    """Grey images have one normalisation: the mean of the channels' means, 0.25, and of their deviations."""
    if is_grey:
        recorder = Recorder(tmp_path, RUN, Progress(), total_steps=1, world=WORLD)
        recorder.images((IMAGES[:, :1] - 0.25) / (1.75 / 3))
        recorder.bar.close()
    else:
        record_run(tmp_path)
    grid = EventAccumulator(str(tmp_path)).Reload().Images("train/images")[0]
    with Image.open(io.BytesIO(grid.encoded_image_string)) as image:
        pixels = np.asarray(image)
    assert pixels.shape == (4 + 2 * 2, 3 * (4 + 2) + 2, 3)
    assert [pixels[4, x].tolist() for x in (4, 10, 16)] == [[0, 0, 0], [127, 127, 127], [255, 255, 255]]


@pytest.mark.parametrize(
    ("progress", "kept"), [(Progress(), ["start"]), (Progress(epoch=1, step=1), ["start", "train", "eval"])]
)
def test_what_will_be_repeated_is_dropped(tmp_path: Path, progress: Progress, kept: list[str]):
    """A run that gets more epochs has not ended."""
    record_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # the process died while writing
    Recorder(tmp_path, RUN, progress, total_steps=2, world=WORLD).bar.close()
    assert [record["kind"] for record in records(tmp_path)] == kept


def test_records_are_on_disk_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorder = Recorder(tmp_path, RUN, Progress(), total_steps=1, world=WORLD)
    recorder.start(0, processes=1)
    done = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.path.samestat(os.fstat(descriptor), metrics)))
    metrics = os.stat(tmp_path / "metrics.jsonl")
    trainer = MagicMock(recorder=recorder)
    trainer.checkpoints.save = lambda *what: done.append("checkpoint")
    Trainer.save(trainer)
    recorder.bar.close()
    assert done[:2] == [True, "checkpoint"]


def test_a_record_is_whole_or_absent(tmp_path: Path):
    """The kernel writes as much of a record as fits and fails then, as on a full disk."""
    path = tmp_path / "metrics.jsonl"
    append_whole(path, b'{"kind": "start"}\n')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            append_whole(path, b'{"kind": "train"}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_whole(path, b'{"kind": "fail"}\n')
    assert path.read_text() == '{"kind": "start"}\n{"kind": "fail"}\n'


def test_other_ranks_record_nothing(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    record_run(tmp_path, SilentRecorder)
    assert capsys.readouterr() == ("", "")
    assert not any(tmp_path.iterdir())


def test_provenance_outside_a_repository_and_in_that_of_another_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setenv("GIT_DIR", "/nonexistent")
        assert provenance(CPU)["git"] is None
    commit = ["-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "--allow-empty", "--message=theirs"]
    for command in (["init", "--quiet"], commit):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr("engine.runtime.provenance.__file__", str(tmp_path / "provenance.py"))
    assert provenance(CPU)["git"] is None


def test_a_change_stays_once_a_checkpoint_has_it(tmp_path: Path):
    """A change belongs to the checkpoints after it: a kill before the first of them takes it back."""
    change = {"optim.lr": (1e-3, 5e-4), "classes": (["a"] * 1000, ["b"] * 1000)}
    recorder = Recorder(tmp_path, RUN, Progress(step=1, images=8), total_steps=4, world=WORLD)
    recorder.start(0, 1, Resumption(changes=change))
    recorder.bar.close()
    lr, classes = (record for record in records(tmp_path) if record["kind"] == "change")
    assert (lr["option"], lr["before"], lr["now"], lr["step"]) == ("optim.lr", 1e-3, 5e-4, 1)
    assert len(classes["before"]) == 200
    for progress, number in [(Progress(step=2, epoch=1), 2), (Progress(step=1, epoch=1), 2), (Progress(step=1), 0)]:
        Recorder(tmp_path, RUN, progress, total_steps=4, world=WORLD).bar.close()
        assert [record["kind"] for record in records(tmp_path)].count("change") == number


class Ranks(World):
    """Two ranks on GPUs, of which the second needs twice of everything that is gathered."""

    def gather(self, values):
        return [[*values], [2 * value for value in values]]


def test_speed_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Memory is that of the highest rank."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr("engine.reporting.speed.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr("engine.reporting.speed.DataWait._now", lambda self: 0.0)
    monkeypatch.setattr("engine.reporting.speed.DataWait.seconds", lambda self: 0.5)
    monkeypatch.setattr("engine.runtime.provenance.device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 2**20)
    recorder = Recorder(tmp_path, RUN, Progress(), total_steps=1, world=Ranks(torch.device("cuda"), size=2))
    recorder.start(0, processes=2)
    recorder.begin_epoch(1)
    clock.now += 2.0
    recorder.end_step()
    recorder.train(1, loss=1.0)
    recorder.final()
    recorder.bar.close()
    start, train, final = records(tmp_path)
    assert start["host"] == platform.node()
    expected = {"images_per_second": 4.0, "memory_mb": 6.0, "memory_reserved_mb": 10.0}
    assert {name: final[name] for name in expected} == pytest.approx(expected)
    expected |= {"data_wait": 50.0}
    assert {name: train[name] for name in expected} == pytest.approx(expected)


def gauges(directory: Path) -> dict[str, float]:
    """Values of the heartbeat, by Prometheus' grammar of a line; every gauge has its help and type before it."""
    lines = (directory / "metrics.prom").read_text().splitlines()
    found = {}
    for about, kind, line in zip(*[iter(lines)] * 3, strict=True):
        name, run, value = re.fullmatch(r'(eav_\w+)\{run="((?:[^"\\\n]|\\["\\n])*)"\} (\S+)', line).groups()
        assert about.startswith(f"# HELP {name} ")
        assert kind == f"# TYPE {name} gauge"
        assert run.replace('\\"', '"') == str(directory)
        found[name.removeprefix("eav_")] = float(value)
    return found


def test_a_heartbeat_has_the_last_values(tmp_path: Path):
    """Its epoch and loss are those of training, as an evaluation and the end have others."""
    directory = tmp_path / 'a "run"'
    directory.mkdir()
    begin = time.time()
    record_run(directory)
    found = gauges(directory)
    assert {"running": 0, "failed": 0, "epoch": 1, "step": 1, "total_steps": 1}.items() <= found.items()
    assert (found["loss"], found["top1"]) == (2.5, 50)
    assert begin <= found["checkpoint_time_seconds"] <= found["record_time_seconds"] <= time.time()
    with suppress(OSError), Recorder(directory, RUN, Progress(), 1, WORLD) as recorder:
        recorder.start(0, processes=1)
        assert gauges(directory)["running"] == 1
        recorder.begin_epoch(1)
        recorder.end_step()
        recorder.train(1, loss=math.nan, lr=1e-3)
        raise OSError("no space")
    assert math.isnan(gauges(directory)["loss"])
    assert (gauges(directory)["running"], gauges(directory)["failed"]) == (0, 1)


@pytest.mark.parametrize("name", ["copy", 'a "copy"'])
def test_the_heartbeat_of_a_finished_run_is_that_of_its_directory_and_of_no_launch(tmp_path: Path, name: str):
    """A copy has another name; a run that was killed after its last checkpoint has told no end."""
    first, copy = tmp_path / "first", tmp_path / name
    first.mkdir()
    Heartbeat(first).beat({"step": 7, "loss": math.nan})
    before = gauges(first)
    Heartbeat(first).settle()
    assert gauges(first)["running"] == 0
    shutil.copytree(first, copy)
    Heartbeat(copy).settle()
    found = gauges(copy)
    assert math.isnan(found["loss"])
    assert (found["running"], found["step"]) == (0, 7)
    assert found["record_time_seconds"] == before["record_time_seconds"]
    Heartbeat(tmp_path).settle()  # without one
    assert not (tmp_path / "metrics.prom").exists()
