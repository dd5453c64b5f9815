"""predict.py and `engine.evaluation.inference.load`, on the digits as image files, with a model of random weights."""

import csv
import io
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import predict
import validate
from engine.checkpoints.files import load_checkpoint, save_checkpoint
from engine.checkpoints.progress import Progress
from engine.data.arrays import DigitsReader
from engine.data.images import decode
from engine.evaluation.inference import load
from engine.run.load import dump_run, load_run
from models import create_model
from tests.support.refusals import refusal

ROOT = Path(__file__).parents[2]
OPTIONS = ["model.depth=1", "model.embed_dim=24", "model.img_size=8", "model.stem=linear", "attention=softmax"]
CLASSES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make_checkpoint(path: Path, *options: str) -> None:
    run = load_run(ROOT / "configs/quickstart.yaml", [*OPTIONS, "train.device=cpu", *options])
    states = {}
    for seed, name in enumerate(["model", "model_ema"]):
        torch.manual_seed(seed)
        states[name] = create_model(attention=run.attention, **run.model).state_dict()
    progress = vars(Progress(epoch=1, step=3))
    metadata = {"config": dump_run(run), "processes": 1, "images": 100, "progress": progress, "classes": CLASSES}
    save_checkpoint(path, metadata | states)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with the checkpoint runs/eva and the held-out digits as PNG files."""
    place = tmp_path_factory.mktemp("predict")
    (place / "runs/eva").mkdir(parents=True)
    make_checkpoint(place / "runs/eva/step_3_epoch_1.pt")
    (place / "digits").mkdir()
    reader = DigitsReader("val")
    for index in range(len(reader)):
        decode(reader[index][0]).save(place / f"digits/{index}.png")
    (place / "few/deeper").mkdir(parents=True)
    for index in range(3):
        (place / f"few/deeper/{index}.png").write_bytes((place / f"digits/{index}.png").read_bytes())
    (place / "few/broken.png").write_bytes((place / "digits/0.png").read_bytes()[:60])
    (place / "few/notes.txt").write_text("no image")
    return place


@pytest.fixture(autouse=True)
def in_place(place, monkeypatch):
    monkeypatch.chdir(place)


def ask(*arguments: str, status: int = 0) -> list[dict]:
    """Returns the rows that predict.py writes."""
    with pytest.raises(SystemExit) if status else nullcontext() as caught:
        predict.main([*arguments, "--output", "predictions.csv", "--device", "cpu"])
    assert (caught.value.code if status else 0) == status
    _, *rows = csv.reader(Path("predictions.csv").read_text().splitlines())
    return [{"file": file, "classes": top[::2], "probabilities": [*map(float, top[1::2])]} for file, *top in rows]


def test_classes_are_those_of_validation(capsys):
    found = ask("runs/eva", "digits", "--weights", "plain", "--batch-size", "400")
    assert [row["file"] for row in found] == [f"digits/{index}.png" for index in range(360)]
    labels, guesses = DigitsReader("val").labels, [CLASSES.index(row["classes"][0]) for row in found]
    assert len(set(guesses)) > 5
    capsys.readouterr()
    validate.main(["runs/eva", "--weights", "plain", "data.workers=0", "--json"])
    report = json.loads(capsys.readouterr().out)["plain"]
    assert np.mean(labels == np.array(guesses)) * 100 == pytest.approx(report["top1"])
    top5 = [CLASSES[label] in row["classes"] for label, row in zip(labels, found, strict=True)]
    assert np.mean(top5) * 100 == pytest.approx(report["top5"])


def test_probabilities_are_those_of_the_logits_and_batches_do_not_matter():
    model, transform, classes = load("runs/eva")
    assert (model.training, classes) == (False, CLASSES)
    files = [f"digits/{index}.png" for index in range(5)]
    with torch.no_grad():
        expected = model(torch.stack([transform(Image.open(file)) for file in files])).softmax(1)
    for batch_size in ("1", "3"):
        found = ask("runs/eva", *files, "--top", "99", "--batch-size", batch_size)
        for row, probabilities in zip(found, expected, strict=True):
            assert row["probabilities"] == sorted(row["probabilities"], reverse=True)
            by_class = dict(zip(row["classes"], row["probabilities"], strict=True))
            assert [by_class[name] for name in CLASSES] == pytest.approx(probabilities.tolist(), rel=1e-5)


def test_what_is_no_image_is_named_and_counted(capsys):
    found = ask("runs/eva", "few", status=1)
    assert [row["file"] for row in found] == [f"few/deeper/{index}.png" for index in range(3)]
    skipped, count = capsys.readouterr().err.splitlines()
    assert skipped.startswith("skipped: few/broken.png: ")
    assert count == "left out: 1 of 4 files are no readable images"
    assert ask("runs/eva", "few/broken.png", status=1) == []


def test_hidden_files_of_a_folder_are_named_once(capsys, tmp_path):
    content = Path("digits/0.png").read_bytes()
    for name in ("0.png", "._0.png", "@eaDir/0.png", ".ipynb_checkpoints/0-checkpoint.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [row["file"] for row in ask("runs/eva", str(tmp_path))] == [f"{tmp_path}/0.png"]
    assert capsys.readouterr().err == f"{tmp_path}: ignored files: 3 hidden or of the system ('._0.png')\n"
    named = str(tmp_path / "._0.png")
    assert [row["file"] for row in ask("runs/eva", named)] == [named]  # a file that is named is meant


def test_files_may_be_listed_on_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"digits/7.png\n\nfew/broken.png\ndigits/3.png\n")))
    with pytest.raises(SystemExit, match="1"):
        predict.main(["runs/eva", "-", "--top", "2", "--output", "x.csv"])
    header, *rows = csv.reader(Path("x.csv").read_text().splitlines())
    assert header == ["file", "class_1", "probability_1", "class_2", "probability_2"]
    assert [row[0] for row in rows] == ["digits/7.png", "digits/3.png"]
    assert all(float(row[2]) >= float(row[4]) > 0 and row[1] in CLASSES for row in rows)


def test_a_missing_file_is_no_unreadable_image(monkeypatch, capsys):
    """It is refused before any work, also in a list."""
    stream = io.BytesIO(b"digits/7.png\nno such\x1b\xff.png\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    expected = "error: no such\\x1b\\udcff.png: No such file or directory\n"
    assert refusal(predict.main, ["runs/eva", "-"], capsys) == expected


def test_a_line_for_each_image(capsys):
    predict.main(["runs/eva", "digits/1.png", "digits/2.png", "--top", "3"])
    lines = capsys.readouterr().out.splitlines()
    for line, row in zip(lines, ask("runs/eva", "digits/1.png", "digits/2.png", "--top", "3"), strict=True):
        pairs = zip(row["classes"], row["probabilities"], strict=True)
        assert line == "  ".join([f"{row['file']}:", *(f"{name} {100 * p:.2f} %" for name, p in pairs)])


def test_a_reader_that_has_read_enough_ends_it(monkeypatch, capfd):
    """`predict.py ... | head -1` closes the pipe early."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit, match="141"):
            predict.main(["runs/eva", "few/deeper"])
    assert not capfd.readouterr().err


def test_names_cannot_control_the_terminal(tmp_path, capsys):
    checkpoint = load_checkpoint(Path("runs/eva/step_3_epoch_1.pt"))
    save_checkpoint(tmp_path / "x.pt", checkpoint | {"classes": ["\x1b[2J"] * 10})
    Path("\x1b[31m.png").write_bytes(Path("digits/0.png").read_bytes())
    predict.main([str(tmp_path / "x.pt"), "\x1b[31m.png", "--top", "1"])
    assert capsys.readouterr().out.startswith("\\x1b[31m.png:  \\x1b[2J ")


@pytest.mark.parametrize("channels", [1, 3])
def test_the_transform_takes_images_of_any_mode(channels, tmp_path):
    make_checkpoint(tmp_path / "x.pt", f"model.in_chans={channels}")
    model, transform, _ = load(tmp_path / "x.pt", weights="plain")
    grey = ImageOps.pad(Image.open("digits/4.png").convert("L"), (12, 9))
    expected = transform(grey)
    assert expected.shape == (channels, 8, 8)
    assert model(expected[None]).shape == (1, 10)
    for mode in ("1", "RGB", "RGBA", "P", "CMYK"):
        image = grey.convert("1").convert("L") if mode == "1" else grey
        torch.testing.assert_close(transform(image.convert(mode)), transform(image), rtol=0, atol=0.01)
    turned, exif = grey.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    torch.testing.assert_close(transform(Image.open(tmp_path / "turned.png")), expected)


def test_a_checkpoint_without_class_names_has_numbers(tmp_path, capsys):
    checkpoint = load_checkpoint(Path("runs/eva/step_3_epoch_1.pt"))
    del checkpoint["classes"]
    save_checkpoint(tmp_path / "x.pt", checkpoint)
    assert load(tmp_path / "x.pt").classes == [*"0123456789"]
    assert capsys.readouterr().err.endswith("x.pt: without class names; they are numbers here\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere", "digits"], "nowhere: no such run directory or checkpoint"),
        (["digits/0.png", "digits"], "digits/0.png: damaged, or no checkpoint that can be loaded safely"),
        (["runs/eva", "nowhere.png"], "nowhere.png: No such file or directory"),
        (["runs/eva", "runs"], "runs: no images (files named *.jpg, "),
        (["runs/eva", "-"], "-: no file is named on standard input"),
        (["runs/eva", "digits", "--output", "x.txt"], "x.txt: --output writes .csv; name such a file"),
        (["runs/eva", "digits", "--output", "no/x.csv"], "no/x.csv: no directory 'no'"),
        (["runs/eva", "digits/0.png", "--output", "dir.csv"], "dir.csv: cannot be written: Is a directory"),
        (["runs/eva", "digits", "--device", "cuda"], "cuda is not available here; use auto or cpu"),
        (["nine.pt", "digits"], "nine.pt: holds 9 class names, but model.num_classes = 10"),
    ],
)
def test_bad_input_is_one_line(arguments, problem, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    checkpoint = load_checkpoint(Path("runs/eva/step_3_epoch_1.pt"))
    save_checkpoint(Path("nine.pt"), checkpoint | {"classes": CLASSES[:9]})
    Path("dir.csv").mkdir(exist_ok=True)
    error = refusal(predict.main, arguments, capsys)
    assert error.count("\n") == 1
    assert problem in error


def test_lack_of_memory_has_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr(predict, "predict", Mock(side_effect=torch.OutOfMemoryError))
    error = refusal(predict.main, ["runs/eva", "digits", "--device", "cpu"], capsys)
    assert error == "error: out of memory; lower --batch-size\n"


def test_logits_that_are_not_finite_predict_nothing(capsys):
    checkpoint = load_checkpoint(Path("runs/eva/step_3_epoch_1.pt"))
    checkpoint["model_ema"]["head.weight"] = checkpoint["model_ema"]["head.weight"].sign() * 3e38
    save_checkpoint(Path("large.pt"), checkpoint)
    problem = "no prediction: the logits of 2 images are not finite\n"
    for output in ([], ["--output", "none.csv"]):
        with pytest.raises(SystemExit) as caught:
            predict.main(["large.pt", "digits/0.png", "digits/1.png", "--device", "cpu", *output])
        out, err = capsys.readouterr()
        assert (caught.value.code, err) == (1, problem)
        lines = ["" if output else f"digits/{i}.png: no prediction, as the logits are not finite\n" for i in (0, 1)]
        assert out == "".join(lines)
    assert Path("none.csv").read_text().split() == ["file", "digits/0.png", "digits/1.png"]
