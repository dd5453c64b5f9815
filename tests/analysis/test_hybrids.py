"""Hybrids of a trained model, whose layers are aligned once for each mechanism."""

from pathlib import Path

import pytest
import torch

from analysis import laboratory
from analysis.hybrids import OWN, Hybrids
from analysis.laboratory import Laboratory
from analysis.trained import read_sample
from attention import OptionError
from models import create_model
from models.base import attention_layers
from tests.analysis.models import load_model, save_model

OPTIONS = ["model.depth=3", "model.embed_dim=24", "model.img_size=16", "model.stem=linear"]
PYRAMID = "model={name: pvtv2_b0, img_size: 64, embed_dims: [8, 16, 20, 32], depths: [1, 2, 1, 1], num_classes: 10}"
LINEAR, EVA = {"name": "linear"}, {"name": "eva", "window_size": 2, "num_landmarks": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("analysis"), OPTIONS, scale=10)


def create_laboratory(checkpoint: Path, directory: Path, steps: int | None = None) -> Laboratory:
    trained = load_model(checkpoint)
    return Laboratory(trained, read_sample(trained, 60), directory, steps)


@pytest.mark.complete
def test_a_hybrid_has_the_layers_that_are_chosen(checkpoint, tmp_path):
    """Aligned layers are those of the mechanism's one alignment; all others are the trained model's."""
    lab = create_laboratory(checkpoint, tmp_path, steps=3)
    hybrids = Hybrids(lab, {"linear": LINEAR, "eva": EVA}, seed=0)
    choices = ("eva", OWN, "linear")
    assert hybrids.attention(choices) == [
        {**EVA, "blocks": "0"},
        {**lab.trained.run.attention, "blocks": "1"},
        {**LINEAR, "blocks": "2"},
    ]
    hybrids.export(tmp_path / "hybrid.safetensors", choices)
    model = load_model(tmp_path / "hybrid.safetensors").model
    sources = hybrids.aligned("eva"), lab.trained.model, hybrids.aligned("linear")
    for number, source in enumerate(sources):
        state = attention_layers(source)[number].state_dict()
        assert all(torch.equal(x, state[name]) for name, x in attention_layers(model)[number].state_dict().items())
    assert hybrids.score(choices) == lab.score(model)
    assert hybrids.macs(hybrids.own) == hybrids.own_macs
    assert hybrids.score(hybrids.own) == lab.own.score


@pytest.mark.complete
def test_costs_of_layers_add_up(checkpoint, tmp_path):
    hybrids = Hybrids(create_laboratory(checkpoint, tmp_path), {"linear": LINEAR, "eva": EVA}, seed=0)
    choices = ("eva", "linear", OWN)
    alone = [hybrids.macs(hybrids.single(layer, choices[layer])) - hybrids.own_macs for layer in (0, 1)]
    assert hybrids.macs(choices) == hybrids.own_macs + sum(alone)


@pytest.mark.complete
def test_layers_of_a_pyramid_are_named_by_stage_and_those_that_cannot_have_it_are_left_out(tmp_path, monkeypatch):
    """16 x 16, 8 x 8, 4 x 4 and 2 x 2 tokens: 16 groups are too many for the last stage."""
    path = save_model(tmp_path, [PYRAMID])
    monkeypatch.setattr(laboratory, "measure_own", lambda *given: None)
    groups = {"name": "eva", "window_size": 2, "num_landmarks": 16}
    hybrids = Hybrids(create_laboratory(path, tmp_path), {"eva": groups, "linear": LINEAR}, seed=0)
    assert hybrids.layers == {"eva": [0, 1, 2, 3], "linear": [0, 1, 2, 3, 4]}
    assert hybrids.uniform("eva", hybrids.layers["eva"]) == ("eva",) * 4 + (OWN,)
    entries = hybrids.attention((OWN, OWN, "eva", OWN, "linear"))
    assert [(x["name"], x["stage"], x.get("blocks")) for x in entries] == [
        ("softmax", 0, "0"),
        ("softmax", 1, "0"),
        ("eva", 1, "1"),
        ("softmax", 2, "0"),
        ("linear", 3, "0"),
    ]
    create_model(attention=entries, **hybrids.laboratory.trained.run.model)
    with pytest.raises(OptionError, match=r"num_landmarks = 1000"):
        Hybrids(hybrids.laboratory, {"eva": {**groups, "num_landmarks": 1000}}, seed=0)
