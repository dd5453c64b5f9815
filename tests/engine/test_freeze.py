"""Frozen weights: their choice, their constant values and statistics, and runs that resume with them."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from engine.checkpoints.files import newest_checkpoint
from engine.checkpoints.initial_weights import create_initial_model
from engine.checkpoints.progress import Progress
from engine.config.micro_batches import describe_batch_norm
from engine.config.schema import Run, Train
from engine.run.load import load_run
from engine.runtime.distributed import World, seed_everything
from engine.runtime.errors import ConfigError
from engine.training.optim import create_optimizer
from engine.training.resume import Checkpoints, Resumed
from models import create_model
from models.freeze import describe_freeze, freeze, set_train_mode
from tests.engine.test_resume import Runs
from tests.engine.test_train import start
from tests.support.launcher import ROOT, ForkServer

WORLD = World(torch.device("cpu"))
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 10}
STEM = [f"patch_embed.proj.{i}.{kind}" for i in (1, 4) for kind in ("running_mean", "running_var")]
"""Running statistics of the BatchNorm layers of the stem."""

LAST = ("norm", "head")


def deit(**options) -> torch.nn.Module:
    return create_model("deit", attention="softmax", **{**SMALL, "stem": "conv", **options})


def run_of(*overrides: str) -> Run:
    small = [f"model.{key}={value}" for key, value in SMALL.items()]
    return load_run(ROOT / "configs/quickstart.yaml", [*small, "attention={name: softmax}", *overrides])


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        ("backbone", {"head"}),
        (("backbone",), {"head"}),
        ("blocks", {"pos_embed", "cls_token", "patch_embed", *LAST}),
        (("pos_embed", "cls_token", "blocks.[01].attn", "blocks.*.mlp.fc?.bias"), {"patch_embed", "blocks", *LAST}),
        (("*.weight", "*.bias"), {"pos_embed", "cls_token"}),
        (None, {"pos_embed", "cls_token", "patch_embed", "blocks", *LAST}),
    ],
)
def test_patterns_are_of_parameters_or_modules(patterns, trained):
    model = deit(class_token=True)
    frozen = freeze(model, patterns)
    left = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert {name.split(".")[0] for name in left} == trained
    assert sorted(frozen + left) == sorted(name for name, _ in model.named_parameters())
    if patterns and "blocks.[01].attn" in patterns:
        assert {name.split(".", 2)[2] for name in left if name.startswith("blocks.")} == {
            *(f"norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")),
            *(f"mlp.fc{i}.weight" for i in (1, 2)),
        }


def test_what_is_trained_is_counted():
    model = create_model("pvtv2_b0", attention="local", embed_dims=(8, 16, 20, 32), depths=(1, 1, 1, 1), num_classes=7)
    frozen = freeze(model, "backbone")
    size = sum(weight.numel() for weight in model.parameters()) - 7 * 33
    expected = f"2 parameters (231 numbers) are trained, {len(frozen)} ({size:,}) are frozen"
    assert describe_freeze(model, frozen) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("bakbone", "train.freeze = 'bakbone' matches no parameter; did you mean 'backbone'?"),
        ("[blocks.0, blocks.12]", "train.freeze = 'blocks.12' matches no parameter; did you mean 'blocks.1'?"),
        ("head.wieght", "train.freeze = 'head.wieght' matches no parameter; did you mean 'head.weight'?"),
        ("zzz", "matches no parameter; known: backbone, blocks, head, norm, patch_embed, pos_embed"),
        ("[backbone, head]", "train.freeze = backbone, head freezes every parameter; leave some to be trained"),
        ("[1]", "train.freeze[0]: expected str, got 1"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused_before_any_work(value: str, says: str):
    with pytest.raises(ConfigError, match="freezes every parameter"):
        run_of("model.num_classes=0", "train.freeze=backbone")  # there is no classifier to train
    with pytest.raises(ConfigError) as caught:
        run_of(f"train.freeze={value}")
    assert says in str(caught.value)
    assert str(caught.value).startswith("override 'train.freeze=")


def test_a_list_of_patterns_with_brackets_is_quoted():
    assert run_of('train.freeze=[pos_embed, "blocks.[0-1]"]').train.freeze == ("pos_embed", "blocks.[0-1]")
    assert run_of("train.freeze=blocks.[0-1]").train.freeze == "blocks.[0-1]"


@pytest.mark.parametrize("overrides", [(), ("optim.layer_decay=0.7",), ("optim.weight_decay=0",)], ids=" ".join)
def test_an_optimizer_has_only_what_is_trained(overrides):
    run, model = run_of(*overrides), deit()
    frozen = set(freeze(model, ("patch_embed", "blocks.0")))
    optimizer = create_optimizer(model, run.optim, 16)
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    assert {name for name, weight in model.named_parameters() if id(weight) not in held} == frozen


@pytest.mark.parametrize(("patterns", "moves"), [("patch_embed", False), ("patch_embed.proj.0", True)])
def test_statistics_of_frozen_layers_do_not_move(patterns: str, moves: bool):
    """A BatchNorm layer with trained weights updates its statistics."""
    model = deit()
    freeze(model, patterns)
    model.eval()
    set_train_mode(model)
    assert model.training
    assert model.blocks[0].training
    before = {name: model.get_buffer(name).clone() for name in STEM}
    model(torch.randn(4, 3, 16, 16) + 1).sum().backward()
    assert all(torch.equal(model.get_buffer(name), before[name]) is not moves for name in STEM)
    assert (model.patch_embed.proj[1].weight.grad is not None) is moves


@pytest.mark.parametrize(
    ("options", "ranks", "passes", "images"),
    [
        ({}, 1, 1, None),  # the total batch, 24
        ({}, 2, 3, 4),
        ({}, 1, 3, 8),
        ({"stem": "linear"}, 2, 3, None),
        ({"freeze": "patch_embed"}, 2, 3, None),
    ],
)
def test_statistics_of_a_part_of_the_batch_are_said(options: dict, ranks: int, passes: int, images: int | None):
    model = deit(stem=options.get("stem", "conv"))
    freeze(model, options.get("freeze"))
    run = Run(model={}, attention="softmax", train=Train(total_batch_size=24, grad_accum_steps=passes))
    line = describe_batch_norm(model, run, ranks)
    layer = "BatchNorm (patch_embed.proj.1, patch_embed.proj.4)"
    expected = f"{layer}: statistics of the {images} images of a pass, not of train.total_batch_size = 24; another"
    assert line.startswith(expected) if images else line == ""


@pytest.mark.complete
def test_a_run_trains_the_rest(tmp_path: Path):
    """Weights and averaged weights, under every switch that looks at gradients or at layers."""
    frozen = "[patch_embed, blocks.0, pos_embed]"
    switches = ("train.ema_decay=0.5", "train.grad_checkpointing=true", "optim.layer_decay=0.7")
    last = start(tmp_path, "model.stem=conv", f"train.freeze={frozen}", *switches)
    seed_everything(0)
    run = load_run(tmp_path / "run.yaml", ["model.stem=conv"])
    initial = create_model(attention=run.attention, **run.model).state_dict()
    for weights in (last["model"], last["model_ema"]):
        same = {name for name, value in initial.items() if torch.equal(weights[name], value)}
        assert same == {name for name in initial if name.startswith(("patch_embed.", "blocks.0.", "pos_embed"))}
    assert last["config"]["train"]["freeze"] == ["patch_embed", "blocks.0", "pos_embed"]


def test_one_line_says_what_is_trained_and_random_weights_are_warned_of(tmp_path: Path, capsys):
    torch.manual_seed(0)
    file = tmp_path / "softmax.safetensors"
    safetensors.torch.save_file(create_model("deit", **SMALL, stem="conv", init_std=0.1).state_dict(), file)
    freezing = run_of(f"init.weights={file}", "train.freeze=backbone")
    create_initial_model(freezing, tmp_path, WORLD)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("train.freeze: 2 parameters (130 numbers) are trained, ")
    assert err == ""
    eva = ("attention={name: eva, window_size: 2, num_landmarks: 4}", "train.freeze=backbone")
    model = create_initial_model(run_of(f"init.weights={file}", *eva), tmp_path, WORLD)
    assert "warning: train.freeze: 18 of the frozen parameters stay at their random initial values: " in (
        err := capsys.readouterr().err
    )
    assert "blocks.0-1.attn.position_bias.table (2)" in err
    create_initial_model(run_of(*eva), tmp_path, WORLD)
    count = len([*model.parameters()]) - 2
    assert f"warning: train.freeze: {count} of the frozen parameters stay" in capsys.readouterr().err
    Checkpoints(tmp_path, freezing, WORLD, 100).save(Progress(step=1, images=8), {"model": deit()})
    resumed = create_initial_model(freezing, tmp_path, WORLD)
    assert capsys.readouterr().err == ""
    assert [name for name, weight in resumed.named_parameters() if weight.requires_grad] == ["head.weight", "head.bias"]


def test_the_optimizers_state_is_of_the_weights_it_was_made_for(tmp_path: Path, capsys):
    """Another part with as many weights would get the state of the first."""
    model, run = deit(), run_of("train.freeze=blocks.0")
    freeze(model, "blocks.0")
    optimizer = create_optimizer(model, run.optim, 16)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight) if weight.requires_grad else None
    optimizer.step()
    Checkpoints(tmp_path, run, WORLD, 100).save(Progress(step=1, images=8), {"model": model, "optimizer": optimizer})
    for patterns in ("blocks.0", "blocks.1"):
        there, resumed = run_of(f"train.freeze={patterns}"), deit()
        freeze(resumed, patterns)
        other = create_optimizer(resumed, there.optim, 16)
        stateful = {"model": resumed, "optimizer": other}
        Resumed(Checkpoints(tmp_path, there, WORLD, 100), ["train.freeze"]).restore(stateful)
        assert bool(other.state) is (patterns == "blocks.0")
        said = "train.freeze changed: the optimiser's state of all weights starts afresh\n"
        assert capsys.readouterr().out == said * (patterns == "blocks.1")


@pytest.mark.stress
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ["train.freeze=backbone"]),
        (1, ["train.freeze=[patch_embed, blocks.0]", "optim.layer_decay=0.7", "train.grad_accum_steps=2"]),
        (2, ["train.freeze=[patch_embed, blocks.0]", "train.amp=bf16"]),
        (2, ["train.freeze=[blocks.1.attn, head]", "train.grad_checkpointing=true", "optim.opt=lamb"]),
        (3, ["train.freeze=[patch_embed]", "train.total_batch_size=24", "attention={name: softmax}"]),
    ],
    ids=str,
)
def test_a_run_of_frozen_weights_resumes_to_the_same_bits(
    ranks: int, overrides: list[str], fork_server: ForkServer, tmp_path: Path
):
    runs = Runs(fork_server, tmp_path / "runs", overrides, ranks)
    last = newest_checkpoint(tmp_path / "runs" / "run1")[1]
    for name in STEM if "head" not in overrides[0] else ():
        value = last["model"][name]
        assert torch.equal(value, torch.zeros_like(value) if name.endswith("mean") else torch.ones_like(value)), name
    for target, call in [
        ("train.seed_everything", 4),
        ("engine.training.exchange.UpdateExchange.send", 2),
        ("os.replace", 5),
    ]:
        assert -9 in runs.survives((target, call, "SIGKILL"))


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_a_compiled_run_trains_the_rest(tmp_path: Path):
    """The blocks are compiled by the default backend, as for users."""
    (tmp_path / "plain").mkdir()
    options = ("model.stem=conv", "train.freeze=[patch_embed, blocks.0]", "optim.opt=sgd")
    expected = start(tmp_path / "plain", *options)["model"]
    compiled = start(tmp_path, *options, "train.compile=true")["model"]
    for name, value in expected.items():
        frozen = name.startswith(("patch_embed.", "blocks.0."))
        torch.testing.assert_close(compiled[name], value, **({"rtol": 0, "atol": 0} if frozen else {}))
