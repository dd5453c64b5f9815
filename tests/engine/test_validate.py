"""validate.py from a short run on the digits to its report."""

import argparse
import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import train
import validate
from engine.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from engine.config import parse_run
from engine.data import DigitsReader, create_val_loader
from engine.distributed import World

ROOT = Path(__file__).parents[2]
TINY = [
    "model.img_size=8",
    "model.patch_size=4",
    "model.stem=linear",
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=1",
    "attention=softmax",
    "data.workers=0",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0",
    "train.total_batch_size=128",
    "train.ema_decay=0.9",
    "train.keep_checkpoints=2",
    "train.device=cpu",
]


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    train.main([str(ROOT / "configs/quickstart.yaml"), *TINY, "--output", str(directory)])
    return directory


def read_report(capsys, *arguments) -> dict:
    validate.main([*map(str, arguments), "data.workers=0", "--json"])
    return without_speed(json.loads(capsys.readouterr().out))


def without_speed(report: dict) -> dict:
    """`report` without what differs from call to call."""
    for result in report.values():
        assert result.pop("images_per_second") == pytest.approx(result["images"] / result.pop("seconds"))
    return report


def flat(report: dict) -> dict:
    """As train.py records its metrics."""
    metrics = {kind: {k: v for k, v in report[kind].items() if k not in ("checkpoint", "epoch")} for kind in report}
    return metrics["plain"] | {f"ema_{name}": value for name, value in metrics["ema"].items()}


@pytest.mark.parametrize("which", ["best", "last"])
def test_metrics_are_those_of_training(run_directory, capsys, which):
    path, recorded = find_checkpoint(run_directory, which)
    report = read_report(capsys, run_directory, "--select", which)
    for kind in ("plain", "ema"):
        assert (report[kind]["checkpoint"], report[kind]["epoch"]) == (str(path), recorded["progress"]["epoch"])
    assert flat(report) == pytest.approx(recorded["progress"]["metrics"], rel=1e-6)  # batches of another size
    assert report["plain"]["images"] == 360
    assert report["plain"]["loss"] != report["ema"]["loss"]
    assert read_report(capsys, path) == report


@pytest.fixture
def apart(run_directory, tmp_path):
    """The run's directory, had its first epoch been the best by the averaged weights."""
    for path in run_directory.glob("step_*_epoch_?.pt"):
        checkpoint = load_checkpoint(path)
        checkpoint["progress"]["ema_ranking"] = [[90.0, 1], [80.0, 2]]
        save_checkpoint(tmp_path / path.name, checkpoint)
    return tmp_path


def test_each_kind_of_weights_is_taken_where_it_was_best(apart, capsys):
    report = read_report(capsys, apart)
    assert [(kind, report[kind]["epoch"]) for kind in report] == [("plain", 2), ("ema", 1)]
    for kind in report:
        assert read_report(capsys, apart, "--weights", kind) == {kind: report[kind]}
        assert read_report(capsys, report[kind]["checkpoint"], "--weights", kind) == {kind: report[kind]}


@pytest.mark.parametrize(("kind", "epoch"), [(None, 1), ("ema", 1), ("plain", 2)])
def test_an_export_names_the_weights_that_it_holds(apart, capsys, kind, epoch):
    chosen = ["--weights", kind] if kind else []
    report = read_report(capsys, apart, *chosen, "--export", apart / "x.safetensors")
    expected = report[kind or "ema"] | {"checkpoint": str(apart / "x.safetensors")}
    assert expected["epoch"] == epoch
    assert read_report(capsys, apart / "x.safetensors") == {kind or "ema": expected}


def test_the_former_meaning_of_weights_says_its_new_name(run_directory, capsys):
    with pytest.raises(SystemExit) as caught:
        validate.main([str(run_directory), "--weights", "best"])
    assert caught.value.code == 2
    assert "--weights: 'best' is no kind of weights, plain or ema; the best checkpoint is --select best" in (
        capsys.readouterr().err
    )


def test_other_class_names_are_warned_of(run_directory, tmp_path, capsys):
    _, checkpoint = find_checkpoint(run_directory, "last")
    save_checkpoint(tmp_path / "x.pt", checkpoint | {"classes": [*"012345678", "ten\x1b[0m"]})
    validate.main([str(tmp_path / "x.pt"), "--weights", "plain", "data.workers=0"])
    (line,) = capsys.readouterr().err.splitlines()
    names = "only in the checkpoint: 'ten\\x1b[0m' (1); only in the data: 9 (1)"
    assert line == f"warning: the classes are not those of the training: {names}"
    validate.main([str(run_directory), "--weights", "plain", "data.workers=0"])
    assert not capsys.readouterr().err


def test_batch_size_does_not_matter(run_directory, capsys):
    reports = [flat(read_report(capsys, run_directory, "--batch-size", size)) for size in (7, 360)]
    assert reports[0] == pytest.approx(reports[1], rel=1e-6)


def test_the_checkpoint_is_enough(run_directory, tmp_path, capsys):
    copy = tmp_path / "any name"
    copy.write_bytes(find_checkpoint(run_directory, "last")[0].read_bytes())
    report = read_report(capsys, copy, "data.val_split=train")
    assert report["plain"]["images"] == report["ema"]["images"] == 1437


def test_two_processes_report_the_same(run_directory, fork_server, tmp_path):
    reports = []
    for ranks in (1, 2):
        command = [str(run_directory), "data.workers=0", "--json", "--per-class", str(tmp_path / f"{ranks}.csv")]
        statuses, job = fork_server.run(command, tmp_path / "log", ranks=ranks, script="validate")
        assert statuses == [0] * ranks, job.text
        (line,) = [line for line in job.text.splitlines() if line.startswith("{")]
        reports.append(flat(without_speed(json.loads(line))))
    assert reports[1] == pytest.approx(reports[0], rel=1e-6)
    assert (tmp_path / "1.csv").read_text() == (tmp_path / "2.csv").read_text()


def test_the_table_has_one_line_for_each_set_of_weights(run_directory, capsys):
    report = read_report(capsys, run_directory)
    validate.main([str(run_directory), "data.workers=0"])
    header, plain, ema = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "weights",
        "images",
        "top-1",
        "%",
        "top-5",
        "%",
        "loss",
        "images/s",
        "epoch",
        "checkpoint",
    ]
    for line, name in ((plain, "plain"), (ema, "ema")):
        metrics = report[name]
        values = (f"{metrics['top1']:.3f}", f"{metrics['top5']:.3f}", f"{metrics['loss']:.4f}")
        *cells, speed, epoch, checkpoint = line.split()
        assert [*cells, epoch, checkpoint] == [name, "360", *values, str(metrics["epoch"]), metrics["checkpoint"]]
        assert float(speed) > 0


def test_the_accuracy_of_every_class(run_directory, tmp_path, capsys):
    """Written as CSV; with their numbers of images they make up that of all images."""
    path = tmp_path / "classes.csv"
    report = read_report(capsys, run_directory, "--per-class", path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["weights"], row["class"]) for row in rows] == [(kind, n) for kind in report for n in "0123456789"]
    for kind, result in report.items():
        images = np.array([int(row["images"]) for row in rows if row["weights"] == kind])
        assert images.tolist() == np.bincount(DigitsReader("val").labels).tolist()
        for metric in ("top1", "top5"):
            shares = np.array([float(row[metric]) for row in rows if row["weights"] == kind])
            assert len(set(shares)) > 3
            assert sum(shares * images) / 360 == pytest.approx(result[metric])


def test_without_an_average_there_is_one_line(run_directory, tmp_path, capsys):
    _, checkpoint = find_checkpoint(run_directory, "last")
    del checkpoint["model_ema"]
    torch.save(checkpoint, tmp_path / "plain.pt")
    report = read_report(capsys, tmp_path / "plain.pt")
    assert report.keys() == {"plain"}
    assert math.isfinite(report["plain"]["loss"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "nowhere: no such run directory or checkpoint"),
        (["."], ".: no checkpoint there"),
        (["text.pt"], "text.pt: damaged, or no checkpoint that can be loaded safely"),
        (["half.pt"], "half.pt: damaged, or no checkpoint that can be loaded safely"),
        (["plain.pt", "--weights", "ema"], "plain.pt: holds no ema weights, only plain"),
        (["state.pt"], "state.pt: no checkpoint of train.py: it holds no configuration; it seems to be a state dict"),
        (["timm.pth.tar"], "it seems to be a checkpoint of timm's train.py, and timm.create_model(NAME, attention="),
        (["other.pth"], "it seems to be a checkpoint of another training script"),
        (["old.pth"], "it seems to be a file of torch.save before torch 1.6"),
        (["plain.safetensors"], "it seems to be weights in the safetensors format"),
        (["good.pt", "--export", "nowhere/x.safetensors"], "nowhere/x.safetensors: no directory 'nowhere'"),
        (["good.pt", "--per-class", "nowhere/x.csv"], "nowhere/x.csv: no directory 'nowhere'"),
        (["good.pt", "data.rot=/data"], "data.rot: unknown option; did you mean 'root'?"),
        (["good.pt", "data.dataset=folder"], "data.root: required for data.dataset=folder"),
        (["good.pt", "model.num_classes=11"], "model.num_classes = 11, but the images have 10 classes"),
        (["good.pt", "model.depth=2"], "model: the checkpoint's weights do not fit: 12 missing: blocks.1."),
        (["good.pt", "train.device=cuda"], "train.device: cuda is not available here; use auto or cpu"),
    ],
)
def test_bad_input_is_one_line(run_directory, tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    content = find_checkpoint(run_directory, "last")[0].read_bytes()
    Path("good.pt").write_bytes(content)
    Path("half.pt").write_bytes(content[: len(content) // 2])
    Path("text.pt").write_text("model: deit\n")
    plain = torch.load("good.pt")
    del plain["model_ema"]
    torch.save(plain, "plain.pt")
    weights, args = {"weight": torch.zeros(3)}, argparse.Namespace(model="vit_tiny_patch16_224")
    torch.save(weights, "state.pt")
    torch.save(weights, "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 1, "arch": "vit", "state_dict": weights, "args": args}, "timm.pth.tar")
    torch.save({"model": weights, "optimizer": {}, "args": args}, "other.pth")
    safetensors.torch.save_file(weights, "plain.safetensors")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as caught:
        validate.main(arguments)
    output = capsys.readouterr()
    assert caught.value.code == 2
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert problem in output.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", [[], ["data.workers=3"]])
def test_a_file_does_not_decide_how_many_processes_start(run_directory, tmp_path, monkeypatch, option):
    runs = []
    monkeypatch.setattr(validate, "validate", lambda run, *args: runs.append(run) or {"plain": {}, "ema": {}})
    _, checkpoint = find_checkpoint(run_directory, "last")
    checkpoint["config"]["data"]["workers"] = 10**6
    torch.save(checkpoint, tmp_path / "x.pt")
    validate.main([str(tmp_path / "x.pt"), "--json", *option])
    assert runs[0].data.workers == (3 if option else min(8, os.cpu_count()))


@pytest.mark.parametrize(("img_size", "expected"), [(56, 128), ([512, 256], 64), (4096, 1)])
def test_large_images_come_in_small_batches(run_directory, img_size, expected):
    run = parse_run(find_checkpoint(run_directory, "last")[1]["config"], "x")
    loader = create_val_loader(run, World(torch.device("cpu")), img_size=img_size, num_classes=10)
    assert loader.batch_size == expected


def test_results_are_printed_before_an_export_that_fails(run_directory, tmp_path, capsys):
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(SystemExit) as caught:
        validate.main([str(run_directory), "data.workers=0", "--export", str(tmp_path / "x.safetensors")])
    output = capsys.readouterr()
    assert caught.value.code == 2
    assert "top-1" in output.out
    assert (
        output.err
        == f"error: {tmp_path}/x.safetensors: cannot be written: Is a directory; what was there is unchanged\n"
    )


def test_batch_size_must_be_positive(run_directory, capsys):
    with pytest.raises(SystemExit) as caught:
        validate.main([str(run_directory), "--batch-size", "0"])
    assert caught.value.code == 2
    assert "--batch-size must be at least 1, got 0" in capsys.readouterr().err


def test_validate_stays_short():
    assert len((ROOT / "validate.py").read_text().splitlines()) <= 150
