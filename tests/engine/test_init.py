"""Weights of other models at the start of a run: fitting weights are loaded, and a table reports each."""

import dataclasses
import json
import re
import resource
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import ATTENTION
from engine.checkpoints.adapt import fit_weights, list_other_options, restore_model, table
from engine.checkpoints.export import to_safetensors
from engine.checkpoints.files import load_checkpoint
from engine.checkpoints.initial_weights import create_initial_model
from engine.checkpoints.progress import Progress
from engine.checkpoints.weight_sources import EXPECTED, Source, read_weights
from engine.config.schema import Run
from engine.run.load import MISSING, load_run
from engine.runtime.distributed import World
from engine.runtime.errors import UserError
from engine.training.resume import Checkpoints
from models import create_model
from tests.support.cases import perturbed
from tests.support.facts import stated
from tests.support.launcher import ROOT

WORLD = World(torch.device("cpu"))
SMALL = ("img_size=32", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2", "num_classes=5", "stem=linear")
MODEL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
AVERAGED = {"class_token": False, "global_pool": "avg", "fc_norm": False}
PYRAMID = {"embed_dims": (8, 16, 20, 32), "depths": (1, 1, 1, 1), "num_classes": 3}


def stock(**options) -> nn.Module:
    """A small ViT of timm with a class token, no weight at its initial value."""
    torch.manual_seed(0)
    return perturbed(timm.create_model("vit_tiny_patch16_224", **{**MODEL, **options}).eval(), 0.1)


def build(attention="softmax", **options) -> nn.Module:
    return create_model("deit", attention=attention, **{**MODEL, **options}).eval()


def fit(model: nn.Module, state: dict[str, Tensor], source: nn.Module | None = None) -> dict[str, list[str]]:
    """Loads the weights that fit, and returns the outcome of each."""
    taken, outcome = fit_weights(model, Source(state, source), "init.weights=file")
    model.load_state_dict(taken, strict=False)
    assert sorted(taken) == sorted(outcome["loaded"] | outcome["adapted"])
    of_model = [entries for kind, entries in outcome.items() if kind != "dropped"]
    assert sorted(name for entries in of_model for name in entries) == sorted(model.state_dict())
    return {kind: [f"{name} {note}".rstrip() for name, note in entries.items()] for kind, entries in outcome.items()}


def run_of(*overrides: str) -> Run:
    small = [f"model.{option}" for option in SMALL]
    return load_run(ROOT / "configs/quickstart.yaml", [*small, "attention={name: softmax}", *overrides])


def write(path: Path, state: dict) -> str:
    safetensors.torch.save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return str(path)


@pytest.mark.parametrize(
    ("there", "here", "adapted"),
    [
        ({}, {}, []),
        ({}, {"img_size": (48, 64)}, ["pos_embed (1, 17, 24) -> (1, 49, 24)"]),
        ({}, {"img_size": 64, "patch_size": 16}, ["patch_embed.proj.weight (24, 3, 8, 8) -> (24, 3, 16, 16)"]),
        ({}, {"in_chans": 1}, ["patch_embed.proj.weight (24, 3, 8, 8) -> (24, 1, 8, 8)"]),
        ({"no_embed_class": True, "reg_tokens": 2}, {"reg_tokens": 2}, ["pos_embed (1, 16, 24) -> (1, 19, 24)"]),
    ],
    ids=["as they are", "image size", "patch size", "grey: the sum of the colours", "prefix without positions: DeiT-3"],
)
def test_stock_weights_give_the_logits_of_timm_which_resamples_them_too(there, here, adapted):
    source, model = stock(**there), build(class_token=True, **here)
    outcome = fit(model, source.state_dict())
    assert {kind: names for kind, names in outcome.items() if names and kind != "loaded"} == (
        {"adapted": adapted} if adapted else {}
    )
    source.set_input_size(here.get("img_size", 32), patch_size=here.get("patch_size", 8))
    images = torch.randn(2, here.get("in_chans", 3), *model.patch_embed.img_size)
    torch.testing.assert_close(model(images), source(images.expand(-1, 3, -1, -1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ATTENTION)
def test_shared_projections_load_into_every_mechanism(name):
    """The facts name what a mechanism learns or draws itself, and nothing of the source is lost.

    T2R's paper, for one, converts a trained transformer by new feature maps beside its projections. Others run on
    softmax weights as they are: Performer, SMYRF, clustered attention and more.
    """
    source = stock(**AVERAGED, img_size=112).state_dict()
    model = build(name, img_size=112)
    own = {key: value.clone() for key, value in model.state_dict().items()}
    outcome = fit(model, source)
    assert {key.split(".")[3] for key in outcome["fresh"]} == stated("LEARNED").get(name, set())
    assert all(torch.equal(model.state_dict()[key], own[key]) for key in outcome["fresh"] + outcome["drawn"])
    assert outcome["re-made"] == outcome["dropped"] == []
    assert {entry.split(" ")[0].split(".")[3] for entry in outcome["adapted"]} <= {"qkv"}
    buffers = {key for key, _ in model.named_buffers()}
    assert all(".attn." in key for key in outcome["fresh"] + outcome["drawn"])
    assert set(outcome["drawn"]) <= buffers
    assert not set(outcome["fresh"]) & buffers
    count, attn = ATTENTION[name].num_projections, model.blocks[1].attn
    q, k, v = source["blocks.1.attn.qkv.weight"].chunk(3)
    assert torch.equal(attn.qkv.weight, torch.cat({3: [q, k, v], 2: [q, v], 1: [v]}[count]))
    assert torch.equal(attn.proj.weight, source["blocks.1.attn.proj.weight"])


CLASS, STUDENT = {"class_token": True}, {"class_token": True, "dist_token": True}
DISTILLATION = ["dist_token", "head_dist.weight", "head_dist.bias"]
WITHOUT_SECOND = [0, *range(2, 18)]


@pytest.mark.parametrize(
    ("there", "here", "outcome", "rows", "source_rows"),
    [
        (CLASS, CLASS | {"num_classes": 7}, {"re-made": ["head.weight", "head.bias"]}, range(17), range(17)),
        (CLASS, {}, {"dropped": ["cls_token"]}, range(16), range(1, 17)),
        (AVERAGED, CLASS | {"reg_tokens": 2}, {"fresh": ["cls_token", "reg_token"]}, range(3, 19), range(16)),
        (STUDENT, CLASS, {"dropped": DISTILLATION}, range(17), WITHOUT_SECOND),
        (CLASS, STUDENT, {"fresh": DISTILLATION}, WITHOUT_SECOND, range(17)),
        (STUDENT, STUDENT, {}, range(18), range(18)),
        (
            STUDENT,
            STUDENT | {"num_classes": 7},
            {"re-made": ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]},
            range(18),
            range(18),
        ),
    ],
)
def test_prefix_tokens_and_heads_that_one_side_lacks(there, here, outcome, rows, source_rows):
    """Positions of shared tokens are taken; what is fresh or re-made, and positions of other tokens, stay."""
    torch.manual_seed(0)
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", **MODEL)
    source = (distilled if "dist_token" in there else stock(**there)).state_dict()
    model = build(**here)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    found = fit(model, source)
    assert {kind: names for kind, names in found.items() if names and kind not in ("loaded", "adapted")} == outcome
    assert all(torch.equal(model.state_dict()[name], own[name]) for name in found["fresh"] + found["re-made"])
    assert torch.equal(model.pos_embed[:, rows], source["pos_embed"][:, source_rows])
    others = [row for row in range(model.pos_embed.shape[1]) if row not in rows]
    assert len(others) == len(own["pos_embed"][0]) - len(rows)
    assert torch.equal(model.pos_embed[:, others], own["pos_embed"][:, others])


def test_bias_tables_of_windows_that_are_no_squares_belong_to_rows_and_columns():
    """Windows of 4 x 7 and of 7 x 4 tokens have tables of 7 x 13 and 13 x 7 rows, as many."""
    attention = {"name": "shifted_window", "window_size": 7}
    wide, high = (build(attention, img_size=size, patch_size=4) for size in ((16, 56), (56, 16)))
    outcome = fit(high, wide.state_dict(), wide)
    assert [entry for entry in outcome["adapted"] if "position_bias" in entry] == [
        f"blocks.{i}.attn.position_bias.table (1, 91, 2) -> (1, 91, 2)" for i in (0, 1)
    ]
    old, new = (model.blocks[0].attn.position_bias.table[0] for model in (wide, high))
    expected = F.interpolate(old.mT.unflatten(1, (7, 13))[None], (13, 7), mode="bicubic", align_corners=False)
    torch.testing.assert_close(new, expected[0].flatten(1).mT)
    square = build(attention, img_size=56, patch_size=4)
    outcome = fit(square, wide.state_dict(), wide)
    assert "blocks.0.attn.position_bias.table (1, 91, 2) -> (1, 169, 2)" in outcome["adapted"]


T5 = {"position_bias": "t5"}
WINDOWS = {"window_size": 4, "layout": "1d"}


@pytest.mark.parametrize(
    ("there", "here", "becomes"),
    [
        ({"window_size": 2}, {}, "adapted (1, 9, 2) -> (1, 49, 2)"),
        (WINDOWS, WINDOWS | {"window_size": 2}, "adapted (1, 7, 2) -> (1, 3, 2)"),
        (WINDOWS, WINDOWS | {"overlap": 2}, "adapted (1, 7, 2) -> (1, 11, 2)"),
        (WINDOWS | {"window_size": 2, "overlap": 2}, WINDOWS, "loaded"),
        (WINDOWS | {"causal": True}, WINDOWS | {"causal": True, "window_size": 2}, "adapted (1, 4, 2) -> (1, 2, 2)"),
        (WINDOWS | {"causal": True, "window_size": 7}, WINDOWS, "fresh (there it is of table 1d causal)"),
        (WINDOWS | {"window_size": 13}, {"window_size": 3}, "fresh (there it is of table 1d)"),
        (T5, {}, "fresh (there it is of t5 2d)"),
        (T5, T5, "loaded"),
        (T5 | {"causal": True}, T5 | {"layout": "1d"}, "fresh (there it is of t5 1d causal)"),
        *(
            (kind, kind | {"window_size": 3}, f"fresh (of another window, and {name} 2d cannot be resampled)")
            for name, kind in [(name, {"position_bias": name}) for name in ("t5", "t5_released", "table_released")]
        ),
        ({"position_bias": "table_released"}, {"position_bias": "table_released"}, "loaded"),
        ({"position_bias": "none"}, {}, "fresh"),
        ({}, {"position_bias": "none"}, None),
    ],
)
def test_bias_tables_of_other_windows_and_kinds(there, here, becomes):
    """Also where their shapes are the same, if the model is known: a state dict does not say what its rows are."""
    source = build({"name": "local", "window_size": 4, **there})
    for known in (
        (source, None) if becomes is None or ("(there" not in becomes and "t5" not in str(there)) else (source,)
    ):
        model = build({"name": "local", "window_size": 4, **here})
        before = [block.attn.position_bias.table for block in model.blocks]
        before = [table if table is None else table.clone() for table in before]
        outcome = fit(model, source.state_dict(), known)
        found = [f"{kind} {entry}" for kind in ("loaded", "adapted", "fresh") for entry in outcome[kind]]
        found = [entry for entry in found if "position_bias" in entry]
        kind, _, change = (becomes or "").partition(" ")
        names = [f"blocks.{i}.attn.position_bias.table" for i in (0, 1)] if becomes else []
        assert found == [f"{kind} {name} {change}".rstrip() for name in names]
        tables = [block.attn.position_bias.table for block in model.blocks]
        assert kind != "fresh" or all(map(torch.equal, tables, before))


@pytest.mark.parametrize(("name", "size"), [("shifted_window", "window_size"), ("neighborhood", "kernel_size")])
def test_bias_tables_of_mechanisms_on_grids_alone(name, size):
    """Offsets on a grid have one meaning in all mechanisms."""
    there, same = (build({"name": name, size: 3}) for _ in range(2))
    assert {kind for kind, names in fit(same, there.state_dict(), there).items() if names} == {"loaded"}
    windows = build({"name": "local", "window_size": 4})
    adapted = [f"blocks.{i}.attn.position_bias.table (1, 25, 2) -> (1, 49, 2)" for i in (0, 1)]
    assert fit(windows, there.state_dict(), there)["adapted"] == adapted


HYBRID = [
    {"blocks": 0, "name": "eva", "window_size": 2, "num_landmarks": 4},
    {"blocks": 1, "name": "performer", "num_samples": 4},
]


def test_weights_of_hybrids_are_taken_block_by_block():
    softmax, hybrid = build(), build(HYBRID)
    outcome = fit(hybrid, softmax.state_dict(), softmax)
    assert {kind for kind, names in outcome.items() if names} == {"loaded", "fresh", "drawn"}
    assert all(name.startswith("blocks.0.attn.") for name in outcome["fresh"])
    assert outcome["drawn"] == ["blocks.1.attn.omega"]
    swapped = build([{**HYBRID[1], "blocks": 0}, {**HYBRID[0], "blocks": 1}])
    outcome = fit(swapped, hybrid.state_dict(), hybrid)
    assert outcome["drawn"] == ["blocks.0.attn.omega"]
    assert "blocks.1.attn.omega" in outcome["dropped"]
    lines = table(fit_weights(build(HYBRID), Source(softmax.state_dict(), softmax), "x")[1])
    assert "  fresh       9  blocks.0.attn.position_bias.table, blocks.0.attn.landmarks.k.linear.weight, " in lines[2]


def test_a_table_of_one_axis_keeps_its_middle_and_its_ends():
    models = [build({"name": "local", "layout": "1d", "window_size": size}) for size in (3, 5)]
    with torch.no_grad():
        for block in models[0].blocks:
            block.attn.position_bias.table.copy_(torch.arange(5.0)[None, :, None].expand(1, 5, 2))
    fit(models[1], models[0].state_dict())
    new = models[1].blocks[0].attn.position_bias.table[0, :, 0]
    assert new[4].item() == pytest.approx(2)
    assert new.diff().min() > 0
    torch.testing.assert_close(new, 4 - new.flip(0))


PVT = partial(create_model, "pvtv2_b0", attention="sra", **PYRAMID)


@pytest.mark.parametrize(
    ("make_source", "make", "there", "here"),
    [
        (build, build, 4, 2),
        (stock, build, 4, 2),
        (PVT, PVT, [1, 2, 5, 8], [2, 4, 10, 16]),
        (partial(timm.create_model, "pvt_v2_b0", **PYRAMID), PVT, [1, 2, 5, 8], [2, 4, 10, 16]),
    ],
)
def test_another_number_of_heads_is_refused(make_source, make, there, here):
    """The projections have the same shapes, but another number of heads."""
    source = make_source(num_heads=there)
    says = f"init.weights=file: weights of a model with num_heads={there}, but model.num_heads={here}: "
    with pytest.raises(UserError, match=f"^{re.escape(says)}.*; set model.num_heads={re.escape(str(there))}$"):
        fit(make(num_heads=here), source.state_dict(), source)
    fit(make(num_heads=there), source.state_dict(), source)


def test_another_number_of_heads_than_a_checkpoint_states_is_refused_at_any_size():
    trained, state = run_of(), build().state_dict()
    checkpoint = {"config": dataclasses.asdict(trained), "model": state}
    for size in (32, 64):
        says = r"a model with num_heads=2, but model\.num_heads=4: .*; set model\.num_heads=2"
        with pytest.raises(UserError, match=says):
            restore_model(run_of("model.num_heads=4", f"model.img_size={size}"), checkpoint, "plain")
    checkpoint["config"]["model"] |= {"num_heads": MISSING, "img_size": MISSING}  # as of the released code
    assert restore_model(run_of("model.num_heads=4"), checkpoint, "plain")[1] == ""


@pytest.mark.parametrize("classes", [5, 3])
def test_options_that_no_weight_shows_are_warned_of_or_refused(classes, tmp_path, capsys, monkeypatch):
    """A new classifier learns from any pooling."""
    there = build(class_token=True, global_pool="avg")
    monkeypatch.setattr("engine.checkpoints.initial_weights.read_weights", lambda *_: Source(there.state_dict(), there))
    options = ("model.class_token=true", f"model.num_classes={classes}", "init.weights=x")
    start(run_of(*options, "model.global_pool=avg"), tmp_path)
    assert capsys.readouterr().err == ""
    start(run_of(*options), tmp_path)
    line = 'model.global_pool is "token", that of these weights was "avg": \'model.global_pool="avg"\' keeps it'
    assert capsys.readouterr().err == (f"warning: {line}\n" if classes == 5 else "")
    with pytest.raises(UserError, match=re.escape(f"init.strict=true, but {line}" if classes == 5 else "2 re-made")):
        start(run_of(*options, "init.strict=true"), tmp_path)


def test_the_relu_of_pvt_v2_li_is_compared_with_that_of_timm():
    source = timm.create_model("pvt_v2_b0", **PYRAMID, linear=True)
    line = "model.mlp_relu is false, that of these weights was true: 'model.mlp_relu=true' keeps it"
    for relu, others in ((False, [line]), (True, [])):
        model = create_model("pvtv2_b0", mlp_relu=relu, attention=["linear_sra"] * 4, **PYRAMID)
        assert list_other_options(source, model, True) == others


def test_learned_samples_are_not_taken_for_random_ones():
    there, learnable = (build({"name": "performer", "feature_redraw": redraw}) for redraw in ("redraw", "learnable"))
    outcome = fit(there, learnable.state_dict(), learnable)
    assert outcome["drawn"] == [f"blocks.{i}.attn.omega (learned there)" for i in (0, 1)]
    assert fit(learnable, there.state_dict(), there)["drawn"] == []


def test_parameters_in_a_file_are_weights(tmp_path):
    """torch.save of a mapping of nn.Parameter, also with attributes, as torch.load reads it."""
    weights = {"a.weight": nn.Parameter(torch.arange(6.0).view(3, 2)), "a.bias": nn.Parameter(torch.ones(3))}
    weights["a.bias"].is_special = True
    state = read_weights(write(tmp_path / "x.pth", weights)).state
    assert {name: x.tolist() for name, x in state.items()} == {name: x.tolist() for name, x in weights.items()}


def test_a_folder_of_transformers_is_named(tmp_path):
    write(tmp_path / "model.safetensors", {"vit.embeddings.cls_token": torch.zeros(1)})
    (tmp_path / "config.json").write_text('{"architectures": ["ViTForImageClassification"], "model_type": "vit"}')
    problem = "it seems to be a folder of the transformers library, of the model ViTForImageClassification; name it hf:"
    for name in (str(tmp_path), f"timm:local-dir:{tmp_path}"):
        with pytest.raises(UserError, match=problem):
            read_weights(name)


@pytest.mark.parametrize("change", [{"embed_dim": 12288}, {"depth": 20_000}, {"num_classes": 10**7}], ids=str)
def test_a_description_of_a_larger_model_than_its_weights_is_refused(change, tmp_path):
    """By timm's name of the directory, before the model is made."""
    write(tmp_path / "model.safetensors", {name: x[:1].clone() for name, x in stock().state_dict().items()})
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "pretrained_cfg": {"input_size": [3, 32, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_args": MODEL | change}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="describes a larger model than the weights beside it"):
        read_weights(f"timm:local-dir:{tmp_path}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB
    (tmp_path / "config.json").write_text(" " * 2**22 + "{}")
    with pytest.raises(UserError, match="larger than 4,194,304 bytes"):
        read_weights(f"timm:local-dir:{tmp_path}")


def test_a_pyramid_loads_by_the_names_of_timm_and_of_its_authors():
    source = timm.create_model("pvt_v2_b0", **PYRAMID).state_dict()
    assert fit(create_model("pvtv2_b0", attention="local", img_size=224, **PYRAMID), source)["fresh"]
    authors = {}
    for key, x in source.items():
        key = key.replace("dwconv", "dwconv.dwconv").replace("patch_embed", "patch_embed1")
        for ours, theirs in {"downsample": "patch_embed", "blocks": "block", "norm": "norm"}.items():
            key = re.sub(rf"^stages\.(\d)\.{ours}", lambda match, name=theirs: f"{name}{int(match[1]) + 1}", key)
        authors[key] = x
    assert "block4.0.mlp.dwconv.dwconv.weight" in authors
    for state in (source, authors):
        assert [kind for kind, names in fit(PVT(), state).items() if names] == ["loaded"]


def refusal_of(model: nn.Module, state: dict[str, Tensor], source: nn.Module | None = None) -> str:
    with pytest.raises(UserError) as caught:
        fit(model, state, source)
    assert str(caught.value).startswith("init.weights=file: ")
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: dict(list(state.items())[: len(state) // 2]), "missing: blocks.1.norm1.weight"),
        (lambda state: {name: x[..., :12] for name, x in state.items()}, "another shape: blocks.0.norm1.weight (12,)"),
        (lambda state: {f"layer4.{name}": x for name, x in state.items()}, "another architecture"),
        (lambda state: {name: torch.ones(()) for name in state}, "another architecture"),
        ({"blocks.0.ls1.gamma": torch.ones(24)}, "1 unexpected: blocks.0.ls1.gamma"),
        ({"norm.weight": torch.full((24,), torch.nan)}, "1 weights are not finite: norm.weight"),
        ({"patch_embed.backbone.conv.weight": torch.ones(1)}, "1 unexpected: patch_embed.backbone.conv.weight"),
        ({"pos_embed": torch.zeros(1, 15, 24)}, "no square"),
        ({"patch_embed.proj.weight": torch.zeros(24, 192)}, "cannot be adapted"),
        ({"cls_token": torch.zeros(24)}, "cannot be adapted"),
        ({"blocks.0.attn.q.weight": torch.zeros(24, 24)}, "cannot be adapted"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(change, says):
    state = stock().state_dict()
    assert says in refusal_of(build(class_token=True), state | change if isinstance(change, dict) else change(state))


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name)


@pytest.mark.parametrize(
    ("source", "model", "says"),
    [
        (partial(on_meta, "resnet18"), build, "another architecture (24 missing: blocks.0.norm1.weight, "),
        (partial(on_meta, "pvt_v2_b0"), build, "another architecture ("),
        (partial(on_meta, "deit_small_patch16_224"), build, "another architecture ("),
        (partial(on_meta, "xcit_nano_12_p16_224"), build, "cannot be adapted to the model"),
        (build, PVT, "another architecture ("),
    ],
)
def test_another_family_is_refused_in_one_line(source, model, says):
    source = source()
    message = refusal_of(model(), source.state_dict(), source)
    assert says in message
    assert message.endswith("; choose the model (model.name, model.depth, ...) that the weights were made for")
    assert len(message) < 600


def start(run: Run, output: Path, classes: list[str] | None = None) -> nn.Module:
    torch.manual_seed(1)
    return create_initial_model(run, output, WORLD, classes)


@pytest.fixture
def trained(tmp_path, capsys) -> tuple[nn.Module, str]:
    """A model of the classes a to e, and the name of its checkpoint."""
    run, before = run_of(), tmp_path / "before"
    before.mkdir()
    model = start(run, before)
    torch.nn.init.normal_(model.head.bias)
    identity = {"classes": [*"abcde"]}
    Checkpoints(before, run, WORLD, 100, identity).save(Progress(step=1, images=8), {"model": model})
    capsys.readouterr()
    return model, str(before / "step_1.pt")


@pytest.mark.parametrize(
    ("classes", "rows", "says"),
    [
        ("abcde", [0, 1, 2, 3, 4], None),
        ("edcba", [4, 3, 2, 1, 0], "matched by name: the same names in another order"),
        ("cb", [2, 1], "matched by name: only in the weights: a, d, e (3)"),
        ("xbcyz", [None, 1, 2, None, None], "only in the weights: a, d, e (3); only in the data: x, y, z (3)"),
        ("01234", [0, 1, 2, 3, 4], "the data's numbers, taken for positions in the weights' names"),
        ("43210", [4, 3, 2, 1, 0], "the data's numbers, taken for positions in the weights' names"),
        ("vwxyz", [None] * 5, None),
        ("vwxyzb", [*[None] * 5, 1], "only in the weights: a, c, d, e (4); only in the data: v, w, x, y, z (5)"),
    ],
)
def test_classifiers_are_matched_by_the_names_of_classes(trained, tmp_path, capsys, classes, rows, says):
    source, name = trained
    options = f"model.num_classes={len(classes)}", f"init.weights={name}"
    models = source, start(run_of(options[0]), tmp_path), start(run_of(*options), tmp_path, [*classes])
    out = capsys.readouterr().out
    for there, fresh, here in zip(*(model.head.parameters() for model in models), strict=True):
        assert torch.equal(here, torch.stack([fresh[i] if row is None else there[row] for i, row in enumerate(rows)]))
    assert (says in out) if says else ("classes  " not in out)
    remade = "re-made     2  head.weight (of other classes), head.bias (of other classes)"
    assert (remade in out) == (classes == "vwxyz")
    if classes not in ("abcde", "01234"):
        with pytest.raises(UserError, match=r"not all is loaded as it is: 2 (adapted|re-made) \(head"):
            start(run_of(*options, "init.strict=true"), tmp_path, [*classes])


@pytest.mark.parametrize("in_file", [True, False])
def test_classes_without_names_are_said_to_be_taken_in_order(in_file, tmp_path, capsys):
    """Weights alone have none; numbers, as of IDX files, name no data set."""
    model = build(stem="linear")
    source = write(tmp_path / "vit.pth", model.state_dict())
    if not in_file:
        source = str(tmp_path / "before")
        (tmp_path / "before").mkdir()
        identity = {"classes": [*"01234"]}
        Checkpoints(Path(source), run_of(), WORLD, 100, identity).save(Progress(step=1, images=8), {"model": model})
    started = start(run_of(f"init.weights={source}"), tmp_path, [*"01234"])
    assert torch.equal(started.head.weight, model.head.weight)
    unknown = "not known from this file; the 5 of its classifier are taken for the data's, in order"
    expected = unknown if in_file else "numbers, taken for the same on both sides"
    assert f"\n  classes  {expected}\n" in capsys.readouterr().out


def test_an_own_run_its_checkpoint_and_its_export_start_another(tmp_path, capsys):
    """The source has a grid that is not square. The table is printed once, and not when the run resumes."""
    run, before, output = run_of("model.img_size=[32, 48]"), tmp_path / "before", tmp_path / "after"
    before.mkdir()
    output.mkdir()
    trained = start(run, before)
    Checkpoints(before, run, WORLD, 100).save(Progress(step=1, images=8), {"model": trained, "model_ema": build()})
    Checkpoints(before, run, WORLD, 100).save(Progress(step=2, images=16), {"model": trained})
    exported = tmp_path / "softmax.safetensors"
    exported.write_bytes(to_safetensors(torch.load(before / "step_2.pt"), "plain"))
    assert capsys.readouterr().out == ""
    kinds = (
        "a run directory: its model in step_2.pt",
        "a checkpoint of a run: its model",
        "an exported checkpoint: its model",
    )
    for source, origin in zip((before, before / "step_2.pt", exported), kinds, strict=True):
        new = run_of("attention={name: lara, num_landmarks: 4}", "model.num_classes=3", f"init.weights={source}")
        model = start(new, output)
        assert torch.equal(model.blocks[0].attn.qkv.weight, trained.blocks[0].attn.qkv.weight)
        out, err = capsys.readouterr()
        *lines, dropped = out.splitlines()
        assert lines == [
            f"init.weights={source}",
            f"  source   {origin}",
            "  loaded     28",
            "  adapted     1  pos_embed (1, 24, 24) -> (1, 16, 24)",
            "  fresh      16  "
            + ", ".join(
                f"blocks.0-1.attn.landmark_{x}.{part} (2)"
                for x in "qk"
                for part in ("linear.weight", "linear.bias", "norm.weight", "norm.bias")
            ),
            "  drawn       0",
            "  re-made     2  head.weight, head.bias",
        ]
        assert (dropped, err) == ("  dropped     0", "")
    Checkpoints(output, new, WORLD, 100).save(Progress(step=1, images=8), {"model": model})
    exported.write_bytes(to_safetensors(torch.load(output / "step_1.pt"), "plain"))
    for path in (output / "step_1.pt", exported):
        assert load_checkpoint(path)["config"]["init"] == {"weights": str(source), "strict": False}
    resumed = run_of("attention={name: lara, num_landmarks: 4}", "init.weights=gone.pt")
    start(resumed, output)
    assert capsys.readouterr() == ("", "")


OTHER, TIMM = "weights of another program", "a checkpoint of timm's train.py"
ARGS = Namespace(lr=0.1, opt="adamw")


def with_prefix(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: x for name, x in state.items()}


def under(key: str, prefix: str):
    return lambda state, other: {key: with_prefix(prefix, state)}


@pytest.mark.parametrize(
    ("name", "wrap", "origin"),
    [
        ("x.pth", lambda state, other: state, OTHER),
        ("x.safetensors", lambda state, other: state, OTHER),
        ("x.pth", lambda state, other: {"model": state, "epoch": 3}, f"{OTHER}: its model"),
        ("x.pth", lambda state, other: {"model": other, "model_ema": state}, f"{OTHER}: its model_ema, not its model"),
        (
            "x.pth.tar",
            lambda state, other: {"arch": "vit", "args": ARGS, "state_dict": other, "state_dict_ema": state},
            f"{TIMM}: its state_dict_ema, not its state_dict",
        ),
        ("x.pth", under("state_dict", "module."), f"{OTHER}: its state_dict; names without module."),
        (
            "x.pth",
            lambda state, other: with_prefix("_orig_mod.module.", state),
            f"{OTHER}; names without _orig_mod.module.",
        ),
        ("x.pth", under("model", "_orig_mod."), f"{OTHER}: its model; names without _orig_mod."),
        ("x.ckpt", under("state_dict", "model."), f"{OTHER}: its state_dict; names without model."),
    ],
)
def test_the_table_names_a_file_and_which_of_its_weights_were_taken(name, wrap, origin, tmp_path, capsys):
    """And the number of heads and the grid that are taken, which the file does not say."""
    taken, other = stock().state_dict(), build(class_token=True).state_dict()
    path = write(tmp_path / name, wrap(taken, other))
    read = read_weights(path).state
    assert read.keys() == taken.keys()
    assert all(torch.equal(read[key], taken[key]) for key in taken)
    start(run_of("model.class_token=true", f"init.weights={path}"), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"init.weights={path}", f"  source   {origin}", "  loaded     32"]
    assert lines[-2] == "  heads    not known from this file; model.num_heads=2 is taken"
    assert lines[-1] == "  grid     of positions not known from this file; 4x4 is taken"


def test_strict_refuses_anything_but_loaded(tmp_path):
    file = write(tmp_path / "vit.pth", stock().state_dict())
    start(run_of("model.class_token=true", f"init.weights={file}", "init.strict=true"), tmp_path)
    says = r"init\.strict=true, but not all is loaded as it is: 1 adapted \(pos_embed .*; 1 dropped \(cls_token\)$"
    with pytest.raises(UserError, match=says):
        start(run_of(f"init.weights={file}", "init.strict=true"), tmp_path)


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such run directory or checkpoint"),
        (b"\xff\xd8 a picture", "damaged, or no checkpoint"),
        (
            {"weight": Evil(), "state_dict": {}},
            "can be loaded safely (UnpicklingError: a pickle with a call of __builtin__.print; save the",
        ),
        ({"state_dict": {"epoch": 3}}, "holds no weights, but 'state_dict'"),
        ({"state_dict": {"\x1b[2J.weight": torch.zeros(1)}}, "holds no weights, but 'state_dict'"),
        (b"", "damaged, or no checkpoint"),
        ([1, 2], "holds a list"),
        (torch.zeros(3), "holds a Tensor"),
        ({"state": {}, "param_groups": []}, "holds 'state', 'param_groups' only"),
        (nn.Linear(1, 1), "a pickle with a call of "),
        ((2**62).to_bytes(8, "little") + b'{"a": 1}', "a header of more than"),
    ],
)
def test_other_files_are_refused_in_one_line(content, says, tmp_path, capsys):
    path = tmp_path / "file.pth"
    if content is not None:
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(UserError) as caught:
        read_weights(str(path))
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(path))
    ends = EXPECTED, "save its weights alone, with torch.save(model.state_dict(), FILE)"
    assert str(caught.value).endswith(ends)
    assert str(caught.value).isprintable()
    assert capsys.readouterr().out == ""


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "epoch_3.pth").touch()
    with pytest.raises(UserError, match=f"^{tmp_path}: no checkpoint there; {re.escape(EXPECTED)}$"):
        read_weights(str(tmp_path))


def test_a_name_of_timms_hub(monkeypatch):
    state, create = stock().state_dict(), timm.create_model
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: state)
    monkeypatch.setattr(timm, "create_model", lambda name, **options: create(name, **MODEL, **options))
    source = read_weights("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    assert source.state["pos_embed"].shape == (1, 17, 24)
    assert source.images == {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    assert source.origin == "a name of timm's hub"


def test_timms_errors_are_one_line():
    says = r"^init\.weights: timm:vit_tinny: timm cannot load it \(RuntimeError: Unknown model"
    with pytest.raises(UserError, match=says):
        start(run_of("init.weights=timm:vit_tinny"), Path("none"))


def test_images_normalised_otherwise_are_warned_of(tmp_path, capsys, monkeypatch):
    images = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}  # the quickstart has 0.5 for both
    monkeypatch.setattr(
        "engine.checkpoints.initial_weights.read_weights", lambda *_: Source(stock().state_dict(), images=images)
    )
    start(run_of("init.weights=timm:any"), tmp_path)
    hint = "warning: data.std is [0.5, 0.5, 0.5], that of these weights was [0.25, 0.25, 0.25]"
    assert capsys.readouterr().err == f"{hint}: data.std=[0.25, 0.25, 0.25] keeps it\n"


@pytest.mark.parametrize("name", [name for name, own in stated("LEARNED").items() if "key_positions" in own])
def test_positions_of_keys_are_resampled_as_images_of_the_grid(name):
    """The grid is the source model's, or a square if that is unknown."""
    source, model = (build(name, img_size=size) for size in ((32, 64), (48, 32)))
    table = torch.linspace(0, 1, 8)[:, None].expand(8, 4)  # a ramp down the columns of the source's 4 x 8 patches
    with torch.no_grad():
        source.blocks[0].attn.key_positions.table.copy_(table.mT.reshape(1, 32).expand(24, -1))
    outcome = fit(model, source.state_dict(), source)
    assert "blocks.0.attn.key_positions.table (24, 32) -> (24, 24)" in outcome["adapted"]
    rows = model.blocks[0].attn.key_positions.table[0].view(6, 4)
    assert torch.allclose(rows, rows[:1].expand(6, -1))  # the ramp runs along the rows, and all are the same
    assert (rows[0].diff() > 0.1).all()
    square, model = build(name, img_size=32), build(name, img_size=48)
    outcome = fit(model, square.state_dict())
    assert "blocks.0.attn.key_positions.table (24, 16) -> (24, 36)" in outcome["adapted"]


def test_positions_of_rows_and_columns_are_resampled_and_those_of_other_agents_are_left():
    agents = {"name": "agent", "num_landmarks": 4}
    source, model = (build(agents, img_size=size, class_token=True) for size in ((32, 64), (48, 32)))
    attn = source.blocks[0].attn
    with torch.no_grad():
        attn.row_positions.table.copy_(torch.arange(4.0).expand(16, -1))
        attn.column_positions.table.copy_(torch.arange(8.0).expand(16, -1))
    outcome, attn = fit(model, source.state_dict(), source), model.blocks[0].attn
    assert outcome["fresh"] == outcome["dropped"] == []
    assert (attn.row_positions.table.diff() > 0.4).all()  # 6 of 4
    assert (attn.column_positions.table.diff() > 1).all()  # 4 of 8
    square, model = build(agents), build(agents, img_size=48)
    adapted = fit(model, square.state_dict())["adapted"]
    assert {f"blocks.1.attn.{axis}_positions.table (16, 4) -> (16, 6)" for axis in ("row", "column")} < set(adapted)
    fresh = fit(build({**agents, "num_landmarks": 9}, img_size=48), square.state_dict())["fresh"]
    assert {name.split(".")[3] for name in fresh} == {"image_positions", "row_positions", "column_positions"}
