"""The trained models and the images in reference/ agree with its README."""

import re
from hashlib import sha256
from pathlib import Path

import pytest

import predict
from analysis.laboratory import measure_own
from analysis.trained import read_sample
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


def test_the_first_page_shows_a_class_by_name(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command, expected = re.search(
        r"python predict\.py (.*reference/.*)\n(.*\n)", (ROOT / "README.md").read_text()
    ).groups()
    predict.main(command.split())
    assert capsys.readouterr().out == expected
    assert expected.startswith("reference/bag.png:  bag 9")


@pytest.mark.parametrize("name", ["fashion_mnist", "six_layers"])
def test_reference_is_intact_and_small(name: str):
    weights = REFERENCE / f"{name}.safetensors"
    digest, stated = Path(f"{weights}.sha256").read_text().split()
    assert stated == weights.name
    assert sha256(weights.read_bytes()).hexdigest() == digest
    assert weights.stat().st_size <= 1e6
