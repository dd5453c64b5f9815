"""The trained model and the images in reference/ agree with its README."""

import json
import re
from hashlib import sha256
from pathlib import Path

from analysis.laboratory import score
from analysis.trained import read_sample
from engine.config.load import dump_run, flatten, load_run
from engine.training.resume import list_differences
from tests.analysis.models import load_model

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "reference"
WEIGHTS = REFERENCE / "fashion_mnist.safetensors"


def test_reference_has_learned():
    trained = load_model(WEIGHTS, f"data.root={REFERENCE}")
    assert score(trained.model, trained, read_sample(trained, 200)).top1 > 88


def test_reference_is_that_of_its_configuration_and_log():
    shipped = load_run(REFERENCE / "config.yaml", [])
    config = load_run(ROOT / "configs/fashion_mnist/softmax.yaml", [])
    for section in ("model", "attention", "augment", "optim", "schedule"):
        there, here = (flatten({section: dump_run(run)[section]}) for run in (shipped, config))
        assert there
        assert list_differences(there, here) == []
    *_, final = map(json.loads, (REFERENCE / "metrics.jsonl").read_text().splitlines())
    stated = re.search(r"top-1 was ([\d.]+) % on all ([\d,]+)", " ".join((REFERENCE / "README.md").read_text().split()))
    assert float(stated[1]) == final["top1"]
    assert int(stated[2].replace(",", "")) == final["images"]
    assert f"seen: {stated[1]} " in (ROOT / "configs/fashion_mnist/softmax.yaml").read_text()
    assert f"{stated[1]} %" in (ROOT / "docs" / "data.md").read_text()


def test_reference_is_intact_and_small():
    digest, name = (REFERENCE / "fashion_mnist.safetensors.sha256").read_text().split()
    assert name == WEIGHTS.name
    assert sha256(WEIGHTS.read_bytes()).hexdigest() == digest
    assert WEIGHTS.stat().st_size <= 2e6
