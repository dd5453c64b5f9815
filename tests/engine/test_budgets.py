"""One model for several budgets: sizes that updates draw, the sandwich rule, and what a checkpoint serves."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch._dynamo.utils import counters

import predict
import train
import validate
from attention import ATTENTION, OptionError, options_of
from engine.checkpoints.adapt import fit_weights, restore_model
from engine.checkpoints.export import main as export
from engine.checkpoints.files import newest_checkpoint
from engine.checkpoints.weight_sources import read_weights
from engine.checkpoints.weights import build_model, check_fit, load_weights
from engine.data.splits import open_split
from engine.run.load import dump_run, load_run, parse_run
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.training.objective import create_objective
from models import create_model
from models.assignment import with_budget
from models.base import attention_layers
from models.budgets import Budgets
from tests.support.launcher import ROOT
from tests.support.refusals import refusal

EVA = "attention={name: eva, window_size: 3, num_landmarks: 9}"
PERFORMER = "attention={name: performer, num_samples: 9}"
FITTED = "attention={name: eva, window_size: 3, num_landmarks: 9, fit: true}"
NYSTROM = "attention={name: nystrom, num_landmarks: 9, conv: none}"
RELEASED = "attention={name: local, window_size: 3, position_bias: table_released}"
SHIFTED = "attention={name: shifted_window, window_size: 3}"
SMALL = ("model.img_size=24", "model.stem=linear", "model.depth=2", "model.embed_dim=12", "model.num_heads=2")
SHORT = ("data.subset=24", "train.total_batch_size=48", "schedule.epochs=1", "schedule.warmup_epochs=0")
FAST, CONFIG = (*SMALL, *SHORT, "data.workers=0", "train.device=cpu"), ROOT / "configs/quickstart.yaml"
DISTILL, SIZES = "train.budget_distill=true", "train.budgets=[1, 4, 9]"


def trained(directory: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """The weights after five updates."""
    train.main([str(CONFIG), *FAST, *overrides, "--output", str(directory)])
    return newest_checkpoint(directory)[1]["model"]


def test_a_model_of_a_size():
    options = {"img_size": 56, "num_classes": 2, "embed_dim": 12, "num_heads": 2, "depth": 2}
    several = [{"blocks": 0, "name": "eva"}, {"blocks": 1, "name": "softmax"}]
    for attention, budget in (("eva", 4), ({"name": "eva"}, {"num_landmarks": 4}), (several, 4), (several, [4])):
        model = create_model("deit_tiny_p8", attention, budget=budget, **options)
        assert model.blocks[0].attn.config.num_landmarks == 4
    host = create_model("timm:vit_tiny_patch16_224", "performer", budget=4)
    assert {layer.core.config.num_samples for layer in attention_layers(host)} == {4}
    for attention, budget, problem in (
        ("softmax", 4, "budget = 4: mechanisms of attention that have a size: 0"),
        ("eva", "16", "budget = 16: sizes are whole numbers"),
        ("eva", {"name": "softmax"}, "budget = {name: softmax}: sizes are whole numbers"),
        ("eva", {"blocks": 1}, "budget = {blocks: 1}: blocks is no size"),
        ("eva", [4, 9], "mechanisms of attention that have a size: 1"),
        (5, 4, "mechanisms of attention that have a size: 0"),
        ({"window_size": 2}, 4, "expected a mechanism's name"),
        ("evaa", 4, "did you mean 'eva'"),
        ("eva", {"window_size": 7, "samples": 2}, r"attention\(eva\).samples: unknown option"),
    ):
        with pytest.raises(OptionError, match=problem):
            create_model("deit_tiny_p8", attention, budget=budget, **options)


def initial(source: Path, *overrides: str) -> dict[str, torch.Tensor]:
    """The weights that `init.weights` takes from a source for another model."""
    run = load_run(CONFIG, [*FAST, *overrides])
    return fit_weights(create_model(attention=run.attention, **run.model), read_weights(str(source)), "x")[0]


def distance(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((x - other[name]).abs().max().item() for name, x in state.items())


def test_one_budget_trains_as_none(tmp_path):
    plain = trained(tmp_path / "plain", EVA)
    assert distance(trained(tmp_path / "one", EVA, "train.budgets=[9]"), plain) == 0
    both = "train.budgets=[{window_size: 3, num_landmarks: 9}]"
    assert distance(trained(tmp_path / "distilled", EVA, both, DISTILL), plain) == 0
    assert distance(trained(tmp_path / "two", EVA, "train.budgets=[1, 9]"), plain) > 0


@pytest.mark.parametrize("more", [(), (DISTILL, "train.grad_accum_steps=2")])
def test_a_resumed_run_draws_the_same_sizes(more, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.training.resume.NUM_LAST", 9)
    options = (PERFORMER, "train.budgets=[1, 2, 4, 6, 9]", "train.checkpoint_steps=1", *more)
    expected = trained(tmp_path / "whole", *options)
    (tmp_path / "rest").mkdir()
    shutil.copy(tmp_path / "whole/step_2.pt", tmp_path / "rest")
    assert distance(trained(tmp_path / "rest", *options), expected) == 0


def test_two_ranks_draw_the_same_sizes(tmp_path, fork_server):
    """They train as one process does, whose weights at the largest size alone are others."""
    few = ("data.subset=null", "train.total_batch_size=10", "augment.scale=[1, 1]", "augment.ratio=[1, 1]")
    command, states = [str(CONFIG), *FAST, *few, NYSTROM, "optim.opt=sgd", "optim.lr=0.1"], []
    for ranks, sizes in ((2, SIZES), (1, SIZES), (1, "train.budgets=[9]")):
        output = tmp_path / str(len(states))
        statuses, job = fork_server.run([*command, sizes, "--output", str(output)], tmp_path / "log", ranks=ranks)
        assert statuses == [0] * ranks, job.text
        states.append(newest_checkpoint(output)[1]["model"])
    assert distance(*states[:2]) < 1e-5 < 1e-4 < distance(*states[1:])


@pytest.mark.parametrize("name", [name for name, mechanism in ATTENTION.items() if mechanism.size_option])
def test_a_size_in_turn_is_that_of_a_model_built_with_it(name):
    """Or the weights that depend on it are named."""
    option = ATTENTION[name].size_option
    small, own = {"kernel_size": (3, 5), "radius": (2, 3), "pool_size": (3, 5)}.get(option, (2, 4))
    shape = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "init_std": 0.3}
    tree = {"model": {"name": "deit", **shape, "num_classes": 10}, "attention": {"name": name, option: own}}
    run = parse_run(tree, "x")
    there = parse_run({**tree, "attention": with_budget(run.attention, small)}, "x")
    model, images = create_model(attention=run.attention, **run.model).eval(), torch.randn(2, 3, 32, 32)
    state, other = model.state_dict(), create_model(attention=there.attention, **there.model).state_dict()
    cut = (".omega", *(".position_bias.table" for _ in {name} & {"local", "combiner"}))
    if depends := [key for key, x in state.items() if x.shape != other[key].shape and not key.endswith(cut)]:
        weight = min(depends).removeprefix("blocks.0.attn.")
        with pytest.raises(
            OptionError, match=rf"= {small}: weights of attention\({name}\) depend on {option}: {weight}"
        ):
            Budgets(model, run.model, run.attention, [small, own])
        return
    budgets, expected = Budgets(model, run.model, run.attention, [small, own]), model(images)
    budgets.use(0)
    found = model(images)
    assert torch.equal(found, build_model(there, state, "x", True).eval()(images))
    assert torch.equal(found, expected) == (name == "ra")  # its option is of training
    budgets.use(-1)
    assert torch.equal(model(images), expected)


LAYOUTS: list[dict] = [{"layout": "1d"}, {"overlap": 1}, {"layout": "1d", "causal": True}]
WINDOWED = ["local", "eva", "combiner", "transformer_ls", "scatterbrain", "eva_clustered"]


@pytest.mark.parametrize(
    ("name", "options"), [*((x, {}) for x in WINDOWED), *((x, y) for x in ("local", "eva") for y in LAYOUTS)]
)
@pytest.mark.parametrize("side", [1, 3])
def test_a_smaller_window_has_the_middle_of_the_table(name, options, side):
    """Row by row, in outputs and gradients; in causal attention the beginning."""
    sizes = {"num_landmarks": 4, "num_samples": 4}
    attention = {"name": name, **options, **{key: x for key, x in sizes.items() if key in options_of(name)}}
    shape = {"img_size": 24, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2, "init_std": 0.3}
    model = {"name": "deit", **shape, "num_classes": 5}
    run, there = (parse_run({"model": model, "attention": attention | {"window_size": w}}, "x") for w in (5, side))
    images = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    large, small = (create_model(attention=x.attention, **x.model).double().eval() for x in (run, there))
    far, near = (w - 1 + options.get("overlap", 0) for w in (5, side))
    offsets = range(-near, near + 1)
    rows = [(far + y) * (2 * far + 1) + far + x for y in offsets for x in offsets]
    if "layout" in options:
        rows = [*range(near + 1)] if "causal" in options else [far + x for x in offsets]
    state = large.state_dict()
    tables = [key for key in state if key.endswith("position_bias.table")]
    cut = {key: torch.nn.init.normal_(state[key])[:, rows] for key in tables}
    small.load_state_dict(state | cut)
    Budgets(large, run.model, run.attention, [{"window_size": side}, {"window_size": 5}]).use(0)
    outputs = [model(images) for model in (large, small)]
    assert len(tables) == 2
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for key, weight in small.named_parameters():
        found = large.get_parameter(key).grad
        if key in cut:
            assert found.count_nonzero() == found[:, rows].count_nonzero() > -(side == 1)  # one token has weight 1
            found = found[:, rows]
        torch.testing.assert_close(found, weight.grad, rtol=1e-12, atol=1e-12, msg=key)
    small.load_state_dict(check_fit(small, large.state_dict(), "x", is_part=True))
    assert torch.equal(small(images), outputs[0])
    with pytest.raises(UserError, match="of another shape"):
        load_weights(small, large.state_dict(), "x")


def test_another_attention_takes_no_part_of_a_table():
    """A checkpoint whose attention has no name, or has another one, is compared with no size."""
    shape = {"img_size": 24, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2}
    tree = {"model": {"name": "deit", **shape, "num_classes": 5}, "train": {"budgets": [2, 25]}}
    attention = {"name": "local", "window_size": 25, "layout": "1d"}
    run = parse_run({**tree, "attention": attention}, "x")
    checkpoint = {"config": dump_run(run), "model": create_model(attention=run.attention, **run.model).state_dict()}
    for options in ({"causal": True}, {"layout": "2d", "window_size": 3}):
        other = parse_run({**tree, "attention": attention | options}, "x")
        with pytest.raises(UserError, match=r"1 of another shape: blocks\.0\.attn\.position_bias\.table"):
            restore_model(other, checkpoint, "plain")
    del checkpoint["config"]["attention"]["name"]
    table = checkpoint["model"].pop("blocks.0.attn.position_bias.table")
    other = parse_run({**tree, "attention": {"name": "softmax"}}, "x")
    assert restore_model(other, checkpoint, "plain")[1] == ""
    checkpoint["config"]["attention"], checkpoint["model"]["blocks.0.attn.position_bias.table"] = run.attention, table
    larger = replace(other, model=other.model | {"img_size": 32})
    with pytest.raises(UserError, match="1 dropped"):
        restore_model(larger, checkpoint, "plain")


def test_the_gradient_is_that_of_the_sum_written_out():
    """Labels teach the largest size, whose predictions teach the smallest and the one between; in float64."""
    run = load_run(CONFIG, [*FAST, NYSTROM, SIZES, DISTILL])
    model = create_model(attention=run.attention, **run.model).double()
    objective = create_objective(run, model, open_split(run.data, "train_split"), World(torch.device("cpu")))
    images, labels = torch.randn(6, 3, 24, 24, dtype=torch.float64), torch.arange(6)
    objective(objective.wrap(model), images, labels).backward()
    models = [create_model(attention=with_budget(run.attention, size), **run.model).double() for size in (1, 4, 9)]
    for one in models:
        one.load_state_dict(model.state_dict())
    *smaller, largest = (one(images) for one in models)
    taught = largest.detach().softmax(1)
    (F.cross_entropy(largest, labels) - sum((taught * x.log_softmax(1)).sum() / 6 for x in smaller)).backward()
    for name, weight in model.named_parameters():
        total = sum(one.get_parameter(name).grad for one in models)
        torch.testing.assert_close(weight.grad, total, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("sharing", ["kv", "layers"])
def test_a_layer_that_keeps_its_size_keeps_what_it_borrows(sharing: str):
    linformer = f"{{name: linformer, num_landmarks: 4, sharing: {sharing}, blocks: '1-2'}}"
    entries = f"attention=[{{blocks: 0, name: eva, num_landmarks: 9, window_size: 3}}, {linformer}]"
    run = load_run(CONFIG, [*FAST, "model.depth=3", entries, "train.budgets=[[1, 4], [9, 4]]"])
    model = create_model(attention=run.attention, **run.model)
    Budgets(model, run.model, run.attention, run.train.budgets).use(0)
    model(torch.zeros(1, 3, 24, 24)).sum().backward()
    assert {weight.grad is not None for name, weight in model.named_parameters() if "projection" in name} == {True}


def test_every_size_is_drawn_for_all_layers():
    """Also one for each entry of a list. The sandwich has every size between in turn."""
    entries = "{blocks: 0, name: eva, num_landmarks: 9, window_size: 3}, {blocks: 1, name: lara, num_landmarks: 4}"
    run = load_run(CONFIG, [*FAST, f"attention=[{entries}]", "train.budgets=[1, [2, 1], [4, 1], [9, 4]]"])
    model, found = create_model(attention=run.attention, **run.model), set()
    budgets = Budgets(model, run.model, run.attention, run.train.budgets)
    for step in range(99):
        with budgets.drawn(3, step):
            found |= {tuple(block.attn.config.num_landmarks for block in model.blocks), tuple(budgets.sandwich())}
    assert found == {(1, 1), (2, 1), (4, 1), (9, 4), (0, 1, 3), (0, 2, 3)}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([EVA, "train.budgets=[9, 4]"], "= 4, the last, is not the model's own size; write {num_landmarks: 9} last"),
        ([EVA, "train.budgets=[4, {num_landmarks: 4}, 9]"], "4}, 9]: two are the same (MACs: "),
        ([EVA, "train.budgets=[4, 1, 9]"], "[4, 1, 9]: the first is not the cheapest (MACs: "),
        ([EVA, "train.budgets=[1, 36, 9]"], "[1, 36, 9]: the last is not the dearest (MACs: "),
        ([EVA, "train.budgets=[[1, 2], 9]"], ": train.budgets = [1, 2]: mechanisms of attention that have a size: 1;"),
        ([EVA, "train.budgets=[7, 9]"], "train.budgets = 7: attention(eva).num_landmarks = 7 does not divide the 6x6"),
        ([EVA, "train.budgets=[{windw_size: 2}, 9]"], "(eva).windw_size: unknown option; did you mean 'window_size'?"),
        ([EVA, "train.budgets=[{name: lara}, 9]"], "train.budgets[0].name: expected int, got 'lara'"),
        ([EVA, "train.budgets=[{window_size: 0}, 9]"], "(eva) depend on window_size: position_bias.table; choose"),
        ([EVA, "train.budgets=[{window_size: 5}, 9]"], "(eva) depend on window_size: position_bias.table; choose"),
        ([EVA, "train.budgets=[{attn_drop: 1}, 9]"], "= {attn_drop: 1}: attn_drop is no size of attention; leave it"),
        ([FITTED, "train.budgets=[6, 7, 9]"], " = [6, 7, 9]: two are the same (MACs: "),
        ([EVA, "train.budgets=[x, 9]"], "train.budgets[0]: expected a list, got 'x'"),
        ([RELEASED, "train.budgets=[2, 3]"], "(local) depend on window_size: position_bias.table; choose"),
        ([SHIFTED, "train.budgets=[2, 3]"], "(shifted_window) depend on window_size: position_bias.table"),
        ([EVA, "train.budgets=[]"], "train.budgets has 0 sizes; give 1 to 64, or null"),
        ([EVA, DISTILL], "train.budget_distill = true: train.budgets is null; name sizes, or leave it out"),
        ([EVA, SIZES, DISTILL, "train.grad_checkpointing=true"], "repeats passes at another size; leave it out, or"),
        ([EVA, SIZES, DISTILL, "distill.teacher=x"], "it needs labels alone; leave teacher, masks and tokens out"),
        (
            [EVA, SIZES, "train.cuda_graph=true", "train.device=auto"],
            "train.budgets changes the sizes of attention; set it to null",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(overrides, problem, tmp_path, capsys):
    assert problem in refusal(train.main, [CONFIG, *FAST, *overrides, "--output", tmp_path / "run"], capsys)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_serves_every_size(tmp_path, capsys):
    """Also for images of another size, for which other tables of positions are resampled."""
    trained(run := tmp_path / "run", PERFORMER, SIZES)
    four, file, image, table = "attention.num_samples=4", *(tmp_path / x for x in ("4.safetensors", "x.png", "x.csv"))

    def results(*arguments: object) -> tuple[dict, str]:
        capsys.readouterr()
        validate.main([*map(str, arguments), "data.workers=0", "--json"])
        output = capsys.readouterr()
        return json.loads(output.out), output.err

    found, notes = results(run, "--budgets", "all")
    losses, macs = ([each[name] for each in found.values()] for name in ("loss", "macs"))
    assert ([*found], macs, notes) == (["plain 1", "plain 4", "plain 9"], sorted({*macs}), "")
    export([str(run), str(file), four])
    assert distance(initial(file, PERFORMER, four), initial(run, PERFORMER, four)) == 0
    assert [results(*each)[0]["plain"]["loss"] for each in ([run, four], [file], [run])] == [losses[1], *losses[1:]]
    line = "attention.num_samples = 5: the model was not trained for it, but for 1, 4, 9\n"
    assert results(run, "attention.num_samples=5")[1] == line
    large = [results(*each, "model.img_size=32")[0] for each in ([run, "--budgets", "all"], [file])]
    assert large[0]["plain 4"]["loss"] == large[1]["plain"]["loss"]
    Image.linear_gradient("L").save(image)
    texts = []
    for source in ([run, "--set", four], [file], [run]):
        predict.main([*map(str, source), str(image), "--output", str(table)])
        texts.append(table.read_text())
    assert texts[0] == texts[1] != texts[2]
    for more, problem in (
        (["--per-class", table], ": a file has the predictions"),
        (["train.budgets=null"], " = all: "),
    ):
        assert f"--budgets{problem}" in refusal(validate.main, [run, "--budgets", "all", *more], capsys)
    small, own, two = "window_size: 2, num_landmarks: 1", "window_size: 3, num_landmarks: 4", "attention.window_size=2"
    trained(run := tmp_path / "windows", f"attention={{name: eva, {own}}}", f"train.budgets=[{{{small}}}, {{{own}}}]")
    export([str(run), str(file := tmp_path / "2.safetensors"), *(options := [two, "attention.num_landmarks=1"])])
    assert distance(*(initial(source, f"attention={{name: eva, {small}}}") for source in (file, run))) == 0
    for size in ("model.img_size=24", "model.img_size=32"):
        found, notes = results(run, "--budgets", "all", size)
        assert {name: each["budget"]["window_size"] for name, each in found.items()} == {
            f"plain {{{small}}}": 2,
            f"plain {{{own}}}": 3,
        }
        assert "not trained" not in notes
        losses = [results(*each, size)[0]["plain"]["loss"] for each in ([run, *options], [file], [run])]
        assert losses[1:] == [each["loss"] for each in found.values()]
        assert losses[0] == losses[1] != losses[2]
    untrained = ": the model was not trained for it, but for"
    assert (
        results(run, two)[1] == f"{two.replace('=', ' = ')} and attention.num_landmarks = 4{untrained} (2, 1), (3, 4)\n"
    )
    for source, more, problem in (
        (file, ["--budgets", "all"], "--budgets = all: the model was trained for its own size only"),
        (run, ["--budgets", "all", *options], "--budgets = all evaluates the sizes of train.budgets; leave"),
        (
            run,
            ["attention.window_size=6"],
            f"attention.window_size = 6 and attention.num_landmarks = 4{untrained} (2, 1), (3, 4); ",
        ),
        (
            run,
            ["train.budgets=[4, 5]"],
            "train.budgets: the sizes for which a checkpoint was trained cannot be changed",
        ),
    ):
        assert problem in refusal(validate.main, [source, *more], capsys)
    trained(run := tmp_path / "alone", f"attention={{name: eva, {own}}}")
    assert results(run, two)[1] == f"attention.window_size = 2{untrained} 3\n"
    small, own = (f"window_size: {w}, num_landmarks: {c}, num_iterations: {n}" for w, c, n in ((2, 4, 2), (3, 9, 10)))
    trained(
        run := tmp_path / "many", f"attention={{name: eva_clustered, {own}}}", f"train.budgets=[{{{small}}}, {{{own}}}]"
    )
    found, notes = results(run, "--budgets", "all")
    assert ([*found], notes) == ([f"plain {{{small}}}", f"plain {{{own}}}"], "")


@pytest.mark.complete
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_sizes(tmp_path, monkeypatch):
    """Every size has graphs of its own, and the weights are those of eager training."""
    options = (NYSTROM, "train.budgets=[4, 9]", DISTILL, "optim.opt=sgd")
    expected = trained(tmp_path / "eager", *options)
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(train, "compiled_blocks", partial(train.compiled_blocks, backend="eager"))
    assert distance(trained(tmp_path / "compiled", *options, "train.compile=true"), expected) < 1e-5
    assert counters["stats"]["unique_graphs"] == 5  # of the first block and the other at two sizes; one of evaluation
