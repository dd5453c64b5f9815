"""The trained models and the images in reference/ agree with its README."""

import json
import re
from hashlib import sha256
from pathlib import Path

import pytest

from analysis.laboratory import measure_own
from analysis.trained import read_sample
from engine.run.load import dump_run, flatten, load_run
from engine.training.differences import list_differences
from tests.analysis.models import load_model

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "reference"
IMAGES = "data.dataset=idx", f"data.root={REFERENCE}", "data.val_split=t10k"
README = " ".join((REFERENCE / "README.md").read_text().split())


@pytest.mark.parametrize(("name", "depth", "least"), [("fashion_mnist", 3, 88), ("six_layers", 6, 85)])
def test_reference_has_learned(name: str, depth: int, least: float):
    trained = load_model(REFERENCE / f"{name}.safetensors", *IMAGES)
    assert trained.run.model["depth"] == depth
    assert f"({sum(x.numel() for x in trained.model.parameters()):,} parameters)" in README
    assert measure_own(trained, read_sample(trained, 200)).score.top1 > least


def test_reference_is_that_of_its_configuration_and_log():
    shipped = load_run(REFERENCE / "config.yaml", [])
    config = load_run(ROOT / "configs/fashion_mnist/softmax.yaml", [])
    for section in ("model", "attention", "augment", "optim", "schedule"):
        there, here = (flatten({section: dump_run(run)[section]}) for run in (shipped, config))
        assert there
        assert list_differences(there, here, {"optim.betas", "optim.eps"}) == []  # written out there, as adamw's own
    *_, final = map(json.loads, (REFERENCE / "metrics.jsonl").read_text().splitlines())
    stated = re.search(r"top-1 was ([\d.]+) % on all ([\d,]+)", README)
    assert float(stated[1]) == final["top1"]
    assert int(stated[2].replace(",", "")) == final["images"]
    assert f"seen: {stated[1]} " in (ROOT / "configs/fashion_mnist/softmax.yaml").read_text()
    assert f"{stated[1]} %" in (ROOT / "docs" / "data.md").read_text()


@pytest.mark.parametrize("name", ["fashion_mnist", "six_layers"])
def test_reference_is_intact_and_small(name: str):
    weights = REFERENCE / f"{name}.safetensors"
    digest, stated = Path(f"{weights}.sha256").read_text().split()
    assert stated == weights.name
    assert sha256(weights.read_bytes()).hexdigest() == digest
    assert weights.stat().st_size <= 1e6
