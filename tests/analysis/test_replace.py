"""analyze.py replace and error, on a model of random weights whose logits vary."""

import argparse
import csv
import dataclasses
import math
from pathlib import Path

import pytest
import torch
import yaml

import analyze
from ablation.sweep import read_ablation
from analysis import drop_in
from analysis.error import SIZES, attend_by_softmax, size_option, with_budget
from analysis.replace import plan_finetuning
from attention import ATTENTION, OptionError
from engine.checkpoint import save_checkpoint
from engine.config import dump_run, load_run
from engine.progress import Progress
from models import create_model

ROOT = Path(__file__).parents[2]
OPTIONS = ["model.depth=2", "model.embed_dim=24", "model.img_size=16", "model.stem=linear", "attention=softmax"]
EVALUATION, SAMPLED = "evaluation", "sampled"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of a model on 4x4 tokens, with queries and keys of variance about 1."""
    path = tmp_path_factory.mktemp("analysis") / "step_3_epoch_1.pt"
    run = load_run(ROOT / "configs/quickstart.yaml", [*OPTIONS, "train.device=cpu"])
    torch.manual_seed(0)
    state = create_model(attention=run.attention, **run.model).state_dict()
    state = {name: 10 * x if name.endswith("qkv.weight") else x for name, x in state.items()}
    classes = [str(digit) for digit in range(10)]
    metadata = {"config": dump_run(run), "processes": 1, "images": 100, "classes": classes}
    save_checkpoint(path, metadata | {"progress": vars(Progress(epoch=1, step=3)), "model": state})
    return path


@pytest.fixture(scope="module")
def reference(checkpoint) -> drop_in.Reference:
    return drop_in.load_reference(checkpoint, [], 20)


def ask(checkpoint: Path, output: Path, question: str, *arguments: str) -> list[dict[str, str]]:
    """The rows of the table that analyze.py writes."""
    analyze.main([question, str(checkpoint), "--output", str(output), *arguments])
    assert (output / f"{question}.png").read_bytes().startswith(b"\x89PNG")
    with (output / f"{question}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_softmax_in_the_place_of_softmax_changes_nothing(checkpoint, tmp_path, capsys):
    """A mechanism that the grid cannot have is a row with the reason."""
    names = ["softmax", "performer", "{name: eva, window_size: 2, num_landmarks: 4}", "lara"]
    rows = ask(checkpoint, tmp_path, "replace", "--images", "20", "--draws", "2", "--attention", *names)
    softmax, performer, eva, lara = rows
    assert float(softmax["change"]) == float(softmax["error"]) == float(softmax["error_std"]) == 0
    assert float(performer["error"]) > 0
    assert float(performer["error_std"]) > 0
    assert (performer["untrained_parameters"], performer["images"], performer["mode"]) == ("0", "20", "evaluation")
    assert int(eva["untrained_parameters"]) > 0
    assert lara["top1"] == ""
    assert "num_landmarks = 49" in lara["problem"]
    assert "attention(lara).num_landmarks = 49" in capsys.readouterr().out


def test_error_of_randomized_attention_falls_with_the_number_of_samples(checkpoint, tmp_path):
    """As 1 / S, the mean of S independent and unbiased estimates; softmax's own is zero."""
    names = "--attention", "softmax", "ra"
    rows = ask(checkpoint, tmp_path, "error", *names, "--budgets", "1", "4", "16", "--images", "16", "--draws", "4")
    assert {float(row["error"]) for row in rows if row["attention"] == "softmax"} == {0}
    found = {
        int(row["budget"]): float(row["error"]) for row in rows if row["attention"] == "ra" and row["layer"] == "1"
    }
    assert found[1] > 0.01
    assert found[1] / found[4] == pytest.approx(4, rel=0.25)
    assert found[1] / found[16] == pytest.approx(16, rel=0.25)


def test_errors_are_those_of_the_twin(reference):
    """Against softmax written out, on the inputs of the second layer; zeros have the error 1."""
    inputs = drop_in.layer_inputs(reference, 5)
    softmax = attend_by_softmax(reference, inputs, 0.5)
    q, k, v = drop_in.attention_layers(reference.model)[1].project(*inputs[1])
    weights = (2 * q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    torch.testing.assert_close(softmax.outputs[1], weights @ v)
    assert softmax.entropies[1] == pytest.approx(
        -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean().item(), rel=1e-5
    )
    assert drop_in.normalised_error(torch.zeros(3), torch.ones(3)) == 1
    assert drop_in.normalised_error(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0])) == pytest.approx(0.1)


def test_entropy_rises_with_the_temperature(reference):
    inputs = drop_in.layer_inputs(reference, 4)
    found = [attend_by_softmax(reference, inputs, temperature).entropies[0] for temperature in (0.25, 1, 4, 1e6)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(math.log(16), abs=1e-5)


def test_draws_are_those_of_the_seed(reference):
    """And noise is kept in evaluation, drawn where it is sampled, by attention alone."""
    inputs = drop_in.layer_inputs(reference, 4)

    def outputs(seed: int, mode: drop_in.Mode) -> list[torch.Tensor]:
        model, _ = drop_in.drop_in(reference, {"name": "performer", "num_samples": 8}, seed, mode)
        layer = drop_in.attention_layers(model)[0]
        assert [module for module in model.modules() if module.training] == (
            drop_in.attention_layers(model) if mode == SAMPLED else []
        )
        return [drop_in.attended(layer, *inputs[0]) for _ in range(2)]

    kept, again, other, fresh = (
        outputs(0, EVALUATION),
        outputs(0, EVALUATION),
        outputs(1, EVALUATION),
        outputs(0, SAMPLED),
    )
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], again[0])
    assert not torch.equal(kept[0], other[0])
    assert not torch.equal(fresh[0], fresh[1])


def test_a_run_without_queries_is_refused(reference):
    model, _ = drop_in.drop_in(reference, {"name": "synthesizer"}, 0, EVALUATION)
    with pytest.raises(OptionError, match="needs 3 projections of tokens, but synthesizer of the run makes 1"):
        attend_by_softmax(dataclasses.replace(reference, model=model), [], 1.0)


def test_every_mechanism_has_options_and_at_most_one_size():
    known = drop_in.read_mechanisms(None)
    assert set(known) == set(ATTENTION)
    sized = {name: size_option(attention) for name, attention in known.items()}
    assert {name for name, size in sized.items() if size is None} == {"softmax", "linear", "xca", "cosformer", "dpfp"}
    assert set(filter(None, sized.values())) == set(SIZES)
    for name, attention in known.items():
        if sized[name]:
            options = with_budget(attention, 49, 196)
            assert options[sized[name]] == {"radius": 24, "reduction": 2}.get(
                sized[name], 7 if sized[name] in ("window_size", "pool_size") else 49
            )


def test_what_is_replaced_can_be_trained_on(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dump_run(load_run(ROOT / "configs/quickstart.yaml", OPTIONS))))
    plan, mechanisms = tmp_path / "finetune.yaml", {"eva": {"name": "eva", "window_size": 2, "num_landmarks": 4}}
    plan.write_bytes(plan_finetuning(argparse.Namespace(checkpoint=tmp_path, finetune=3), mechanisms))
    _, [setting] = read_ablation(plan, [], tmp_path, ["python"])
    run = setting.cases[0].run
    assert run.attention | mechanisms["eva"] == run.attention
    assert (run.init.weights, run.schedule.epochs) == (str(tmp_path), 3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--attention", "evaa"], "did you mean 'eva'"),
        (["--attention", "{name: eva, window: 7}"], "--attention(eva).window: unknown option"),
        (["--draws", "0"], "--draws = 0 is below the least valid value 1"),
        (["--finetune", "1"], "config.yaml is not there; give the directory of a run"),
        (["--images", "0"], "--images = 0 is below the least valid value 1"),
    ],
)
def test_refusals(checkpoint, tmp_path, capsys, arguments, expected):
    with pytest.raises(SystemExit) as caught:
        ask(checkpoint, tmp_path, "replace", *arguments)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err
