"""Alignment: the loss against its formula, what is fitted and trained, and the teachers that are taken and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from timm.models._hub import save_for_hf
from torch import Tensor, nn

import train
from engine.checkpoints.initial_weights import create_initial_model
from engine.config.schema import Run
from engine.data.splits import open_split
from engine.objectives.alignment import Alignment
from engine.run.load import load_run
from engine.runtime.distributed import World, autocast
from engine.runtime.errors import ConfigError, UserError
from engine.training.compilation import compiled_blocks
from engine.training.objective import create_objective
from models import create_model
from models.base import attention_layers
from tests.engine.test_distill import build, leave
from tests.support.launcher import ROOT

WORLD = World(torch.device("cpu"))
MODEL = ("img_size=24", "patch_size=4", "embed_dim=12", "depth=3", "num_heads=2", "stem=linear")
SOFTMAX, LARA = "attention={name: softmax}", "attention={name: lara, num_landmarks: 4}"
HYBRID = "attention=[{name: softmax, blocks: 0}, {name: eva, window_size: 3, num_landmarks: 4, blocks: 1-2}]"


def run_of(*overrides: str) -> Run:
    return load_run(ROOT / "configs/quickstart.yaml", [*(f"model.{option}" for option in MODEL), *overrides])


def leave_teacher(directory: Path, *overrides: str) -> nn.Module:
    """Leaves a checkpoint of a run with softmax attention in `directory`, and returns its model."""
    return leave(directory, run_of(SOFTMAX, *overrides))


def aligned_to(teacher: Path | str) -> list[str]:
    return [f"init.weights={teacher}", "distill.teacher=init.weights", "distill.type=attention"]


def aligned(teacher: Path | str, *overrides: str) -> Run:
    return run_of(*aligned_to(teacher), *overrides)


def objective_of(run: Run, model: nn.Module) -> Alignment:
    objective = create_objective(run, model, open_split(run.data, "train_split"), WORLD)
    assert isinstance(objective, Alignment)
    return objective


def on_paper(teacher: nn.Module, student: nn.Module, images: Tensor, layers: list[int]) -> list[Tensor]:
    """Errors of the student's layers, block by block of the teacher: means over images."""
    x, grid = teacher.embed(images)
    errors = []
    for number, (block, own) in enumerate(zip(teacher.blocks, student.blocks, strict=True)):
        tokens = block.norm1(x)
        expected = block.attn(tokens, grid)
        if number in layers:
            y = own.attn(tokens.detach(), grid)
            squares = [(x.detach() ** 2).sum() for x in expected]
            triples = zip(y, expected, squares, strict=True)
            errors.append(sum((a - b.detach()).square().sum() / c for a, b, c in triples) / len(y))
        x = x + expected
        x = x + block.mlp(block.norm2(x), grid, None)
    return errors


@pytest.mark.parametrize(("attention", "layers"), [(LARA, [0, 1, 2]), (HYBRID, [1, 2])])
def test_loss_and_gradients_are_those_of_the_formula(attention: str, layers: list[int], tmp_path: Path):
    """In float64. Layers that are the teacher's own are not fitted, and nothing else is trained."""
    teacher = leave_teacher(tmp_path).double()
    run = aligned(tmp_path, attention)
    model, twin = (build(run, seed=1).eval() for _ in range(2))
    objective = objective_of(run, model)
    for module in (model, twin, objective.teacher):
        module.double()
    images = torch.randn(3, 3, 24, 24, dtype=torch.float64)
    loss = objective(objective.wrap(model), images, torch.tensor([1, 0, 7]))
    expected = on_paper(teacher, twin, images, layers)
    assert loss.item() == pytest.approx(sum(expected).item() / len(layers), rel=1e-12)
    assert {name: value.item() for name, value in objective.values.items()} == {
        f"error_{number}": pytest.approx(error.item()) for number, error in zip(layers, expected, strict=True)
    }
    loss.backward()
    (sum(expected) / len(layers)).backward()
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert {name.split(".attn.")[0] for name in trained} == {f"blocks.{number}" for number in layers}
    for name, weight in model.named_parameters():
        gradient = twin.get_parameter(name).grad
        assert (weight.grad is None) == (gradient is None) == (name not in trained), name
        if gradient is not None:
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-8, atol=1e-12, msg=name)
    assert all(weight.grad is None for weight in objective.teacher.parameters())


@pytest.mark.parametrize("tokens", [(), ("model.class_token=true", "model.dist_token=true")], ids=len)
def test_the_rest_of_the_loss_is_of_labels(tokens: tuple[str, ...], tmp_path: Path):
    """Predictions of two heads are their mean in training, too. Linear attention draws no random numbers."""
    leave_teacher(tmp_path, *tokens)
    run = aligned(tmp_path, "attention={name: linear}", "distill.alpha=0.25", *tokens)
    model = build(run, seed=1)
    objective = objective_of(run, model)
    images, targets = torch.randn(3, 3, 24, 24), torch.tensor([1, 0, 7])
    found = objective(objective.wrap(model), images, targets)
    logits, error = model(images), sum(objective.values.values()) / 3
    torch.testing.assert_close(found, 0.25 * error + 0.75 * nn.functional.cross_entropy(logits, targets))
    found.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_the_teacher_sees_every_batch_once_without_gradients(tmp_path: Path):
    leave_teacher(tmp_path)
    run = aligned(tmp_path, LARA)
    model = build(run)
    objective, calls = objective_of(run, model), []
    objective.teacher.model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    with autocast("bf16", WORLD.device):
        loss = objective(objective.wrap(model), torch.randn(2, 3, 24, 24), None)
    assert calls == [False]
    assert loss.dtype == torch.float32
    assert loss.requires_grad


@pytest.mark.complete
def test_the_blocks_of_the_teacher_are_compiled(tmp_path: Path):
    """With the hooks in it, one graph serves all blocks."""
    leave_teacher(tmp_path)
    run = aligned(tmp_path, LARA)
    model = build(run).eval()
    objective, images = objective_of(run, model), torch.randn(4, 3, 24, 24)
    expected = objective(objective.wrap(model), images, None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    of_four = replace(run, train=replace(run.train, total_batch_size=4, compile=True))
    with compiled_blocks([model, *objective.compiled], of_four, WORLD, backend="aot_eager"):
        torch.testing.assert_close(objective(objective.wrap(model), images, None), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["deit", "pvtv2_b0"])
def test_weights_alone_are_those_of_the_published_attention(name: str, tmp_path: Path, capsys):
    """A file of a training script is a teacher: the run's own model with softmax attention, or with SRA."""
    pyramid = name == "pvtv2_b0"
    options = ["model={name: pvtv2_b0, img_size: 64, num_classes: 10}"] if pyramid else [f"model.{o}" for o in MODEL]
    weights = aligned_to(tmp_path / "weights.pth")
    run = load_run(ROOT / "configs/quickstart.yaml", [*options, "attention={name: linear}", *weights])
    stock = create_model(attention="sra" if pyramid else "softmax", **run.model).eval()
    torch.save({"model": stock.state_dict()}, tmp_path / "weights.pth")
    model = build(run)
    objective = objective_of(run, model)
    images = torch.randn(2, 3, *[run.model["img_size"]] * 2)
    assert torch.equal(objective.teacher(images), stock(images))
    count = len(attention_layers(stock))
    assert objective.fitted.layers == [*range(count - 2 if pyramid else count)]  # of the last stage both are softmax
    trained, printed = [x.numel() for x in model.parameters() if x.requires_grad], capsys.readouterr().out
    note = "its normalisation is not known, and is taken for the run's"
    assert f"attention, alpha 1; {note}\ndistill.type=attention fits layers 0, 1, 2" in printed
    assert f": {len(trained)} parameters ({sum(trained):,} numbers) are trained, " in printed


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "pvt_v2_b0"])
def test_models_of_timms_hub_are_teachers(name: str, tmp_path: Path, capsys):
    """From a folder, as timm writes it; images are normalised as the model has them there."""
    if name == "pvt_v2_b0":
        sizes = {"embed_dims": [8, 16, 20, 32], "depths": [1, 2, 1, 1]}
        own = {"name": "pvtv2_b0", "img_size": 64, "num_classes": 10, **sizes}
    else:
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
        own = {"name": "deit", "class_token": True, "stem": "linear", "num_classes": 10, **sizes}
    stock = timm.create_model(name, **sizes, num_classes=1000).eval()
    save_for_hf(stock, tmp_path / "hub", model_args=sizes)
    options = [f"model={own}", "attention={name: linear}"]
    weights = f"timm:local-dir:{tmp_path / 'hub'}"
    run = load_run(ROOT / "configs/quickstart.yaml", [*options, *aligned_to(weights)])
    model = create_initial_model(run, tmp_path / "run", WORLD)
    objective = objective_of(run, model)
    images = torch.rand(2, 3, run.model["img_size"], run.model["img_size"])
    given = (images - 0.5) / 0.5  # the quickstart has 0.5 for both
    (mean, std) = (torch.tensor(stock.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    torch.testing.assert_close(objective.teacher(given), stock((images - mean) / std), rtol=1e-4, atol=1e-5)
    objective(objective.wrap(model), given, None).backward()
    fitted = {
        weight for layer in attention_layers(model)[: 4 if "depths" in sizes else 2] for weight in layer.parameters()
    }
    assert {weight for weight in model.parameters() if weight.grad is not None} == fitted
    assert f"distill.teacher={weights}: attention, alpha 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        ([], [SOFTMAX], "distill.teacher = init.weights: every attention layer is its own, and none is left to fit"),
        (["model.depth=2"], [LARA], "it has 2 attention layers, the model has 3; set the options of model"),
        (["model.patch_size=6"], [LARA], "its attention layer 0 gets 16 x 12 tokens of a 4 x 4 grid, the model's 36"),
        (["model.embed_dim=16"], [LARA], "its attention layer 0 gets 36 x 16 tokens of a 6 x 6 grid, the model's 36"),
        (["model.class_token=true"], [LARA], "its attention layer 0 gets 37 x 12 tokens of a 6 x 6 grid, the model"),
    ],
)
def test_teachers_with_other_layers_are_refused(there: list[str], here: list[str], says: str, tmp_path: Path):
    leave_teacher(tmp_path, *there)
    run = aligned(tmp_path, *here)
    model = build(run)
    with pytest.raises((UserError, ValueError)) as caught:
        objective_of(run, model)
    assert says in str(caught.value)


def test_frozen_layers_cannot_be_fitted(tmp_path: Path):
    leave_teacher(tmp_path)
    run = aligned(tmp_path, LARA)
    model = build(run)
    for layer in attention_layers(model):
        layer.requires_grad_(False)
    with pytest.raises(ValueError, match=r"train\.freeze: freezes every attention layer"):
        objective_of(run, model)


def test_weights_of_another_model_are_refused(tmp_path: Path):
    """With a class token that the model here lacks, the teacher would be another function."""
    torch.save(build(run_of(SOFTMAX, "model.class_token=true")).state_dict(), tmp_path / "weights.pth")
    run = aligned(tmp_path / "weights.pth", LARA)
    with pytest.raises(UserError, match=r"not the weights of deit as it is here: .*set the options of model to those"):
        objective_of(run, build(run))


@pytest.mark.parametrize(
    ("distill", "weights", "says"),
    [
        (
            "type: attention, teacher: x",
            None,
            "init.weights = null, and distill.type=attention trains no other weights",
        ),
        ("type: hard, teacher: init.weights", None, "distill.teacher = init.weights, which is null; give init.weights"),
        ("type: attention, teacher: x, tau: 2", "x", "distill.tau = 2 acts on soft predictions"),
    ],
)
def test_options_that_contradict_are_refused(distill: str, weights: str | None, says: str):
    with pytest.raises(ConfigError) as caught:
        run_of(LARA, f"distill={{{distill}}}", *([f"init.weights={weights}"] if weights else []))
    assert says in str(caught.value)


@pytest.mark.complete
def test_a_run_lowers_the_error_of_every_layer_and_logs_it(tmp_path: Path, capsys):
    """All weights but those of the fitted layers stay as they were."""
    model = leave_teacher(tmp_path / "teacher")
    options = [f"model.{option}" for option in MODEL] + [HYBRID, "data.workers=0", "train.log_every=10"]
    options += [*aligned_to(tmp_path / "teacher"), "schedule.epochs=1", "schedule.warmup_epochs=0", "optim.lr=0.01"]
    train.main([str(ROOT / "configs/quickstart.yaml"), *options, "--output", str(tmp_path / "run")])
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    errors = [[record[f"error_{number}"] for number in (1, 2)] for record in records if record["kind"] == "train"]
    assert all(last < 0.7 * first for first, last in zip(errors[0], errors[-1], strict=True))
    assert "error_0" not in records[1]
    assert "train_error_1" in (tmp_path / "run/epochs.csv").read_text()
    charts = b"".join(path.read_bytes() for path in (tmp_path / "run").glob("events.out.*"))
    assert b"train/error_2" in charts
    after = torch.load(max((tmp_path / "run").glob("step_*.pt")))["model"]
    for name, x in model.state_dict().items():
        assert torch.equal(after[name], x) == (".attn." not in name or "blocks.0" in name), name
    assert "distill.type=attention fits layers 1, 2: " in capsys.readouterr().out
