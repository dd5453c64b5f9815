"""analyze.py replace and error, on a model of random weights whose logits vary."""

import argparse
import dataclasses
import math
from functools import partial

import pytest
import torch
import yaml

from ablation.sweep import read_ablation
from analysis import error, replace, tune
from analysis.approximation import Row, attend_by_softmax, decompose_errors, measure
from analysis.budgets import SIZES, size_option, with_budget
from analysis.certificate import Certificate
from analysis.command_line import read_mechanisms
from analysis.drop_in import attended, drop_in, layer_errors, layer_inputs, outputs, set_mode
from analysis.error import AXES, draw
from analysis.laboratory import Laboratory, measure_own
from analysis.trained import Trained, read_sample
from attention import ATTENTION, OptionError
from engine.checkpoints.export import to_safetensors
from engine.checkpoints.files import load_checkpoint
from engine.checkpoints.weight_sources import source_of
from engine.config.objective_options import Distill
from engine.config.yaml_files import read_yaml
from engine.objectives.alignment import relative_error
from engine.run.load import load_run
from engine.runtime.errors import UserError
from models import create_model
from models.base import attention_layers, is_same_attention
from tests.analysis.models import ROOT, ask, load_model, read_rows, refusal, save_model
from tests.analysis.plans import follow_plans
from tests.support.facts import stated


def test_softmax_in_the_place_of_softmax_changes_nothing(checkpoint, tmp_path, capsys):
    """A mechanism that the grid cannot have is a row with the reason."""
    names = ["softmax", "performer", "{name: eva, window_size: 2, num_landmarks: 4}", "lara"]
    rows = ask(checkpoint, tmp_path, "replace", "--images", "120", "--draws", "2", "--attention", *names)
    softmax, performer, eva, lara = rows
    assert float(softmax["change"]) == float(softmax["error"]) == float(softmax["error_std"]) == 0
    assert float(performer["error"]) > 0
    assert float(performer["error_std"]) > 0
    assert (performer["untrained_parameters"], performer["images"]) == ("0", "120")
    assert int(eva["untrained_parameters"]) > 0
    assert lara["top1"] == ""
    assert "num_landmarks = 49" in lara["problem"]
    printed = capsys.readouterr().out
    assert "attention(lara).num_landmarks = 49" in printed
    changes = {row["attention"]: float(row["top1"]) - float(softmax["top1"]) for row in (performer, eva)}
    assert any(changes.values())  # as many images may be right by chance
    for (name, change), row in zip(changes.items(), (performer, eva), strict=True):
        assert float(row["change"]) == pytest.approx(change)
        assert f" {change:+.2f} |" in next(line for line in printed.splitlines() if line.startswith(f"| {name}"))


@pytest.mark.complete
def test_error_of_randomized_attention_falls_with_the_number_of_samples(checkpoint, tmp_path):
    """It falls as 1 / S, the error of the mean of S independent unbiased estimates; softmax's own is zero."""
    names, only = ("--attention", "softmax", "ra"), ("--temperatures", "1", "--modes", "evaluation")
    rows = ask(
        checkpoint, tmp_path, "error", *names, "--budgets", "1", "4", "16", "--images", "16", "--draws", "4", *only
    )
    assert {float(row["error"]) for row in rows if row["attention"] == "softmax"} == {0}
    found = {
        int(row["budget"]): float(row["error"]) for row in rows if row["attention"] == "ra" and row["layer"] == "0"
    }
    assert found[1] > 0.01
    assert found[1] / found[4] == pytest.approx(4, rel=0.25)
    assert found[1] / found[16] == pytest.approx(16, rel=0.25)
    macs = {(row["attention"], row["budget"]): int(row["macs"]) for row in rows}
    products = {("softmax", ""): 2, **{("ra", str(samples)): samples + 2 for samples in (1, 4, 16)}}  # of N^2 C
    assert macs == {key: 2 * (4 * 16 * 24**2 + count * 16**2 * 24) for key, count in products.items()}


def test_the_error_is_squared_bias_plus_variance(trained, inputs):
    """Randomized attention has no bias. Twice as many passes estimate the same variance, that of the samples."""
    softmax = attend_by_softmax(trained, inputs, 1.0)
    model, _ = drop_in(trained, {"name": "ra", "num_samples": 4}, 0, softmax.state)
    set_mode(model, "sampled", 0)
    (error, variance), *_ = decompose_errors(model, softmax, 256)
    assert error > 0.01
    assert abs(error - variance) < 0.02 * error
    set_mode(model, "sampled", 0)
    layer = attention_layers(model)[0]
    samples = torch.stack([attended(layer, *inputs[0]) for _ in range(16)]).double()
    set_mode(model, "sampled", 0)
    (_, variance), *_ = decompose_errors(model, softmax, 16)
    assert variance == pytest.approx((samples.var(0).mean() / softmax.expected[0].double().square().mean()).item())


def test_the_error_of_what_samples_nothing_is_bias(checkpoint, tmp_path):
    """Performer's is part bias, part variance; window attention's rows of both modes are one, without variance."""
    names = "--attention", "performer", "local", "--budgets", "4", "--temperatures", "1", "--images", "4"
    rows = ask(checkpoint, tmp_path, "error", *names, "--draws", "2", "--decompose", "8")
    found = {(row["attention"], row["mode"]): row for row in rows if row["layer"] == "0"}
    assert found.keys() == {("performer", "evaluation"), ("performer", "sampled"), ("local", "any")}
    sampled = found["performer", "sampled"]
    assert 0 < float(sampled["squared_bias"]) < float(sampled["error"])
    assert found["local", "any"]["squared_bias"] == found["local", "any"]["error"]
    assert found["performer", "evaluation"]["squared_bias"] == ""


@pytest.mark.complete
def test_outputs_of_aligned_layers_are_decomposed(checkpoint, tmp_path):
    """Alignment lowers the error of the outputs; what samples nothing keeps all of it as bias, softmax has none."""
    names = "--attention", "softmax", "performer", "linear", "--budgets", "4", "--modes", "sampled", "--images", "8"
    rows = ask(checkpoint, tmp_path, "error", *names, "--draws", "1", "--decompose", "8", "--align", "20")
    found = {(row["attention"], int(row["aligned_steps"]), int(row["layer"])): row for row in rows}
    assert len(found) == len(rows) == 12
    for layer in (0, 1):
        for name in ("performer", "linear"):
            before, after = (float(found[name, steps, layer]["error"]) for steps in (0, 20))
            assert 0 < after < before
            share = float(found[name, 20, layer]["squared_bias"]) / after
            assert share == 1 if name == "linear" else share < 1
        assert {float(found["softmax", steps, layer]["error"]) for steps in (0, 20)} == {0}


def test_alignment_with_what_is_not_softmax_is_refused(trained):
    own = dataclasses.replace(trained, run=dataclasses.replace(trained.run, attention={"name": "linear"}))
    with pytest.raises(UserError, match="own attention, which is linear; give a run of softmax"):
        error.aligner(own, read_sample(trained, 4), 2)


def test_errors_are_those_of_the_twin(trained, inputs):
    """Errors equal those of softmax written out, on inputs of the second layer; zeros have the error 1.

    The root of the temperature is a power of two, so that only the scale of the logits is compared, without rounding.
    """
    softmax = attend_by_softmax(trained, inputs, 0.25)
    q, k, v = attention_layers(trained.model)[1].project(*inputs[1])
    weights = (4 * q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    torch.testing.assert_close(softmax.expected[1], weights @ v)
    assert softmax.entropies[1] == pytest.approx(
        -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean().item(), rel=1e-5
    )
    assert relative_error(torch.zeros(3), torch.ones(3)) == 1
    assert relative_error(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0])) == pytest.approx(0.1)


def test_accuracy_is_that_of_evenly_spaced_images(trained):
    sample, every = read_sample(trained, 40), read_sample(trained, 1000)
    assert (len(sample.images), len(every.images)) == (40, 360)
    assert torch.equal(sample.images, every.images[::9])
    assert torch.equal(sample.classes, every.classes[::9])
    columns = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    with torch.no_grad():
        right = (trained.model(sample.images).argmax(1) == 9 - sample.classes).tolist()
    reversed_classes = dataclasses.replace(sample, columns=columns)
    assert measure_own(trained, reversed_classes).score.top1 == 100 * sum(right) / 40
    assert 0 < sum(right) < 40


def test_entropy_rises_with_the_temperature(trained, inputs):
    found = [attend_by_softmax(trained, inputs, temperature).entropies[0] for temperature in (0.25, 1, 4, 1e6)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(math.log(16), abs=1e-5)


def test_a_temperature_divides_queries_and_keys_alike(trained, inputs):
    """The error of random features depends on |q + k|, so that the scale of one alone would change it."""
    softmax = attend_by_softmax(trained, inputs, 4.0)
    model, _ = drop_in(trained, {"name": "performer", "num_samples": 8}, 0, softmax.state)
    for layer, own, given in zip(*map(attention_layers, (model, trained.model)), inputs, strict=True):
        q, k, v = own.project(*given)
        torch.testing.assert_close(layer.project(*given), (q / 2, k / 2, v))


@pytest.mark.parametrize(
    "attention",
    [{"name": "performer", "num_samples": 8}, {"name": "eva", "window_size": 2, "num_landmarks": 4}],
    ids=["performer", "eva"],
)
def test_draws_are_those_of_the_seed(trained, inputs, attention):
    """Noise is fixed in evaluation mode and drawn in sampled mode, by attention and its parts alone."""

    def outputs(seed: int, mode: str) -> list[torch.Tensor]:
        model, _ = drop_in(trained, attention, seed)
        set_mode(model, mode, seed)
        layers = attention_layers(model)
        parts = {part for layer in layers for part in layer.modules() if not isinstance(part, torch.nn.Dropout)}
        drawn = parts if mode == "sampled" else set()
        assert {module for module in model.modules() if module.training} == drawn
        return [attended(layers[0], *inputs[0]) for _ in range(2)]

    kept, again, other = (outputs(seed, "evaluation") for seed in (0, 0, 1))
    fresh, fresh_again = (outputs(0, "sampled") for _ in range(2))
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], again[0])
    assert not torch.equal(kept[0], other[0])
    assert not torch.equal(fresh[0], fresh[1])
    assert torch.equal(fresh[0], fresh_again[0])


@pytest.mark.complete
def test_sampled_mode_is_without_dropout(checkpoint, inputs, tmp_path):
    """Softmax attention in the place of itself has no error, though the run drops weights and outputs in training.

    Training, as in an alignment after sampled mode, has both kinds of dropout again.
    """
    own = "{name: softmax, attn_drop: 0.2}"
    dropping = load_model(checkpoint, "model.proj_drop_rate=0.3", f"attention={own}")
    model, _ = drop_in(dropping, dropping.run.attention, 0)
    pairs = list(zip(attention_layers(model), attention_layers(dropping.model), strict=True))
    for compute in attended, outputs:
        set_mode(model, "sampled", 0)
        expected = [compute(kept, *given) for (_, kept), given in zip(pairs, inputs, strict=True)]
        assert layer_errors(model, inputs, expected, compute) == [0, 0]
        set_mode(model, "evaluation", 0)
        assert all(is_same_attention(*pair) for pair in pairs)
    set_mode(model, "sampled", 0)
    assert all(layer.attn_drop == 0 and not layer.proj_drop.training for layer, _ in pairs)
    model.train()
    assert all(is_same_attention(*pair) for pair in pairs)
    assert all(layer.attn_drop == 0.2 and layer.proj_drop.training for layer, _ in pairs)
    options = "--attention", own, "performer", "--images", "24", "--draws", "1", "--modes", "sampled", "--align", "1"
    overrides = "--budgets", "4", "model.proj_drop_rate=0.3", f"attention={own}"
    rows = ask(checkpoint, tmp_path, "error", *options, *overrides)
    assert {float(row["error"]) for row in rows if row["attention"] == own} == {0}


def bars(axes) -> list[tuple]:
    """Returns the points of each errorbar of a panel, and the ends of its bars."""
    found = []
    for container in axes.containers:
        points, _, (lines,) = container.lines
        found.append((points.get_xydata().tolist(), [segment[:, 1].tolist() for segment in lines.get_segments()]))
    return found


def test_figures_of_error_show_the_rows():
    """Errors above the largest are drawn at the largest, without a bar."""
    row = partial(Row, "lara", "", entropies=(1.0, 2.0), macs=3 * 10**6)
    rows = [
        row(budget=4, temperature=1.0, mode="evaluation", errors=[[0.1, 0.3], [0.3, 0.5]]),
        row(budget=16, temperature=1.0, mode="evaluation", errors=[[20.0, 30.0], [40.0, 50.0]]),
        row(budget=16, temperature=4.0, mode="sampled", errors=[[0.25, 0.75]]),
    ]
    shown = {name: bars(draw("", rows, name, [4, 16], 10**6).axes[0]) for name in AXES}
    low, high = 0.3 - 0.1 * 2**0.5, 0.3 + 0.1 * 2**0.5
    assert shown["macs"] == [([[3, pytest.approx(0.3)], [3, 10]], [pytest.approx([low, high]), [10, 10]])]
    assert shown["entropy"] == [([[1.5, 10]], [[10, 10]]), ([[1.5, 0.5]], [[0.5, 0.5]])]


def test_a_run_without_queries_is_refused(trained, inputs):
    model, _ = drop_in(trained, {"name": "synthesizer"}, 0)
    with pytest.raises(OptionError, match="needs 3 projections of tokens, but synthesizer of the run makes 1"):
        attend_by_softmax(dataclasses.replace(trained, model=model), inputs, 1.0)


def test_errors_of_a_pyramid_are_means_over_the_layers_of_the_mechanism(tmp_path):
    """Its last stage keeps softmax, without an error; as in `replace`, it is not among the layers of the mean."""
    run = load_run(ROOT / "configs/quickstart_pvt.yaml", ["attention=linear", "train.device=cpu"])
    torch.manual_seed(0)
    model = create_model(attention=run.attention, **run.model).eval()
    trained = Trained(tmp_path, run, source_of(run, model.state_dict()), model, None, torch.device("cpu"))
    softmax = attend_by_softmax(trained, layer_inputs(trained, torch.randn(2, 3, 64, 64)), 1.0)
    args = argparse.Namespace(draws=1, modes=["sampled"], decompose=3, align=None)
    found = {}
    for attention in {"name": "performer", "num_samples": 8}, {"name": "softmax"}:
        (found[attention["name"]],) = measure(trained, softmax, "", attention, [8], args)
    row = found["performer"]
    errors, variances = row.errors[0], row.variances[0]
    assert min(errors[:3]) > 0 == errors[3]
    assert row.spread().mean == pytest.approx(sum(errors[:3]) / 3)
    assert row.spread_of_squared_bias().mean == pytest.approx((sum(errors[:3]) - sum(variances[:3])) / 3)
    assert row.spread(3).mean == 0
    assert row.entropy == pytest.approx(sum(softmax.entropies[:3]) / 3)
    assert all(list(row.layers) == [0, 1, 2] for row in found.values())
    assert found["softmax"].entropy == row.entropy
    assert error.readable(row)["entropy (nats)"] == f"{row.entropy:.2f}"
    for name in found:
        assert list(replace.assignment(trained, {}, {"name": name})[1]) == [0, 1, 2]


PERFORMER = "{name: performer, num_samples: 4}"


@pytest.mark.parametrize(
    ("config", "own", "changed"),
    [
        ("quickstart_pvt", f"[linear, linear, linear, {PERFORMER}]", [0, 1, 2]),
        ("quickstart_pvt", f"[linear, {PERFORMER}, linear, linear]", [0, 2]),
        ("quickstart", f"[{{blocks: 0-1, name: linear}}, {{blocks: 2, {PERFORMER[1:]}]", [0, 1]),
        ("quickstart", "[{blocks: 0-1, name: linear}, {blocks: 2, name: performer, num_samples: 3}]", [0, 1, 2]),
    ],
)
def test_errors_are_means_over_the_layers_that_change(tmp_path, config, own, changed):
    """Layers that have the mechanism already, and those of a pyramid's last stage, are not among them."""
    trained = load_model(save_model(tmp_path, [f"attention={own}"], scale=10, config=config))
    attention, layers = replace.assignment(trained, {}, yaml.safe_load(PERFORMER))
    laboratory = Laboratory(trained, read_sample(trained, 4), tmp_path, None)
    stage = laboratory.measure("performer", attention, layers, 0).replaced
    errors = layer_errors(drop_in(trained, attention, 0)[0], laboratory.own.inputs, laboratory.own.outputs, outputs)
    assert [n for n, each in enumerate(errors) if each] == changed
    assert stage.outputs == pytest.approx(sum(errors) / len(changed))


@pytest.mark.parametrize("question", ["error", "replace"])
def test_a_table_of_problems_alone_is_written(checkpoint, tmp_path, question):
    sizes = ["--budgets", "49"] if question == "error" else []
    rows = ask(checkpoint, tmp_path, question, "--images", "4", "--draws", "1", "--attention", "lara", *sizes)
    assert rows
    assert all(row["problem"].startswith("attention(lara).num_landmarks = ") for row in rows)


def test_a_size_that_exceeds_the_memory_is_a_row_with_the_reason(checkpoint, tmp_path):
    options = "--budgets", f"{10**9}", "--temperatures", "1", "--images", "4", "--draws", "1"
    rows = ask(checkpoint, tmp_path, "error", *options, "--attention", "performer", "softmax")
    assert {row["problem"] for row in rows if row["attention"] == "performer"} == {"exceeds the memory"}
    assert {row["problem"] for row in rows if row["attention"] == "softmax"} == {""}


def test_a_budget_that_layers_of_several_grids_need_different_values_for_is_refused():
    assert with_budget({"name": "linformer"}, 16, {64, 256}) == {"name": "linformer", "num_landmarks": 16}
    with pytest.raises(OptionError, match="--budgets 16: layers of 64 and 256 tokens need different values"):
        with_budget({"name": "sra"}, 16, {256, 64})


def test_every_mechanism_has_options_and_at_most_one_size():
    known = read_mechanisms(None)
    assert set(known) == set(ATTENTION)
    sized = {name: size_option(attention) for name, attention in known.items()}
    assert {name for name, size in sized.items() if size is None} == set(stated("UNSIZED"))
    assert set(filter(None, sized.values())) == set(SIZES)
    for name, attention in known.items():
        if sized[name]:
            options = with_budget(attention, 49, {196})
            assert options[sized[name]] == {"radius": 24, "reduction": 2}.get(
                sized[name], 7 if sized[name] in ("window_size", "pool_size", "kernel_size") else 49
            )


@pytest.mark.complete
def test_chosen_blocks_are_replaced(checkpoint, tmp_path, monkeypatch, capsys):
    """All blocks are what none named are; the errors are those of the blocks that are replaced."""
    local, eva = "{name: local, window_size: 2, position_bias: none}", "{name: eva, window_size: 2, num_landmarks: 4}"
    options = ["--images", "60", "--draws", "1", "--attention", "softmax", local, eva]
    whole, first, last, every = (
        ask(checkpoint, tmp_path, "replace", *options, *blocks)
        for blocks in ([], ["--blocks", "0"], ["--blocks", "1"], ["--blocks", "0-1"])
    )
    assert every == whole
    assert [float(rows[0]["change"]) for rows in (first, last)] == [0, 0]
    errors = [float(rows[1]["error"]) for rows in (first, last, whole)]
    assert 0 < errors[0] != errors[1] > 0
    assert errors[2] == pytest.approx((errors[0] + errors[1]) / 2)
    assert 2 * int(first[2]["untrained_parameters"]) == int(whole[2]["untrained_parameters"]) > 0
    assert "others, in blocks 0 without training" in capsys.readouterr().out
    plans = follow_plans(monkeypatch)
    ask(checkpoint, tmp_path / "out", "replace", *options, "--blocks", "1", "--finetune", "1")
    _, settings, _ = read_ablation(plans[0], [], tmp_path, ["python"])
    found = [[(entry["blocks"], entry["name"]) for entry in setting.cases[0].run.attention] for setting in settings]
    assert found == [[("0", "softmax"), ("1", name)] for name in ("softmax", "local", "eva")]


@pytest.mark.complete
@pytest.mark.parametrize("is_export", [False, True], ids=["checkpoint", "export"])
def test_what_is_replaced_is_trained_on_by_an_ablation(is_export, checkpoint, tmp_path, monkeypatch):
    """The ablation holds the model's own attention, and the mechanisms that fit the grid, from the same weights."""
    if is_export:
        export = tmp_path / "model.safetensors"
        export.write_bytes(to_safetensors(load_checkpoint(checkpoint), "plain"))
        checkpoint = export
    plans, names = follow_plans(monkeypatch), ["lara", "{name: eva, window_size: 2, num_landmarks: 4}"]
    options = "--finetune", "1", "data.crop_pct=0.9", "train.device=cpu"
    ask(checkpoint, tmp_path / "out", "replace", "--images", "4", "--draws", "2", "--attention", *names, *options)
    _, settings, _ = read_ablation(plans[0], [], tmp_path, ["python"])
    runs = [case.run for setting in settings for case in setting.cases]
    assert [(run.attention["name"], run.train.seed) for run in runs] == [
        ("softmax", 0),
        ("eva", 0),
        ("softmax", 1),
        ("eva", 1),
    ]
    assert {run.attention.get("num_landmarks") for run in runs} == {None, 4}
    assert {(run.init.weights, run.schedule.epochs) for run in runs} == {(str(checkpoint), 1)}
    assert {(run.data.crop_pct, run.train.device) for run in runs} == {(0.9, "cpu")}


@pytest.mark.parametrize(("own", "first"), [([], [90.0, 80.0, 90.0, 91.0]), (["softmax"], [80.0, 90.0, 90.0, 80.0])])
def test_results_of_training_are_paired_by_seed(own, first, checkpoint, tmp_path, monkeypatch, capsys):
    """Differences are to the model's own attention, in the list or not; the digits have 360 validation images."""
    plans = follow_plans(monkeypatch, [*first, 91.0 if own else 80.0, 92.0])
    options = "--images", "4", "--draws", "2", "--attention", "linear", *own, "mean", "--finetune", "1"
    softmax, linear, _ = ask(checkpoint, tmp_path, "replace", *options)
    out = " ".join(capsys.readouterr().out.split())
    assert "4 images; others without training, then fine-tuned for 1 epoch (tuned: top-1 of all 360 validation" in out
    assert "| -10.50 ± 0.71 (noise) |" in out  # t is 21: more than 12.7, less than the 25.5 of two comparisons
    assert (softmax["attention"], float(softmax["tuned_top1"]), softmax["tuned_difference"]) == ("softmax", 90.5, "")
    assert (float(linear["tuned_top1"]), float(linear["tuned_difference"])) == (80.0, -10.5)
    assert float(linear["tuned_difference_std"]) == pytest.approx(0.5**0.5)
    assert float(linear["tuned_minutes"]) == 1.5
    found = [(row["attention"], row["seed"], row["tuned_top1"]) for row in read_rows(tmp_path / "replace_draws.csv")]
    assert found[:3] == [("softmax", "0", "90.0"), ("softmax", "1", "91.0"), ("linear", "0", "80.0")]
    assert found[3:] == [("linear", "1", "80.0"), ("mean", "0", "90.0"), ("mean", "1", "92.0")]
    assert len(read_yaml(plans[0]).values["runs"]) == 3 * 2


@pytest.mark.complete
def test_a_model_that_was_trained_on_has_a_certificate(checkpoint, trained, tmp_path, capsys):
    options = "--images", "60", "--draws", "1", "--attention", "linear", "--finetune", "1"
    _, linear = ask(checkpoint, tmp_path, "replace", *options, "data.subset=20", "optim.lr=0.02")
    sample = read_sample(trained, 60)
    [run] = [path.parent for path in tmp_path.glob("finetune/*linear*/metrics.jsonl")]
    own, tuned = (part.model(sample.images).argmax(1) for part in (trained, load_model(run)))
    assert int(linear["tuned_changed"]) == (own != tuned).sum() > 0
    assert f"linear, tuned: {Certificate(60, int(linear['tuned_changed']))}" in capsys.readouterr().out


def test_training_on_does_not_inherit_strictness_or_frozen_weights(trained):
    """They belong to the run's own mechanism, as its teacher does; the command line may ask for them again."""
    run = dataclasses.replace(
        trained.run,
        distill=Distill(teacher=str(trained.path), type="attention", alpha=1.0),
        init=dataclasses.replace(trained.run.init, strict=True),
        train=dataclasses.replace(trained.run.train, freeze="backbone"),
    )
    base = partial(tune.configure, dataclasses.replace(trained, run=run), 1)
    assert (base([])["init"]["strict"], base([])["train"]["freeze"]) == (False, None)
    assert base([])["distill"]["teacher"] is None
    assert base([f"distill.teacher={trained.path}", "distill.type=hard"])["distill"]["type"] == "hard"
    again = base(["train.freeze=pos_embed", "init.strict=true"])
    assert (again["init"]["strict"], again["train"]["freeze"]) == (True, "pos_embed")
    assert again["init"]["weights"] == str(trained.path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--attention evaa", "did you mean 'eva'"),
        (["--attention", "{name: eva, window: 7}"], "--attention(eva).window: unknown option"),
        ("--finetune 1 data.train_split=val", "data.train_split = 'val': models would be fitted to the images"),
        ("--finetune 1 data.train_split=absent", "data.train_split: 'absent' is no split of the digits"),
        ("modle.depth=3", "modle: unknown option; did you mean 'model'"),
        ("--output /proc/absent", "--output /proc/absent: cannot be made"),
        ("--output /proc", "cannot be written"),
        ("--blocks 0-2", "--blocks = '0-2': there is no block 2; there are 0 to 1"),
        ("--blocks first", "--blocks = 'first': expected a number, a range as 0-8"),
        ("--stage 0", "--stage = 0: this model has no stages; leave it out"),
        ("error --decompose 8 --modes evaluation", "--decompose 8: there is no variance over them; leave --modes out"),
        ("error --align 2 --temperatures 2", "--align fits to the run's own attention, which has temperature 1; leave"),
        (
            "--align 2 --attention linear data.train_split=absent",
            "is no split of the digits; known: train, val; --align",
        ),
        ("--align 2 --images 340 data.train_split=val", "data.train_split = 'val' leaves 20 images for --align"),
    ],
)
def test_refusals(checkpoint, tmp_path, capsys, arguments, expected):
    words = arguments.split() if isinstance(arguments, str) else arguments
    question, *words = words if words[0] == "error" else ["replace", *words]
    output = [] if "--output" in words else ["--output", str(tmp_path)]
    assert expected in refusal(capsys, question, str(checkpoint), *output, *words)
    assert not (tmp_path / "aligned").exists()


def test_a_lack_of_memory_is_one_line(monkeypatch, capsys):
    def main(args):
        raise MemoryError

    monkeypatch.setattr(replace, "main", main)
    problem = "error: out of memory; give smaller numbers, or a smaller model\n"
    assert refusal(capsys, "replace", "runs/eva") == problem
