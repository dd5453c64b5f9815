"""analyze.py replace --align: what it fits, on which images, what it leaves, and how it goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from analysis import align as alignment
from analysis import laboratory
from analysis.align import align, draw_batches, open_training_images
from analysis.command_line import BATCH_SIZE
from analysis.drop_in import drop_in, layer_errors, layer_inputs, outputs
from analysis.measurements import Measurements
from analysis.trained import Trained, read_sample
from attention import OptionError
from engine.checkpoints.files import open_weights
from engine.data.arrays import DigitsReader
from engine.run.load import parse_run
from models.base import attention_layers
from tests.analysis.models import ask, load_model
from tests.analysis.plans import follow_plans

EVA = "{name: eva, window_size: 2, num_landmarks: 4}"
HYBRID = [{"name": "softmax", "blocks": 0}, {"name": "linear", "blocks": 1}]


def replaced(checkpoint: Path, output: Path, *arguments: str, images: int = 60) -> list[dict[str, str]]:
    return ask(checkpoint, output, "replace", "--images", str(images), "--draws", "1", *arguments)


def aligned(trained: Trained, attention: object, steps: int, seed: int = 0) -> torch.nn.Module:
    model, _ = drop_in(trained, attention, seed)
    images, indices = open_training_images(trained, read_sample(trained, 60))
    torch.manual_seed(seed)
    align(trained, model, draw_batches(trained, images, indices, steps, seed), steps)
    return model


@pytest.mark.parametrize(("attention", "layers"), [({"name": "linear"}, [0, 1]), (HYBRID, [1])], ids=["all", "hybrid"])
def test_replaced_layers_are_fitted_and_nothing_else_changes(attention, layers, trained):
    """Errors are of images that were not used. The trained model keeps its weights and has no hooks."""
    sample = read_sample(trained, 30)
    inputs = layer_inputs(trained, sample.images)
    own = [outputs(layer, *given) for layer, given in zip(attention_layers(trained.model), inputs, strict=True)]
    kept = {name: x.clone() for name, x in trained.model.state_dict().items()}
    before, model = drop_in(trained, attention, 0)[0], aligned(trained, attention, steps=60)
    assert not model.training
    errors = [layer_errors(found, inputs, own, outputs) for found in (before, model)]
    for layer, (first, last) in enumerate(zip(*errors, strict=True)):
        assert last < 0.7 * first if layer in layers else first == last == 0
    for name, x in model.state_dict().items():
        is_fitted = any(name.startswith(f"blocks.{layer}.attn.") for layer in layers)
        assert torch.equal(x, kept[name]) != is_fitted, name
    assert all(torch.equal(x, kept[name]) for name, x in trained.model.state_dict().items())
    assert not any(layer._forward_hooks for layer in attention_layers(trained.model))


def test_alignment_follows_from_its_seed(trained):
    first, again, other = (aligned(trained, {"name": "linear"}, 3, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(x, again[name]) for name, x in first.items())
    assert any(not torch.equal(x, other[name]) for name, x in first.items())


def test_own_attention_is_left_as_it_is(trained):
    model = aligned(trained, {"name": "softmax"}, 3)
    assert all(torch.equal(x, trained.model.state_dict()[name]) for name, x in model.state_dict().items())


def test_no_image_is_drawn_twice_before_all(trained, monkeypatch):
    """Indices are those of the split; the sample is left out where both splits are one."""
    taken = []
    monkeypatch.setattr(alignment, "read_images", lambda images, chosen, run: [taken.extend(chosen)])
    sample = read_sample(trained, 60)
    images, indices = open_training_images(trained, sample)
    assert len(indices) == len(images) == len(DigitsReader("train"))
    indices = indices[:50]
    list(draw_batches(trained, images, indices, 5, 0))
    assert len(taken) == 5 * BATCH_SIZE
    assert sorted(taken[:50]) == sorted(taken[50:100]) == indices.tolist()
    assert taken[:50] != taken[50:100]


def test_classified_images_are_not_aligned_on(checkpoint):
    trained = load_model(checkpoint, "data.train_split=val")
    sample = read_sample(trained, 60)
    images, indices = open_training_images(trained, sample)
    assert len(images) == 360
    assert sorted([*indices.tolist(), *sample.indices]) == [*range(360)]
    problem = r"data\.train_split = 'val' leaves 10 images for --align, below 24, those of a step; lower --images, or"
    with pytest.raises(OptionError, match=problem):
        open_training_images(trained, read_sample(trained, 350))


def test_few_training_images_are_refused_with_what_helps(checkpoint):
    trained = load_model(checkpoint, "data.subset=0.01")
    with pytest.raises(OptionError, match=r"leaves 10 images .*; raise data\.subset = 0\.01$"):
        open_training_images(trained, read_sample(trained, 60))


@pytest.mark.parametrize("subset", [0.5, 0.9])
def test_of_a_subset_those_that_are_not_classified_are_aligned_on(checkpoint, subset):
    trained = load_model(checkpoint, "data.train_split=val", f"data.subset={subset}")
    sample = read_sample(trained, 60)
    images, indices = open_training_images(trained, sample)
    in_split = images.reader.indices[indices.numpy()]
    assert not set(in_split.tolist()) & set(sample.indices)
    assert len(indices) == len(images) - len(set(images.reader.indices.tolist()) & set(sample.indices))


def test_images_that_are_held_out_are_never_aligned_on(checkpoint):
    trained = load_model(checkpoint, "data.train_split=val", "data.val_fraction=0.5")
    images, indices = open_training_images(trained, read_sample(trained, 60))
    assert len(indices) == len(images) < 360


def test_a_split_under_another_name_is_the_same(checkpoint, tmp_path):
    root = tmp_path / "images"
    for label, column in enumerate("0123456789"):
        (root / "val" / column).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(np.full((8, 8), 9 * number + label, np.uint8)).save(root / "val" / column / f"{number}.png")
    options = "data.dataset=folder", f"data.root={root}", "data.train_split=./val"
    trained = load_model(checkpoint, *options)
    sample = read_sample(trained, 50)
    _, indices = open_training_images(trained, sample)
    assert sorted([*indices.tolist(), *sample.indices]) == [*range(80)]


@pytest.mark.complete
def test_the_table_has_both_stages_and_the_aligned_model_is_an_export(checkpoint, tmp_path, capsys):
    """The export has the accuracy of the table, and its configuration the new attention."""
    linear, eva = replaced(checkpoint, tmp_path, "--align", "40", "--attention", "linear", EVA)
    for row in (linear, eva):
        assert float(row["aligned_output_error"]) < 0.7 * float(row["output_error"])
        assert float(row["aligned_seconds"]) > 0
    printed = capsys.readouterr().out
    assert "aligned in 40 steps" in printed
    assert f"{float(eva['aligned_output_error']):.3f} |" in printed
    [path] = (tmp_path / "aligned").glob("name-eva-window_size-2-*.safetensors")
    export = open_weights(path).checkpoint
    run = parse_run(export["config"], str(path))
    assert (run.attention["window_size"], run.attention["num_landmarks"]) == (2, 4)
    assert run.init.weights == str(checkpoint)
    again = load_model(path)
    sample = read_sample(load_model(checkpoint), 60)
    assert laboratory.measure_own(again, sample).score.top1 == pytest.approx(float(eva["aligned_top1"]))
    assert export["classes"] == [str(digit) for digit in range(10)]


@pytest.mark.complete
def test_the_same_question_is_not_measured_again(checkpoint, tmp_path, monkeypatch):
    """Another number of steps, a missing model, or other code is."""
    asked = "--attention", "linear", "--align"
    first = replaced(checkpoint, tmp_path, *asked, "2")
    with (tmp_path / laboratory.MEASUREMENTS_FILE).open("a") as file:
        file.write('{"key": "torn')
    measured, measure = [], laboratory.Laboratory._measure
    monkeypatch.setattr(laboratory.Laboratory, "_measure", lambda *given: measured.append(given) or measure(*given))
    assert replaced(checkpoint, tmp_path, *asked, "2") == first
    assert not measured
    replaced(checkpoint, tmp_path, *asked, "3")
    assert len(measured) == 1
    replaced(checkpoint, tmp_path, *asked, "2", images=59)
    assert len(measured) == 2
    for path in (tmp_path / "aligned").glob("*.safetensors"):
        path.unlink()
    again = replaced(checkpoint, tmp_path, *asked, "2")
    assert len(measured) == 3
    assert again[0]["aligned_top1"] == first[0]["aligned_top1"]
    monkeypatch.setattr(laboratory, "digest_code", lambda: "other")
    replaced(checkpoint, tmp_path, *asked, "2")
    replaced(checkpoint, tmp_path, *asked, "2")
    assert len(measured) == 4


def test_a_measurement_depends_on_all_of_its_question(tmp_path):
    path = tmp_path / "measurements.jsonl"
    kept = Measurements(path, {"code": "a"})
    assert kept.find(kept.key(seed=0)) is None
    kept.add(kept.key(seed=0), {"top1": 1.5})
    assert kept.find(kept.key(seed=0)) == {"top1": 1.5}
    assert kept.find(kept.key(seed=1)) is None
    assert Measurements(path, {"code": "b"}).key(seed=0) != kept.key(seed=0)
    assert json.loads(path.read_text())["values"] == {"top1": 1.5}


def test_alignment_that_diverges_is_a_row_with_the_reason(checkpoint, tmp_path, monkeypatch):
    steps = iter(range(100))

    def read(*given: object) -> tuple[torch.Tensor]:
        return (torch.full((BATCH_SIZE, 3, 16, 16), float("nan") if next(steps) == 2 else 1.0),)

    monkeypatch.setattr(alignment, "read_images", read)
    [row] = replaced(checkpoint, tmp_path, "--align", "5", "--attention", "linear")
    assert row["problem"] == "a gradient is not finite in step 3 of --align"
    assert row["top1"] == ""


def test_training_on_starts_from_the_aligned_weights(checkpoint, tmp_path, monkeypatch):
    plans = follow_plans(monkeypatch)
    replaced(checkpoint, tmp_path, "--align", "2", "--attention", "linear", "--finetune", "1")
    text = plans[0].read_text()
    [path] = (tmp_path / "aligned").glob("linear-seed0-*.safetensors")
    assert f"init.weights: {path}" in text
    assert f"init.weights: {checkpoint}" in text
