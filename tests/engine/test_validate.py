"""validate.py from a short run on the digits to its report."""

import argparse
import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import train
import validate
from attention import kernels
from engine.checkpoints.export import main as export_main
from engine.checkpoints.files import load_checkpoint, newest_checkpoint, open_weights, prefer, save_checkpoint
from engine.data.arrays import DigitsReader
from engine.data.identity import identify_split
from engine.data.idx import write_idx
from engine.data.images import decode
from engine.data.loaders import create_val_loader
from engine.data.splits import open_split
from engine.evaluation.evaluate import evaluate
from engine.evaluation.inference import load
from engine.run.load import parse_run
from engine.runtime.distributed import World, set_arithmetic
from models import create_model
from models.convert import resample_weights
from tests.support.refusals import refusal
from tests.support.sweeps import read_table

ROOT = Path(__file__).parents[2]
TABLES = ("per-class", "predictions")
TINY = [
    *("model.img_size=8", "model.patch_size=4", "model.stem=linear", "model.embed_dim=16", "model.depth=1"),
    *("model.num_heads=1", "attention=softmax", "data.workers=0", "schedule.epochs=2", "schedule.warmup_epochs=0"),
    *("train.total_batch_size=128", "train.ema_decay=0.9", "train.keep_checkpoints=2", "train.device=cpu"),
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
    """`report` without the values that differ from call to call."""
    for result in report.values():
        assert result.pop("images_per_second") == pytest.approx(result["images"] / result.pop("seconds"))
    return report


def flat(report: dict) -> dict:
    """Metrics under the names of train.py's records."""
    metrics = {kind: {k: v for k, v in report[kind].items() if k not in ("checkpoint", "epoch")} for kind in report}
    return metrics["plain"] | {f"ema_{name}": value for name, value in metrics["ema"].items()}


@pytest.mark.complete
def test_an_option_of_one_mechanism_of_a_hybrid(tmp_path, capsys):
    """validate.py overrides an option of one entry of the list, and its report changes with it."""
    hybrid = "attention=[{blocks: 0, name: softmax}, {blocks: 1, name: performer, num_samples: 4}]"
    options = [*TINY, "model.depth=2", hybrid, "schedule.epochs=1"]
    train.main([str(ROOT / "configs/quickstart.yaml"), *options, "--output", str(tmp_path)])
    capsys.readouterr()
    own = read_report(capsys, tmp_path, "--weights", "plain")
    causal = read_report(capsys, tmp_path, "--weights", "plain", "attention.0.causal=true")
    assert own["plain"]["loss"] != causal["plain"]["loss"]
    again = read_report(capsys, tmp_path, "--weights", "plain", "attention.0.blocks=[0]", "attention.0.causal=false")
    assert again == own
    for override, problem in (
        ("num_samples=8", "attention[0](softmax).num_samples: unknown option; did you mean 'attention.1.num_samples'?"),
        ("blocks=0-1", "attention[1]: block 1 in attention[0] as well"),
    ):
        assert problem in refusal(validate.main, [tmp_path, f"attention.0.{override}"], capsys)


@pytest.mark.complete
def test_other_images_of_the_same_names_are_announced(run_directory, tmp_path, capsys):
    reader = DigitsReader("val")
    write_idx(tmp_path / "val-images-idx3-ubyte", reader.images)
    write_idx(tmp_path / "val-labels-idx1-ubyte", reader.labels)
    for path in tmp_path.iterdir():
        path.rename(f"{path}.gz")
    arguments = [str(run_directory), "data.workers=0", "--weights", "plain"]
    validate.main(arguments)
    assert capsys.readouterr().err == ""
    validate.main([*arguments, "data.dataset=idx", f"data.root={tmp_path}"])
    assert capsys.readouterr().err == "data: other images than those of the validation in training\n"


@pytest.mark.parametrize("which", ["best", pytest.param("last", marks=pytest.mark.complete)])
def test_metrics_are_those_of_training(run_directory, capsys, which):
    path, recorded = open_weights(run_directory, which)[:2]
    report = read_report(capsys, run_directory, "--select", which)
    for kind in ("plain", "ema"):
        assert (report[kind]["checkpoint"], report[kind]["epoch"]) == (str(path), recorded["progress"]["epoch"])
    assert flat(report) == pytest.approx(recorded["progress"]["metrics"], rel=1e-6)  # batches of another size
    assert report["plain"]["images"] == 360
    assert report["plain"]["loss"] != report["ema"]["loss"]
    assert read_report(capsys, path) == report


@pytest.fixture
def apart(run_directory, tmp_path):
    """The run's directory, changed so that its first epoch is best by the averaged weights."""
    for path in run_directory.glob("step_*_epoch_?.pt"):
        checkpoint = load_checkpoint(path)
        checkpoint["progress"]["ema_ranking"] = [[90.0, 1], [80.0, 2]]
        save_checkpoint(tmp_path / path.name, checkpoint)
    return tmp_path


@pytest.mark.complete
def test_each_kind_of_weights_is_taken_where_it_was_best(apart, capsys):
    report = read_report(capsys, apart)
    assert [(kind, report[kind]["epoch"]) for kind in report] == [("plain", 2), ("ema", 1)]
    for kind in report:
        assert read_report(capsys, apart, "--weights", kind) == {kind: report[kind]}
        assert read_report(capsys, report[kind]["checkpoint"], "--weights", kind) == {kind: report[kind]}


@pytest.mark.parametrize("kind", [None, "ema", "plain"])
def test_an_export_is_evaluated_like_the_weights_that_it_holds(apart, capsys, kind):
    export_main([str(apart), str(apart / "x.safetensors"), *(["--weights", kind] if kind else [])])
    capsys.readouterr()
    report = read_report(capsys, apart)
    kind = kind or prefer(report)[0]
    expected = report[kind] | {"checkpoint": str(apart / "x.safetensors")}
    assert expected["epoch"] == {"ema": 1, "plain": 2}[kind]
    assert read_report(capsys, apart / "x.safetensors") == {kind: expected}


def test_other_class_names_are_warned_of(run_directory, tmp_path, capsys):
    _, checkpoint = newest_checkpoint(run_directory)
    save_checkpoint(tmp_path / "x.pt", checkpoint | {"classes": [*"012345678", "ten\x1b[0m"]})
    validate.main([str(tmp_path / "x.pt"), "--weights", "plain", "data.workers=0"])
    (line,) = capsys.readouterr().err.splitlines()
    names = "only in the checkpoint: ten\\x1b[0m (1); only in the data: 9 (1)"
    assert line == f"warning: the classes are not those of the training: {names}"
    validate.main([str(run_directory), "--weights", "plain", "data.workers=0"])
    assert not capsys.readouterr().err


def test_the_checkpoint_is_enough(run_directory, tmp_path, capsys):
    copy = tmp_path / "any name"
    copy.write_bytes(newest_checkpoint(run_directory)[0].read_bytes())
    report = read_report(capsys, copy, "data.val_split=train")
    assert report["plain"]["images"] == report["ema"]["images"] == 1437


def test_two_processes_report_the_same(run_directory, fork_server, tmp_path):
    reports = []
    for ranks in (1, 2):
        files = ["--per-class", str(tmp_path / f"{ranks}.csv"), "--predictions", str(tmp_path / f"images_{ranks}.csv")]
        command = [str(run_directory), "data.workers=0", "--json", *files]
        statuses, job = fork_server.run(command, tmp_path / "log", ranks=ranks, script="validate")
        assert statuses == [0] * ranks, job.text
        (line,) = [line for line in job.text.splitlines() if line.startswith("{")]
        reports.append(flat(without_speed(json.loads(line))))
    assert reports[1] == pytest.approx(reports[0], rel=1e-6)
    assert (tmp_path / "1.csv").read_text() == (tmp_path / "2.csv").read_text()
    one, two = ([*csv.reader((tmp_path / f"images_{n}.csv").read_text().splitlines())] for n in (1, 2))
    assert len(one) == 1 + reports[0]["images"] > 20
    assert [row[:4] for row in one] == [row[:4] for row in two]
    assert [float(row[4]) for row in one[1:]] == pytest.approx([float(row[4]) for row in two[1:]], rel=1e-5)


def test_the_table_has_one_line_for_each_set_of_weights(run_directory, capsys):
    report = read_report(capsys, run_directory)
    validate.main([str(run_directory), "data.workers=0"])
    header, plain, ema = capsys.readouterr().out.splitlines()
    assert " ".join(header.split()) == "weights images top-1 % top-5 % balanced % loss images/s epoch checkpoint"
    for line, name in ((plain, "plain"), (ema, "ema")):
        metrics = report[name]
        rates = [f"{metrics[rate]:.3f}" for rate in ("top1", "top5", "balanced_accuracy")]
        values = (*rates, f"{metrics['loss']:.4f}")
        *cells, speed, epoch, checkpoint = line.split()
        assert [*cells, epoch, checkpoint] == [name, "360", *values, str(metrics["epoch"]), metrics["checkpoint"]]
        assert float(speed) > 0


@pytest.mark.parametrize("kind", ["plain", "ema"])
def test_the_quality_of_every_class(run_directory, tmp_path, capsys, kind):
    """Recalls in the CSV, weighted by numbers of images, give the accuracy of all images; see also `outputs`."""
    path = tmp_path / "classes.csv"
    validate.main([str(run_directory), "data.workers=0", "--json", "--weights", kind, "--per-class", str(path)])
    out, err = capsys.readouterr()
    result = json.loads(out)[kind]
    assert err == f"{path}: written, of the {kind} weights\n"
    rows = read_table(path)
    assert [row["class"] for row in rows] == [*"0123456789"]
    images = np.array([int(row["support"]) for row in rows])
    assert images.tolist() == np.bincount(DigitsReader("val").labels).tolist()
    for column, metric in {"recall": "top1", "top5": "top5"}.items():
        shares = np.array([float(row[column]) for row in rows])
        assert len(set(shares)) > 3
        assert sum(shares * images) / 360 == pytest.approx(result[metric])


def test_labels_are_not_replaced(run_directory, tmp_path, capsys):
    (labels := tmp_path / "val.csv").write_text("file,label\n")
    (tmp_path / "link.csv").symlink_to(labels)
    for name in ("val.csv", "link.csv"):
        options = ["data.dataset=csv", f"data.root={tmp_path}", "--predictions", tmp_path / name]
        error = refusal(validate.main, [run_directory, *options], capsys)
        assert f"{labels}: has the labels of data.root, which would be lost; name another file" in error
    assert labels.read_text() == "file,label\n"


def logits_of(path: Path, weights: str = "plain") -> tuple[np.ndarray, np.ndarray]:
    """Returns logits of all held-out digits at once, not by validate.py's code, and their classes."""
    model, transform, _ = load(path, weights=weights)
    reader = DigitsReader("val")
    with torch.no_grad():
        logits = model(torch.stack([transform(decode(reader[index][0])) for index in range(len(reader))]))
    return logits.double().numpy(), reader.labels.astype(int)


def test_files_of_single_images(run_directory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.reporting.outputs.GRID", 2)  # drawn in less time
    files = "--predictions", "p.csv", "--confusion", "c.png", "--mistakes", "m.png"
    report = read_report(capsys, run_directory, "--weights", "plain", *files)["plain"]
    logits, labels = logits_of(run_directory)
    rows = read_table(Path("p.csv"))
    assert [(row["file"], row["label"]) for row in rows] == [(f"{n}/{i}.pgm", str(n)) for i, n in enumerate(labels)]
    assert [int(row["class_1"]) for row in rows] == logits.argmax(1).tolist()
    assert [int(row["class_5"]) for row in rows] == np.argsort(-logits, 1)[:, 4].tolist()
    probability = np.exp(logits).max(1) / np.exp(logits).sum(1)
    assert [float(row["probability_1"]) for row in rows] == pytest.approx(probability.tolist(), rel=1e-4)
    assert 100 * np.mean(labels == logits.argmax(1)) == pytest.approx(report["top1"])
    assert all(Path(f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in "cm")


@pytest.fixture
def shuffled(run_directory, tmp_path) -> Path:
    """The run's checkpoint with its classes in another order."""
    _, checkpoint = newest_checkpoint(run_directory)
    order = [3, 1, 4, 5, 9, 2, 6, 8, 7, 0]
    for name in ("head.weight", "head.bias"):
        checkpoint["model"][name] = checkpoint["model"][name][order]
    save_checkpoint(tmp_path / "x.pt", checkpoint | {"classes": [str(i) for i in order]})
    return tmp_path / "x.pt"


def test_classes_in_another_order_are_matched_by_name(run_directory, shuffled, capsys):
    _, recorded = newest_checkpoint(run_directory)
    validate.main([str(shuffled), "--weights", "plain", "data.workers=0", "--json"])
    output, expected = capsys.readouterr(), recorded["progress"]["metrics"]
    found = {name: value for name, value in json.loads(output.out)["plain"].items() if name in expected}
    assert {"top1", "recall/7", "loss", "images"} < found.keys()
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-6)
    assert output.err == "classes: those of the checkpoint in another order, matched by name\n"


def write_checkpoint(path: Path, run_directory: Path, data: dict) -> Path:
    """Writes the run's checkpoint as of a training with these options of the data."""
    _, checkpoint = newest_checkpoint(run_directory)
    checkpoint["config"]["data"] |= data
    images = open_split(parse_run(checkpoint["config"], "x").data, "val_split")
    save_checkpoint(path, checkpoint | identify_split("val", images) | {"val_content": "a smaller copy"})
    return path


@pytest.mark.parametrize(
    ("trained", "given"),
    [
        ({}, ["data.val_fraction=0.2"]),
        ({"folds": 3}, ["data.fold=1"]),
        ({"val_fraction": 0.2}, ["data.subset_seed=7"]),
        ({"val_fraction": 0.2}, ["data.subset=50"]),
    ],
)
def test_images_that_may_have_been_trained_on_are_not_held_out(run_directory, tmp_path, capsys, trained, given):
    """The checkpoint is refused, and so is an export with these options."""
    path, export = write_checkpoint(tmp_path / "x.pt", run_directory, trained), tmp_path / "x.safetensors"
    export_main([str(path), str(export), *given])
    for arguments in ([str(path), *given], [str(export)]):
        output = refusal(validate.main, [*arguments, "data.workers=0", "--weights", "ema"], capsys)
        told, error = output.splitlines()
        assert told.startswith("validation: ")
        assert "trained on" not in told
        assert "than those that validated in training, and the model may have been trained on them; give the d" in error
        assert error.endswith("=null data.val_split=NAME")


def test_images_held_out_in_training_validate(run_directory, tmp_path, capsys):
    """Also a copy of other content; a checkpoint that does not know its images warns."""
    path = write_checkpoint(tmp_path / "x.pt", run_directory, {"folds": 3})
    report = read_report(capsys, path, "--weights", "plain")
    assert report["plain"]["images"] == 479
    checkpoint = load_checkpoint(path)
    del checkpoint["val_files"], checkpoint["val_content"]
    save_checkpoint(path, checkpoint)
    capsys.readouterr()
    validate.main([str(path), "--weights", "plain", "data.workers=0"])
    _, warning = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: data.folds = 3, data.fold = 0: the checkpoint does not say which images its tr")


def write_images(root: Path, digits: str) -> list[int]:
    """Some held-out digits as class folders, named as ImageNet's images; their indices."""
    reader = DigitsReader("val")
    chosen = [index for index in range(100) if str(reader.labels[index]) in digits]
    for number, index in enumerate(chosen, 1):
        folder = root / "val" / str(reader.labels[index])
        folder.mkdir(parents=True, exist_ok=True)
        decode(reader[index][0]).save(folder / f"ILSVRC2012_val_{number:08}.JPEG", format="PNG")
    return chosen


def test_some_of_the_classes(run_directory, tmp_path, capsys):
    """Logits are restricted to them."""
    chosen = write_images(tmp_path, "358")
    logits, labels = (x[chosen] for x in logits_of(run_directory))
    logits, targets = logits[:, [3, 5, 8]], np.searchsorted([3, 5, 8], labels)
    predicted = logits.argmax(1)
    data = ["data.dataset=folder", f"data.root={tmp_path}", "data.workers=0"]
    validate.main([str(run_directory), *data, "--weights", "plain", "--json"])
    output = capsys.readouterr()
    assert output.err == "classes: the data has 3 of the checkpoint's 10; the logits of the others are left out\n"
    found = json.loads(output.out)["plain"]
    log_prob = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert found["top1"] == pytest.approx(100 * np.mean(predicted == targets))
    assert found["loss"] == pytest.approx(-log_prob[np.arange(len(chosen)), targets].mean(), rel=1e-5)


def test_images_of_another_size_are_said(run_directory, capsys):
    validate.main([str(run_directory), "data.workers=0", "--weights", "plain", "model.img_size=12"])
    output = capsys.readouterr()
    resampled = "resampled: pos_embed (1, 4, 16) -> (1, 9, 16)"
    assert output.err == f"model.img_size = 12, trained at 8; {resampled}\n"
    small, _, _ = load(run_directory, weights="plain")
    run = parse_run(open_weights(run_directory).checkpoint["config"], "x", ["model.img_size=12"])
    model = create_model(attention=run.attention, **run.model).eval()
    model.load_state_dict(resample_weights(small.state_dict(), model))
    loader = create_val_loader(run, World(torch.device("cpu")), img_size=12)
    expected = evaluate(model, loader, World(torch.device("cpu")), None)
    assert output.out.splitlines()[1].split()[2] == f"{expected['top1']:.3f}"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "nowhere: no such run directory or checkpoint"),
        (["."], ".: no checkpoint there"),
        (["text.pt"], "text.pt: damaged, or no checkpoint that can be loaded safely"),
        (["x.onnx"], "x.onnx: an exported graph, which only other programs run (docs/validation.md, Export); name the"),
        (["half.pt"], "half.pt: damaged, or no checkpoint that can be loaded safely"),
        (["plain.pt", "--weights", "ema"], "plain.pt: holds no ema weights, only plain"),
        (["state.pt"], "state.pt: no checkpoint of train.py: it holds no configuration; it seems to be weights of an"),
        (["timm.pth.tar"], "a checkpoint of timm's train.py, and `python -m engine.checkpoints.export timm.pth.tar "),
        (["other.pth"], "it seems to be weights of another program"),
        (["old.pth"], "neither whole, of torch.save from torch 1.6 on, nor safetensors; save the weights anew"),
        (["plain.safetensors"], "it seems to be weights of another program"),
        (["good.pt", "--per-class", "nowhere/x.csv"], "nowhere/x.csv: no directory 'nowhere'"),
        (["good.pt", "data.rot=/data"], "data.rot: unknown option; did you mean 'root'?"),
        (["good.pt", "data.dataset=folder"], "data.root: required for data.dataset=folder"),
        (["good.pt", "model.num_classes=11"], "model.num_classes = 11, but the checkpoint names 10 classes"),
        (["good.pt", "train.device=cuda"], "train.device: cuda is not available here; use auto or cpu"),
        *(([".", f"--{kind}", "x.csv"], "x.csv: cannot be written: Is a directory") for kind in TABLES),
        ([".", "--per-class", "x.png"], "x.png: --per-class writes .csv; name such a file"),
    ],
)
def test_bad_input_is_one_line(run_directory, tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    content = newest_checkpoint(run_directory)[0].read_bytes()
    Path("good.pt").write_bytes(content)
    Path("half.pt").write_bytes(content[: len(content) // 2])
    Path("text.pt").write_text("model: deit\n")
    Path("x.onnx").touch()
    Path("x.csv").mkdir()
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
    error = refusal(validate.main, arguments, capsys)
    assert error.count("\n") == 1
    assert problem in error
    assert sorted(tmp_path.iterdir()) == before


def test_arithmetic_follows_the_options_and_lack_of_memory_has_a_remedy(run_directory, monkeypatch, capsys):
    def run_out(*args, **kwargs):
        assert (kernels.path(), torch.backends.cuda.matmul.allow_tf32) == ("plain", True)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(validate, "evaluate", run_out)
    try:
        error = refusal(validate.main, [str(run_directory), "train.tf32=true", "train.kernels=plain"], capsys)
    finally:
        set_arithmetic(deterministic=False, tf32=False)
    assert error == "error: out of memory; lower --batch-size\n"


@pytest.mark.parametrize("option", [[], ["data.workers=3"]])
def test_a_file_does_not_decide_how_many_processes_start(run_directory, tmp_path, monkeypatch, option):
    runs = []
    monkeypatch.setattr(validate, "validate", lambda run, *args: runs.append(run) or {})
    _, checkpoint = newest_checkpoint(run_directory)
    checkpoint["config"]["data"]["workers"] = 10**6
    torch.save(checkpoint, tmp_path / "x.pt")
    validate.main([str(tmp_path / "x.pt"), "--json", *option])
    assert runs[0].data.workers == (3 if option else 8)


@pytest.mark.parametrize(("img_size", "expected"), [(56, 128), ([512, 256], 64), (4096, 1)])
def test_large_images_come_in_small_batches(run_directory, img_size, expected):
    run = parse_run(newest_checkpoint(run_directory)[1]["config"], "x")
    loader = create_val_loader(run, World(torch.device("cpu")), img_size=img_size)
    assert loader.batch_size == expected


@pytest.fixture
def overflowing(run_directory, tmp_path) -> Path:
    """The run's checkpoint with weights whose logits are finite in fp32 and not in fp16."""
    _, checkpoint = newest_checkpoint(run_directory)
    for weights in ("model", "model_ema"):
        checkpoint[weights]["head.weight"] = checkpoint[weights]["head.weight"] * 1e7
    checkpoint["config"]["train"]["amp"] = "fp16"
    save_checkpoint(tmp_path / "x.pt", checkpoint)
    return tmp_path / "x.pt"


def test_logits_that_overflow_are_said(overflowing, capsys):
    arguments = [str(overflowing), "data.workers=0", "--weights", "plain"]
    validate.main(arguments)
    assert "plain, wrong: 360 of 360 images, as their logits are not finite" in capsys.readouterr().out
    validate.main([*arguments, "--json"])
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["plain"]
    assert (result["top1"], result["loss"], result["not_finite"]) == (0, None, 360)
    validate.main([*arguments, "train.amp=null", "--json"])
    assert "not_finite" not in json.loads(capsys.readouterr().out)["plain"]


def test_values_that_are_not_finite_are_null_in_json():
    values = {"checkpoint": "x.pt", "epoch": 1, "top1": 50.0, "loss": math.inf, "real_top1": math.nan}
    text = validate.to_json({"plain": values})
    assert json.loads(text, parse_constant=pytest.fail) == {"plain": values | {"loss": None, "real_top1": None}}
