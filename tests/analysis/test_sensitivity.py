"""analyze.py sensitivity: hybrids with one replaced layer, whose layers are aligned once for each mechanism."""

import csv
import math
from pathlib import Path

import pytest
import torch

import analyze
from analysis import laboratory, sensitivity
from analysis.hybrids import OWN, Hybrids
from analysis.laboratory import Laboratory, Score, score
from analysis.trained import read_sample
from attention import OptionError
from engine.runtime.errors import UserError
from models import create_model
from models.base import attention_layers
from tests.analysis.models import load_model, save_model

OPTIONS = ["model.depth=3", "model.embed_dim=24", "model.img_size=16", "model.stem=linear"]
PYRAMID = "model={name: pvtv2_b0, img_size: 64, embed_dims: [8, 16, 20, 32], depths: [1, 2, 1, 1], num_classes: 10}"
LINEAR, EVA = {"name": "linear"}, {"name": "eva", "window_size": 2, "num_landmarks": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("analysis"), OPTIONS, scale=10)


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    monkeypatch.setattr(sensitivity, "encode", lambda figure: b"")


def create_laboratory(checkpoint: Path, directory: Path, steps: int | None = None) -> Laboratory:
    trained = load_model(checkpoint)
    return Laboratory(trained, read_sample(trained, 60), directory, ["evaluation"], steps)


def ask(checkpoint: Path, output: Path, *arguments: str) -> list[dict[str, str]]:
    options = "--images", "60", "--draws", "1", "--output", str(output)
    analyze.main(["sensitivity", str(checkpoint), *options, *arguments])
    with (output / "sensitivity.csv").open(newline="") as file:
        return list(csv.DictReader(file))


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
    assert hybrids.score(choices, is_aligned=True) == score(model, lab.trained, lab.sample)
    assert hybrids.macs(hybrids.own) == hybrids.own_macs
    assert hybrids.score(hybrids.own, is_aligned=True) == lab.own.score


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_wrong_and_their_loss_is_infinite(checkpoint, tmp_path, monkeypatch, bad):
    """Also where another logit of the image is the highest. A model with such a loss is compared with nothing."""
    trained = load_model(checkpoint)
    sample = read_sample(trained, 20)

    class Spoilt(torch.nn.Module):
        def forward(self, images):
            logits = 9.0 * torch.nn.functional.one_hot(sample.classes, 10)
            logits[3, sample.classes[3]], logits[5, (sample.classes[5] + 1) % 10] = bad, bad
            return logits

    monkeypatch.setattr(laboratory, "choose_batch_size", lambda shape: 20)
    assert score(Spoilt(), trained, sample) == Score(90.0, math.inf)
    monkeypatch.setattr(laboratory, "score", lambda *given: Score(90.0, math.inf))
    with pytest.raises(UserError, match=r"its own loss is not finite; choose another checkpoint"):
        create_laboratory(checkpoint, tmp_path)


def test_costs_of_layers_add_up(checkpoint, tmp_path):
    hybrids = Hybrids(create_laboratory(checkpoint, tmp_path), {"linear": LINEAR, "eva": EVA}, seed=0)
    choices = ("eva", "linear", OWN)
    alone = [hybrids.macs(hybrids.single(layer, choices[layer])) - hybrids.own_macs for layer in (0, 1)]
    assert hybrids.macs(choices) == hybrids.own_macs + sum(alone)


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


def test_the_table_has_every_layer_in_both_stages(checkpoint, tmp_path, capsys):
    """The layer of softmax in the place of softmax changes nothing; what cannot be built is a row with the reason."""
    names = "softmax", "linear", "{name: eva, window_size: 2, num_landmarks: 4}", "lara"
    rows = ask(checkpoint, tmp_path, "--align", "20", "--attention", *names)
    assert [(row["attention"], row["layer"]) for row in rows[:6]] == [
        (name, str(layer)) for name in names[:2] for layer in range(3)
    ]
    assert len(rows) == 10
    for row in rows[:3]:
        assert row["top1"] == row["aligned_top1"] == row["own_top1"]
        assert row["loss"] == row["aligned_loss"] == row["own_loss"]
        assert row["macs"] == row["own_macs"]
    assert all(int(row["macs"]) < int(row["own_macs"]) for row in rows[3:6])
    assert len({row["loss"] for row in rows[3:6]} | {row["aligned_loss"] for row in rows[3:6]}) == 6
    assert "num_landmarks = 49" in rows[9]["problem"]
    out = capsys.readouterr().out
    assert "one layer alone has another, as it is and aligned in 20 steps" in out
    assert len([*(tmp_path / "aligned").glob("*.safetensors")]) == 3  # one alignment for each mechanism


def test_a_layer_alone_is_the_drop_in_of_its_block(checkpoint, tmp_path):
    """`replace --blocks` measures the same model."""
    [_, row, _] = ask(checkpoint, tmp_path, "--attention", "linear")
    options = "--images", "60", "--draws", "1", "--output", str(tmp_path), "--attention", "linear", "--blocks", "1"
    analyze.main(["replace", str(checkpoint), *options])
    with (tmp_path / "replace.csv").open(newline="") as file:
        [other] = csv.DictReader(file)
    assert row["top1"] == other["top1"]


def test_scores_are_kept(checkpoint, tmp_path, monkeypatch):
    first = ask(checkpoint, tmp_path, "--align", "2", "--attention", "linear")
    monkeypatch.setattr(Laboratory, "build", lambda *given: pytest.fail("measured again"))
    monkeypatch.setattr(Laboratory, "_measure", lambda *given: pytest.fail("aligned again"))
    assert ask(checkpoint, tmp_path, "--align", "2", "--attention", "linear") == first


def test_a_mechanism_that_no_layer_can_have_leaves_no_figure(checkpoint, tmp_path):
    [row] = ask(checkpoint, tmp_path, "--attention", "lara")
    assert "num_landmarks = 49" in row["problem"]
    assert not (tmp_path / "sensitivity.png").exists()


def test_the_heat_map_shows_the_last_stage():
    rows = [
        sensitivity.Row("eva", "", 0, 60, {"replaced": [Score(1.0, 5.0)], "aligned": [Score(80.0, 0.5)]}),
        sensitivity.Row("eva", "", 2, 60, {"replaced": [Score(1.0, 5.0)], "aligned": [Score(90.0, 0.25)]}),
        sensitivity.Row("lara", "", 0, problem="no"),
    ]
    axes = sensitivity.draw("", rows, Score(91.0, 0.2), 100).axes[0]
    assert [text.get_text() for text in axes.texts] == ["80.0\n-40%", "90.0\n-40%"]
    [image] = axes.images
    assert image.get_array().compressed().tolist() == pytest.approx([0.3, 0.05])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["eva"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--attention", "evaa"], "did you mean 'eva'"),
        (["--align", "2", "data.train_split=absent"], "data.train_split: 'absent' is no split of the digits"),
    ],
)
def test_refusals(checkpoint, tmp_path, capsys, arguments, expected):
    given = ["--images", "60", *([] if "--draws" in arguments else ["--draws", "1"]), "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as caught:
        analyze.main(["sensitivity", str(checkpoint), *given, *arguments])
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err
