"""Feature distillation: the loss against its formula, what is trained and saved, and the teachers that are refused."""

import json
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import train
import validate
from attention.options import OptionError
from engine.config.load import load_run
from engine.config.schema import Run
from engine.data.splits import open_split
from engine.objectives.distillation import distillation_loss
from engine.objectives.features import FeatureDistillation, cosine_error
from engine.runtime.distributed import autocast
from engine.runtime.errors import ConfigError
from engine.training.compilation import compiled_blocks
from engine.training.objective import create_objective
from models import create_model
from tests.engine.test_alignment import LARA, MODEL, SOFTMAX, WORLD, leave_teacher, run_of
from tests.engine.test_distill import build
from tests.support.launcher import ROOT

WIDE = "model.embed_dim=16"
PVT = "model={name: pvtv2_b0, img_size: 64, num_classes: 10}"


def taught(teacher: Path | str, *overrides: str) -> Run:
    return run_of(f"distill.teacher={teacher}", "distill.type=features", "init.weights=x", *overrides)


def objective_of(run: Run, model: nn.Module) -> FeatureDistillation:
    objective = create_objective(run, model, open_split(run.data, "train_split"), WORLD)
    assert isinstance(objective, FeatureDistillation)
    return objective


def features_on_paper(model: nn.Module, images: Tensor, layers: list[int]) -> list[Tensor]:
    """Outputs of the blocks `layers`, or without them the last tokens, block by block."""
    x, grid = model.embed(images)
    found = []
    for number, block in enumerate(model.blocks):
        x = x + block.attn(block.norm1(x), grid)
        x = x + block.mlp(block.norm2(x), grid, None)
        if number in layers:
            found.append(x)
    return found or [model.norm(x)]


def distance_on_paper(distance: str, y: Tensor, expected: Tensor) -> Tensor:
    if distance == "squared":
        return (((y - expected) ** 2).sum((1, 2)) / (expected**2).sum((1, 2))).sum() / len(y)
    cosines = (y * expected).sum(2) / ((y**2).sum(2) * (expected**2).sum(2)).sqrt()
    return (1 - cosines).sum() / cosines.numel()


@pytest.mark.parametrize("distance", ["squared", "cosine"])
@pytest.mark.parametrize("layers", [[], [0, 1]], ids=str)
@pytest.mark.parametrize("width", [12, 16])
def test_loss_and_gradients_are_those_of_the_formula(distance: str, layers: list[int], width: int, tmp_path: Path):
    """In float64. Only weights that the features depend on are trained, and maps where widths differ."""
    teacher = leave_teacher(tmp_path, f"model.embed_dim={width}").double()
    given = [f"distill.layers={layers[::-1]}"] if layers else []
    run = taught(tmp_path, LARA, f"distill.distance={distance}", *given)
    model, twin = (build(run, seed=1).eval() for _ in range(2))
    objective = objective_of(run, model)
    maps = objective.student.projections
    names = [*map(str, layers)] or ["last"]
    assert [*maps] == [*objective.own.get("projections", [])] == (names if width == 16 else [])
    for module in (model, twin, objective.teacher, maps):
        module.double()
    images = torch.randn(3, 3, 24, 24, dtype=torch.float64)
    loss = objective(objective.wrap(model), images, torch.tensor([1, 0, 7]))
    own, theirs = (features_on_paper(one, images, layers) for one in (twin, teacher))
    twins = {name: x.detach().clone().requires_grad_() for name, x in maps.named_parameters()}
    if maps:
        own = [x @ twins[f"{name}.weight"].mT + twins[f"{name}.bias"] for name, x in zip(names, own, strict=True)]
    errors = [distance_on_paper(distance, y, x.detach()) for y, x in zip(own, theirs, strict=True)]
    assert loss.item() == pytest.approx(sum(errors).item() / len(errors), rel=1e-12)
    assert {name: value.item() for name, value in objective.values.items()} == {
        f"error_{name}": pytest.approx(error.item()) for name, error in zip(names, errors, strict=True)
    }
    loss.backward()
    (sum(errors) / len(errors)).backward()
    untrained = ("head.", "norm.", "blocks.2.") if layers else ("head.",)
    for name, weight in model.named_parameters():
        gradient = twin.get_parameter(name).grad
        assert weight.requires_grad != name.startswith(untrained), name
        assert (weight.grad is None) == (gradient is None) == name.startswith(untrained), name
        if gradient is not None:
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-8, atol=1e-12, msg=name)
    for name, weight in maps.named_parameters():
        torch.testing.assert_close(weight.grad, twins[name].grad, rtol=1e-8, atol=1e-12, msg=name)
    assert all(weight.grad is None for weight in objective.teacher.parameters())


def test_frozen_weights_stay_frozen_and_blocks_may_be_recomputed(tmp_path: Path):
    leave_teacher(tmp_path)
    run, images = taught(tmp_path, LARA), torch.randn(2, 3, 24, 24)
    model, twin = (build(run, seed=1).eval() for _ in range(2))
    for one in (model, twin):
        one.blocks[0].requires_grad_(False)
    model.set_grad_checkpointing()
    for one in (model, twin):
        objective = objective_of(run, one)
        objective(objective.wrap(one), images, None).backward()
    for name, weight in model.named_parameters():
        assert weight.requires_grad != name.startswith(("head.", "blocks.0.")), name
        assert (weight.grad is None) != weight.requires_grad, name
        torch.testing.assert_close(weight.grad, twin.get_parameter(name).grad)


def test_cosines_ignore_lengths_and_take_half_precision():
    y = torch.randn(2, 5, 3)
    assert cosine_error(3 * y, y).item() == pytest.approx(0, abs=1e-6)
    assert cosine_error(-y, y).item() == pytest.approx(2)
    assert cosine_error(y.bfloat16(), y.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("tokens", [[], ["model.class_token=true", "model.dist_token=true"]], ids=["mean", "two heads"])
@pytest.mark.parametrize("beside", ["labels", "soft"])
@pytest.mark.parametrize("kind", ["features", "attention"])
def test_the_rest_of_the_loss_trains_every_weight(kind: str, beside: str, tokens: list[str], tmp_path: Path):
    """Also both heads of a model with a distillation token, of which predictions are the mean."""
    teacher = leave_teacher(tmp_path, *tokens)
    tau = ["distill.tau=3.0"] if beside == "soft" else []
    linear = ["attention={name: linear}", *tokens]  # which draws no random numbers in training
    run = taught(tmp_path, *linear, f"distill.type={kind}", "distill.alpha=0.25", f"distill.beside={beside}", *tau)
    model = build(run, seed=1)
    objective = create_objective(run, model, open_split(run.data, "train_split"), WORLD)
    images, targets = torch.randn(3, 3, 24, 24), torch.tensor([1, 0, 7])
    found = objective(objective.wrap(model), images, targets)
    logits, error = model(images), sum(objective.values.values()) / len(objective.values)
    soft = distillation_loss(logits, teacher(images), "soft", 3.0)
    rest = soft if tau else nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(found, 0.25 * error + 0.75 * rest)
    found.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("layers", [[], ["distill.layers=[0, 2]"]], ids=str)
def test_the_teacher_sees_every_batch_once_without_gradients(layers: list[str], tmp_path: Path):
    leave_teacher(tmp_path, WIDE)
    run = taught(tmp_path, LARA, "distill.alpha=0.5", "distill.beside=soft", *layers)
    model, calls = build(run), []
    objective = objective_of(run, model)
    objective.teacher.model.blocks[1].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    with autocast("bf16", WORLD.device):
        loss = objective(objective.wrap(model), torch.randn(2, 3, 24, 24), None)
    assert calls == [False]
    assert loss.dtype == torch.float32
    assert loss.requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_the_blocks_of_both_models_are_compiled(tmp_path: Path):
    """One graph of the student, with gradients, and one of the teacher: recorded outputs add none."""
    leave_teacher(tmp_path)
    run = taught(tmp_path, LARA, "distill.layers=[0, 2]")
    model = build(run).eval()
    objective, images = objective_of(run, model), torch.randn(4, 3, 24, 24)
    expected = objective(objective.wrap(model), images, None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with compiled_blocks([model, *objective.compiled], 4, WORLD, backend="aot_eager"):
        for _ in range(2):
            torch.testing.assert_close(objective(objective.wrap(model), images, None), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_prefix_tokens_are_compared_where_both_models_have_as_many(tmp_path: Path, capsys):
    teacher = leave_teacher(tmp_path, "model.class_token=true", "model.depth=2", SOFTMAX)
    images = torch.randn(2, 3, 24, 24)
    for tokens, skipped in ([], 1), (["model.class_token=true"], 0):
        run = taught(tmp_path, LARA, *tokens)
        model = build(run, seed=1).eval()
        found = objective_of(run, model)
        (own,), (theirs,) = (features_on_paper(one, images, []) for one in (model, teacher))
        expected = distance_on_paper("squared", own, theirs[:, skipped:])
        torch.testing.assert_close(found(found.wrap(model), images, None), expected)
        assert (", without prefix tokens" in capsys.readouterr().out) == bool(skipped)


def test_a_pyramid_learns_the_map_of_another(tmp_path: Path):
    """The formula also holds for a teacher of timm, whose features equal ours with the same weights."""
    run = load_run(ROOT / "configs/quickstart.yaml", [PVT, "attention={name: sra}"])
    torch.manual_seed(0)
    stock = create_model(attention="sra", **run.model).eval()
    torch.save({"model": stock.state_dict()}, tmp_path / "weights.pth")
    more = [f"distill.teacher={tmp_path / 'weights.pth'}", "distill.type=features", "init.weights=x"]
    run = load_run(ROOT / "configs/quickstart.yaml", [PVT, "attention={name: linear}", *more])
    model, images = create_model(attention=run.attention, **run.model).eval(), torch.randn(2, 3, 64, 64)
    objective = objective_of(run, model)
    expected = distance_on_paper("squared", *(one.forward_features(images).flatten(2).mT for one in (model, stock)))
    torch.testing.assert_close(objective(objective.wrap(model), images, None), expected)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
def test_a_model_of_timm_gives_its_last_tokens(name: str, monkeypatch):
    own = {"img_size": 64} if name.startswith("vit") else {}
    stock = timm.create_model(name, num_classes=0, **own).eval()
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: stock)
    size = ["model.img_size=64", f"model.patch_size={16 if own else 32}"]
    run = taught("timm:x", LARA, *size)
    model, images = build(run, seed=1).eval(), torch.randn(2, 3, 64, 64)
    objective = objective_of(run, model)
    theirs = stock.forward_features(objective.teacher.normalise(images))
    theirs = theirs[:, 1:] if own else theirs.flatten(2).mT
    mapped = objective.student.projections["last"](model.forward_features(images))
    torch.testing.assert_close(
        objective(objective.wrap(model), images, None), distance_on_paper("squared", mapped, theirs)
    )
    run = taught("timm:x", LARA, *size, "distill.layers=[0]")
    with pytest.raises(ValueError, match="timm:x: it has 0 blocks of this project's, the model has 3; leave distill"):
        objective_of(run, build(run))


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        (["model.patch_size=6"], [], "distill.teacher = TEACHER: it gives 16 tokens, the model 36; set model.patch"),
        (
            ["model.patch_size=6"],
            ["distill.layers=[1]"],
            "distill.teacher = TEACHER: it gives 16 tokens after block 1, the model 36; set model.patch_size",
        ),
        (
            ["model.depth=2"],
            ["distill.layers=[1]"],
            "distill.teacher = TEACHER: it has 2 blocks of this project's, the model has 3; leave distill.layers out",
        ),
        ([], ["distill.layers=[1, 3]"], "distill.layers = [1, 3]: blocks are numbered from 0 to 2"),
        ([], ["train.freeze=backbone"], "train.freeze: freezes every weight that the features depend on; leave some"),
    ],
)
def test_teachers_that_cannot_be_compared_are_refused(there: list[str], here: list[str], says: str, tmp_path: Path):
    leave_teacher(tmp_path, *there)
    run = taught(tmp_path, LARA, *here)
    model = build(run)
    for name, weight in model.named_parameters():
        weight.requires_grad_(run.train.freeze is None or name.startswith("head."))
    with pytest.raises(OptionError) as caught:
        objective_of(run, model)
    assert str(caught.value).replace(str(tmp_path), "TEACHER").startswith(says)


FEATURES = ("distill.teacher=x", "distill.type=features", "init.weights=x")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            FEATURES[:2],
            "init.weights = null, and distill.type=features with distill.alpha=1 does not train the classif",
        ),
        ([*FEATURES, "distill.layers=[]"], "distill.layers = []: name one or more blocks, each once"),
        ([*FEATURES, "distill.layers=[1, 1]"], "distill.layers = [1, 1]: name one or more blocks, each once"),
        ([*FEATURES, "model.patch_drop_rate=0.5", SOFTMAX], "model.patch_drop_rate = 0.5: the teacher gives features"),
        ([*FEATURES, "distill.beside=soft"], "distill.beside = soft acts beside distill.type=attention or features"),
        ([*FEATURES, "distill.tau=2"], "distill.tau = 2 acts on soft predictions"),
        (["distill.teacher=x", "distill.layers=[1]"], "distill.layers = [1] acts with distill.type=features; leave it"),
        (
            [*FEATURES, "distill.type=attention", "distill.distance=cosine"],
            "distill.distance = cosine acts with distill.type=features; leave it out",
        ),
    ],
)
def test_options_that_contradict_are_refused(overrides: list[str], says: str):
    with pytest.raises(ConfigError) as caught:
        run_of(LARA, *overrides)
    assert says in str(caught.value)


def launch(directory: Path, *overrides: str) -> dict:
    """Trains a run with small options and returns its last checkpoint."""
    options = [*(f"model.{option}" for option in MODEL), "data.workers=0", "train.log_every=10", "optim.lr=0.01"]
    options += ["schedule.epochs=1", "schedule.warmup_epochs=0", *overrides]
    train.main([str(ROOT / "configs/quickstart.yaml"), *options, "--output", str(directory)])
    return torch.load(max(directory.glob("step_*.pt"), key=lambda path: int(path.stem.split("_")[1])))


@pytest.mark.parametrize(("layers", "names"), [("null", ["last"]), ("[0, 1]", ["0", "1"])])
def test_a_run_lowers_the_error_and_keeps_the_classifier(layers: str, names: list[str], tmp_path: Path, capsys):
    """Nothing is saved but the model: it has the teacher's width."""
    model = leave_teacher(tmp_path / "teacher")
    teacher = [f"init.weights={tmp_path / 'teacher'}", "distill.teacher=init.weights", "distill.type=features"]
    last = launch(tmp_path / "run", LARA, *teacher, f"distill.layers={layers}", "train.ema_decay=0.9")
    assert "projections" not in last
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    errors = [[record[f"error_{name}"] for name in names] for record in records if record["kind"] == "train"]
    assert all(after < 0.7 * before for before, after in zip(errors[0], errors[-1], strict=True))
    for name, x in model.state_dict().items():
        untrained = name.startswith(("head.", "norm.", "blocks.2.") if layers != "null" else "head.")
        assert torch.equal(last["model"][name], x) == untrained or "blocks.2.attn." in name, name
    assert "the classifier is not trained: " in capsys.readouterr().out


def test_the_maps_are_trained_saved_and_no_part_of_the_model(tmp_path: Path, monkeypatch, capsys):
    """The rest of the run is that of the model: averaged weights, validation and weights for another run."""
    leave_teacher(tmp_path / "teacher", WIDE, "model.depth=2")
    teacher = [f"distill.teacher={tmp_path / 'teacher'}", "distill.type=features", "distill.alpha=0.5", LARA]
    more = ["train.ema_decay=0.9", "optim.weight_decay=0.05"]
    run, clipped, clip = tmp_path / "run", [], nn.utils.clip_grad_norm_

    def count_and_clip(weights, *norm):
        weights = [*weights]
        clipped.append(len(weights))
        return clip(weights, *norm)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", count_and_clip)
    last = launch(run, *teacher, *more, "distill.beside=soft")
    assert {*clipped} == {len([*build(run_of(LARA)).parameters()]) + 2}
    assert {name: tuple(x.shape) for name, x in last["projections"].items()} == {
        "last.weight": (16, 12),
        "last.bias": (16,),
    }
    assert last["model"].keys() == last["model_ema"].keys() == build(run_of(LARA)).state_dict().keys()
    groups = last["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0, 0.05, 0, 0.05]
    assert [len(group["params"]) for group in groups[2:]] == [1, 1]
    assert len({group["lr"] for group in groups}) == 1
    state = last["optimizer"]["state"][groups[3]["params"][0]]
    assert state["exp_avg"].shape == (16, 12)
    validate.main([str(run)])
    launch(tmp_path / "tuned", LARA, f"init.weights={run}", "init.strict=true")
    assert "loaded" in capsys.readouterr().out
