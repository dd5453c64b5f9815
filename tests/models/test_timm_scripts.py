"""timm's own scripts on our models, and checkpoints that go both ways: `pytest -m timm`, with a network.

timm's distributions do not contain the scripts: they come from its repository at the tag of the installed version, or
from the checkout that the environment variable TIMM_SOURCE names.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image

from engine.data.arrays import DigitsReader
from models import create_model

pytestmark = pytest.mark.timm

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
QUICKSTART = yaml.safe_load(CONFIG.read_text())
ATTENTION = QUICKSTART["attention"]
MODEL = {key: value for key, value in QUICKSTART["model"].items() if key not in ("name", "num_classes")}
DATA = ["--crop-pct=1.0", "--mean", *["0.5"] * 3, "--std", *["0.5"] * 3, "-j", "0"]
NAMED = ["--device=cpu", "--model=deit", "--num-classes=10", "--input-size", "3", "56", "56", "--model-kwargs"]
NAMED += [f"{key}={value}" for key, value in {**MODEL, "attention": ATTENTION}.items()]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The directory of timm's scripts."""
    if source := os.environ.get("TIMM_SOURCE"):
        return Path(source)
    folder = tmp_path_factory.mktemp("timm") / "source"
    url = "https://github.com/huggingface/pytorch-image-models"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"--branch=v{timm.__version__}", url, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The digits as class folders of PNG files, of the size of the model."""
    root = tmp_path_factory.mktemp("digits")
    for split in ("train", "val"):
        reader = DigitsReader(split)
        for index in range(len(reader)):
            path = root / split / reader.filename(index)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.open(reader[index][0]).resize((56, 56)).save(path.with_suffix(".png"))
    return root


@pytest.fixture(scope="module")
def trained(scripts, digits, tmp_path_factory):
    """The directory that timm's train.py leaves, and the top-1 that it reports for its last checkpoint."""
    output = tmp_path_factory.mktemp("timm_run")
    recipe = "--train-split train --val-split val -b 16 --epochs 2 --warmup-epochs 0 --opt adamw --lr 2e-3 --no-aug"
    place = ["--data-dir", digits, "--output", output, "--experiment", "run"]
    result = run_script(scripts / "train.py", *place, *recipe.split(), *DATA, *NAMED)
    return output / "run", json.loads(result.split("--result")[-1])[-1]["validation"]["top1"]


def run_script(script, *arguments):
    """The output of `script`, run as in docs/integration.md."""
    command = [sys.executable, *(["-m", "models"] if script.parent != ROOT else []), script, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def top1_of_timm(scripts, digits, checkpoint):
    data = ["--data-dir", digits, "--split", "val", "-b", "64"]
    result = run_script(scripts / "validate.py", *data, *DATA, "--checkpoint", checkpoint, *NAMED)
    return json.loads(result.split("--result")[-1])["top1"]


def top1_of_ours(digits, checkpoint):
    data = [f"data.root={digits}", "data.dataset=folder"]
    results = json.loads(run_script(ROOT / "validate.py", checkpoint, *data, "--json"))
    return results["plain"]["top1"]


def test_a_checkpoint_of_timm_has_the_same_top1_here(scripts, digits, trained, tmp_path):
    output, top1 = trained
    assert top1 > 30  # of ten classes
    for cleaned in ("clean.pth", "clean.safetensors"):
        format = ["--safetensors"] if cleaned.endswith(".safetensors") else []
        checkpoint = ["--checkpoint", output / "last.pth.tar", "--output", tmp_path / cleaned]
        run_script(scripts / "clean_checkpoint.py", *checkpoint, "--no-hash", *format)
    for checkpoint in (output / "last.pth.tar", tmp_path / "clean.pth", tmp_path / "clean.safetensors"):
        assert top1_of_timm(scripts, digits, checkpoint) == pytest.approx(top1, abs=1e-4)
        export = tmp_path / "export.safetensors"
        command = [sys.executable, "-m", "engine.checkpoints.export", checkpoint, export, "--config", CONFIG]
        subprocess.run(command, check=True, cwd=ROOT)
        assert top1_of_ours(digits, export) == pytest.approx(top1, abs=1e-4)


def test_a_checkpoint_of_ours_has_the_same_top1_in_timm(scripts, digits, trained, tmp_path):
    data = ["data.dataset=folder", f"data.root={digits}"]
    recipe = ["schedule.epochs=1", "schedule.warmup_epochs=0", "optim.lr=0.0005"]
    start = f"init.weights={trained[0] / 'last.pth.tar'}"
    run_script(ROOT / "train.py", CONFIG, *data, start, *recipe, "--output", tmp_path / "run")
    export = tmp_path / "run.safetensors"
    top1 = top1_of_ours(digits, tmp_path / "run")
    subprocess.run([sys.executable, "-m", "engine.checkpoints.export", tmp_path / "run", export], check=True, cwd=ROOT)
    assert top1 > trained[1]  # the training went on
    (checkpoint,) = (tmp_path / "run").glob("step_*_epoch_1.pt")
    assert top1_of_timm(scripts, digits, checkpoint) == pytest.approx(top1, abs=1e-4)
    assert top1_of_timm(scripts, digits, export) == pytest.approx(top1, abs=1e-4)


def test_averaged_checkpoints_of_timm(scripts, trained, tmp_path):
    run_script(scripts / "avg_checkpoints.py", "--input", trained[0], "--output", tmp_path / "average.pth")
    average = torch.load(tmp_path / "average.pth", weights_only=True)
    model = create_model("deit", ATTENTION, num_classes=10, **MODEL)
    model.load_state_dict(average)


def test_inference_of_timm(scripts, digits, trained, tmp_path):
    pytest.importorskip("pandas", reason="timm's inference.py imports it")
    checkpoint = ["--data-dir", digits / "val", "--checkpoint", trained[0] / "last.pth.tar", "--results-dir", tmp_path]
    run_script(scripts / "inference.py", *checkpoint, *DATA, "--include-index", "-b", "64", *NAMED)
    (table,) = tmp_path.glob("*.csv")
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    labels = {path.name: path.parent.name for path in (digits / "val").glob("*/*.png")}
    hits = [labels[file] == index for file, index, *_ in rows]
    assert 100 * sum(hits) / len(hits) == pytest.approx(trained[1], abs=1e-4)


def test_benchmark_of_timm(scripts):
    result = run_script(scripts / "benchmark.py", "--num-warm-iter", "1", "--num-bench-iter", "10", "-b", "2", *NAMED)
    assert re.search(r'"train_samples_per_sec": [\d.]+', result)
