"""Models of timm and transformers as models of a run: built, refused, trained, resumed, aligned, analysed, exported."""

import datetime
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
import transformers
import yaml
from timm.layers import resample_abs_pos_embed

import analyze
import predict
import train
import validate
from attention import OptionError
from engine.checkpoints.adapt import fit_weights, list_other_options
from engine.checkpoints.export import export
from engine.checkpoints.export import main as export_main
from engine.checkpoints.files import load_checkpoint
from engine.checkpoints.weight_sources import read_weights, source_of
from engine.config.objective_options import Distill
from engine.config.schema import Optim
from engine.objectives.alignment import Alignment
from engine.objectives.distillation import Teacher
from engine.run.load import dump_run, load_run, parse_run
from engine.runtime.errors import ConfigError, UserError
from engine.training.objective import read_teacher
from engine.training.optim import create_optimizer
from models import create_model, layer_contexts, replace_attention
from models.costs import count_costs
from models.freeze import freeze
from models.patches import conv_stem
from tests.analysis.models import read_rows
from tests.support.launcher import ROOT, use_few_images
from tests.support.refusals import refusal

EVA = {"name": "eva", "window_size": 2, "num_landmarks": 4}
VIT = {"name": "timm:vit_tiny_patch16_224", "img_size": 16, "num_classes": 10}
VIT["kwargs"] = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
SMALL |= {"image_size": 16, "patch_size": 4}
TYPES = ["vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "siglip", "clip", "ijepa", "vit_msn"]
RUN = {
    "model": VIT,
    "attention": EVA,
    "data": {"dataset": "digits", "workers": 0, "mean": [0.5], "std": [0.5]},
    "optim": {"lr": 0.002, "lr_base_size": 8, "layer_decay": 0.9},
    "schedule": {"epochs": 2, "warmup_epochs": 1},
    "train": {"total_batch_size": 8, "device": "cpu", "amp": None, "ema_decay": 0.9, "checkpoint_steps": 2},
}
"""Two epochs of six updates, on the 50 digits that the launcher leaves."""


def of_type(kind: str, **options) -> dict:
    """The option `model` of a small model of transformers."""
    sizes = {name: size for name, size in SMALL.items() if name != "intermediate_size" or "dinov2" not in kind}
    kwargs = {"model_type": kind, **({"vision_config": sizes} if kind in ("siglip", "clip") else sizes)}
    return {"name": "hf:anything", "num_classes": 5, "kwargs": kwargs, **options}


def write_run(path: Path, **sections) -> Path:
    path.write_text(yaml.safe_dump({**RUN, **sections}))
    return path


def write_state(path: Path, model: torch.nn.Module) -> str:
    torch.save(model.state_dict(), path)
    return str(path)


def images(size=(16, 16), count=2) -> torch.Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))


def logits(model: dict, attention, size=(16, 16)) -> torch.Tensor:
    torch.manual_seed(0)
    return create_model(attention=attention, **model).eval()(images(size))


@pytest.mark.parametrize("model", [VIT, of_type("vit"), of_type("dinov2", img_size=[16, 24])], ids=str)
def test_softmax_and_null_are_the_host_itself(model):
    size = (16, 24) if model.get("img_size") == [16, 24] else (16, 16)
    own = logits(model, None, size)
    assert own.std() > 0
    assert torch.equal(own, logits(model, "softmax", size))
    assert not torch.equal(own, logits(model, "mean", size))
    if model is VIT:
        torch.manual_seed(0)
        assert torch.equal(
            own, timm.create_model(VIT["name"][5:], num_classes=10, img_size=16, **VIT["kwargs"]).eval()(images())
        )


@pytest.mark.parametrize("kind", TYPES)
def test_families_of_transformers(kind):
    """Logits at another size than the weights', costs, contexts, and gradients of every weight that is trained."""
    model = of_type(kind, img_size=[16, 24])
    network = create_model(attention=EVA, **model)
    y = network(images((16, 24)))
    assert y.shape == (2, 5)
    y.sum().backward()
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert {name for name, weight in network.named_parameters() if weight.grad is not None} == trained
    assert any(".core." in name for name in trained)
    contexts = layer_contexts("hf:anything", {key: x for key, x in model.items() if key != "name"})
    assert [context.grid for context in contexts] == [(4, 6)] * 2
    assert count_costs(model, "softmax").macs > count_costs(model, {"name": "linear"}).macs
    assert {name for name in network.no_weight_decay() if name.endswith("position_bias.table")}
    assert torch.equal(pickle.loads(pickle.dumps(network)).eval()(images((16, 24))), network.eval()(images((16, 24))))


def test_any_model_of_timm_is_trained_with_its_own_attention(tmp_path):
    """One without attention too; a mechanism has no place there."""
    model = {"name": "timm:resnet18", "img_size": 32, "num_classes": 10}
    run = load_run(write_run(tmp_path / "x.yaml", model=model, attention=None))
    assert run.attention is None
    assert create_model(attention=None, **run.model)(images((32, 32))).shape == (2, 10)
    with pytest.raises(ConfigError, match="no attention among its tokens"):
        load_run(write_run(tmp_path / "x.yaml", model=model))


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"name": "timm:vit_tinny_patch16_224"}, "did you mean 'timm:vit_tiny_patch16_224'"),
        ({"name": "timm:deit_tiny_p8"}, "leave out 'timm:'"),
        ({"name": "timm:vit_tiny_patch16_224.nobody"}, "Invalid pretrained tag"),
        ({"name": "timm:hf-hub:timm/vit_tiny_patch16_224"}, "no architecture of timm"),
        ({**VIT, "depth": 3}, r"model\.depth: unknown option of timm:.*model\.kwargs"),
        ({**VIT, "kwargs": {"pretrained": True}}, r"model\.kwargs\.pretrained"),
        ({**of_type("vit"), "kwargs": {**SMALL, "model_type": "vit", "num_labels": 3}}, r"model\.kwargs\.num_labels"),
        ({**VIT, "kwargs": {"embed_dim": 25}}, "cannot be built"),
        ({**VIT, "kwargs": {"depth": 10**9}}, r"depth = 1000000000: expected .* numbers up to 1048576"),
        ({**VIT, "kwargs": {"embed_dim": 3 * 2**17}}, "parameters, or"),
        ({**VIT, "drop_path_rate": 0.1}, r"model\.drop_path_rate: unknown option of timm:.*belong in model\.kwargs"),
        (of_type("vit_mae"), "no type of models that is taken"),
        ({**of_type("vit"), "kwargs": {**SMALL, "model_type": ["vit"]}}, "no type of models that is taken"),
        ({**of_type("vit"), "kwargs": {**SMALL, "model_type": "vit", "image_size": "abc"}}, "image_size = 'abc'"),
        ({**of_type("siglip"), "kwargs": {"model_type": "siglip", "vision_config": 3}}, "expected a mapping"),
        ({**VIT, "kwargs": {"foo": datetime.date(2020, 1, 1)}}, "expected text, a mapping, or numbers"),
        (
            {**of_type("siglip"), "kwargs": {"model_type": "siglip", "vision_config": {"_attn_implementation": "x/y"}}},
            "leave it out",
        ),
        (
            {**of_type("vit"), "kwargs": {**SMALL, "model_type": "vit", "auto_map": {"AutoConfig": "x.y"}}},
            "leave it out",
        ),
    ],
)
def test_refusals(tmp_path, model, problem):
    path = write_run(tmp_path / "x.yaml", model=model, attention="softmax")
    with pytest.raises(ConfigError, match=problem) as caught:
        load_run(path)
    assert "\n" not in str(caught.value)


def test_a_host_has_none_of_the_models_options_of_a_base(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"base": str(ROOT / "configs/quickstart.yaml"), "model": VIT, "attention": EVA}))
    run = load_run(path)
    assert run.model["kwargs"] == VIT["kwargs"]
    assert run.data.dataset == "digits"
    path.write_text(yaml.safe_dump({"base": str(write_run(tmp_path / "base.yaml")), "model": {"img_size": 24}}))
    assert load_run(path).model["img_size"] == 24


def test_a_name_that_cannot_be_fetched_is_refused_beside_the_data(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "nothing"
    path = write_run(tmp_path / "x.yaml", model={"name": f"hf:{folder}"}, data={"dataset": "folder", "root": "/none"})
    message = refusal(train.main, [path, "--output", tmp_path / "run"], capsys)
    ours, of_data = message.splitlines()
    assert "has no configuration" in ours
    assert "data.root: no directory '/none'" in of_data
    assert not (tmp_path / "run").exists()


def test_without_the_package_a_host_of_transformers_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError, match=r"models of hf: need the package transformers; pip install .*\[hf\]"):
        create_model(**of_type("vit"))


def test_a_classifier_of_a_folder_loads_and_is_matched_by_its_classes(tmp_path):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("vit", **SMALL, id2label={n: f"bird {n}" for n in range(7)})
    there = transformers.ViTForImageClassification(config).eval()
    there.save_pretrained(tmp_path / "vit")
    name = f"hf:{tmp_path / 'vit'}"
    source = read_weights(name)
    assert source.classes == [f"bird {n}" for n in range(7)]
    model = create_model(name, num_classes=7, attention="softmax").eval()
    taken, outcome = fit_weights(model, source, "x")
    assert not outcome["fresh"] | outcome["re-made"] | outcome["dropped"]
    model.load_state_dict(taken)
    assert torch.equal(model(images()), there(images()).logits)
    teacher = read_teacher(name, load_run(write_run(tmp_path / "x.yaml")))
    assert torch.equal(teacher(images()), there(images()).logits)
    assert teacher.classes == source.classes
    assert "not known" in teacher.note
    transformers.ViTImageProcessor(image_mean=0.1, image_std=[0.2] * 3).save_pretrained(tmp_path / "vit")
    larger = {**VIT, "img_size": 32}
    teacher = read_teacher(name, load_run(write_run(tmp_path / "y.yaml", model=larger)))
    assert (teacher.shape, teacher.note) == ((3, 16, 16), "")
    pixels = torch.randn(2, 3, 32, 32)
    expected = there(((pixels / 2 + 0.5) - 0.1) / 0.2, interpolate_pos_encoding=True).logits
    torch.testing.assert_close(teacher(pixels), expected)
    _, outcome = fit_weights(create_model(name, num_classes=3), source, "x")
    assert [*outcome["re-made"]] == ["classifier.weight", "classifier.bias"]


@pytest.mark.parametrize("kind", ["siglip", "clip"])
def test_a_model_of_images_and_texts_is_its_vision_model(tmp_path, kind):
    """With its trained pooling; options are added to those of the folder, and one that differs from it is said."""
    config = transformers.AutoConfig.for_model(kind, vision_config=SMALL)
    there = transformers.AutoModel.from_config(config).eval()
    there.save_pretrained(name := str(tmp_path / kind))
    model = {"name": f"hf:{name}", "num_classes": 0}
    run = load_run(write_run(tmp_path / "x.yaml", model=model, attention=None))
    network, source = create_model(attention=None, **run.model).eval(), read_weights(f"hf:{name}")
    network.load_state_dict(fit_weights(network, source, "x")[0])
    assert torch.equal(network(images()), there.vision_model(images()).pooler_output)
    assert list_other_options(source.model, network, False) == []
    model["kwargs"] = {"hidden_act": "relu", "num_attention_heads": 2}
    changed = create_model(
        attention=None, **load_run(write_run(tmp_path / "x.yaml", model=model, attention=None)).model
    )
    (line,) = list_other_options(source.model, changed, False)
    assert re.match(r".*activation_fn.*: ReLU\(\) here, \w*GELU\w*\(\) in the model of these weights", line)
    with pytest.raises(UserError, match=r"num_heads=3, but model\.num_heads=2"):
        fit_weights(changed, source, "x")


def test_images_that_a_model_does_not_take_are_refused_with_its_own_attention(tmp_path):
    model = {"name": "timm:crossvit_tiny_240", "img_size": 64, "num_classes": 3}
    with pytest.raises(ConfigError, match=r"img_size = 64: .* refuses images"):
        load_run(write_run(tmp_path / "x.yaml", model=model, attention=None))


def test_a_file_fetches_no_configuration(tmp_path, monkeypatch):
    """A checkpoint may be a stranger's: it chooses no host and no folder."""
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *args, **kwargs: pytest.fail("fetched"))
    with pytest.raises(ConfigError, match="model_type"):
        parse_run({**RUN, "model": {"name": "hf:somebody/something"}}, "x")


def test_a_folder_of_transformers_gives_configuration_and_weights(tmp_path):
    """The run then needs it no more; a classifier of other classes is made anew, and what no file has is no weight."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("dinov2", **SMALL)
    there = transformers.AutoModel.from_config(config).eval()
    there.save_pretrained(tmp_path / "dino")
    run = load_run(write_run(tmp_path / "x.yaml", model={"name": f"hf:{tmp_path / 'dino'}"}, attention="softmax"))
    assert run.model["kwargs"]["hidden_size"] == 24
    assert run.model["img_size"] == (16, 16) or run.model["img_size"] == [16, 16]
    source = read_weights(f"hf:{tmp_path / 'dino'}")
    assert not any("classifier" in name for name in source.state)
    there_again = dump_run(run)
    for path in sorted((tmp_path / "dino").iterdir()):
        path.unlink()
    again = parse_run(there_again, "x")
    model = create_model(attention=again.attention, **again.model).eval()
    taken, outcome = fit_weights(model, source, "x")
    assert {*outcome["fresh"]} == {"classifier.weight", "classifier.bias"}
    model.load_state_dict(taken, strict=False)
    tokens = model.dinov2(images()).last_hidden_state
    assert torch.equal(tokens, there(images()).last_hidden_state)


def test_rates_of_dropping_are_no_other_options():
    one, other = (of_type("dinov2", num_classes=0) for _ in range(2))
    other["kwargs"] = {**other["kwargs"], "drop_path_rate": 0.1, "hidden_dropout_prob": 0.1}
    assert list_other_options(create_model(**one), create_model(**other), False) == []


def test_a_masked_autoencoder_is_its_encoder(tmp_path):
    torch.manual_seed(1)
    decoder = {"decoder_hidden_size": 24, "decoder_num_attention_heads": 3, "decoder_num_hidden_layers": 1}
    config = transformers.ViTMAEConfig(**SMALL, **decoder, mask_ratio=0.0)
    there = transformers.ViTMAEForPreTraining(config).eval()
    there.save_pretrained(tmp_path / "mae")
    name = f"hf:{tmp_path / 'mae'}"
    model = create_model(name, num_classes=3, attention="softmax").eval()
    taken, outcome = fit_weights(model, read_weights(name), "x")
    assert {*outcome["fresh"]} == {"classifier.weight", "classifier.bias"}
    model.load_state_dict(taken, strict=False)
    tokens = there.vit(images(), noise=torch.arange(16).expand(2, 16)).last_hidden_state  # patches in their order
    torch.testing.assert_close(model.vit(images()).last_hidden_state, tokens)


def test_weights_of_timm_are_resampled_and_those_of_another_architecture_refused(tmp_path):
    """Position embeddings and channels as by timm; projections are the host's, the mechanism's weights fresh."""
    torch.manual_seed(1)
    there = timm.create_model(VIT["name"][5:], num_classes=10, img_size=16, **VIT["kwargs"])
    source = read_weights(write_state(tmp_path / "vit.pth", there))
    model = create_model(attention=EVA, **{**VIT, "img_size": 24, "in_chans": 1})
    taken, outcome = fit_weights(model, source, "x")
    assert {*outcome["adapted"]} == {"pos_embed", "patch_embed.proj.weight"}
    assert all(".core." in name for name in outcome["fresh"])
    assert taken["pos_embed"].shape == (1, 37, 24)
    assert not outcome["dropped"] | outcome["re-made"]
    grey = read_weights(write_state(tmp_path / "grey.pth", create_model(attention=EVA, **{**VIT, "in_chans": 1})))
    assert "patch_embed.proj.weight" in fit_weights(create_model(attention=EVA, **VIT), grey, "x")[1]["adapted"]
    with pytest.raises(UserError, match="another architecture"):
        fit_weights(create_model(attention=EVA, **{**VIT, "kwargs": {**VIT["kwargs"], "depth": 3}}), source, "x")


def test_position_embeddings_of_a_grid_that_is_no_square_are_resampled_from_it():
    run = parse_run({**RUN, "model": {**VIT, "img_size": [16, 32]}}, "x")
    there = create_model(attention=EVA, **run.model)
    for size in ([16, 32], [32, 16], [32, 64], [24, 24]):
        here = create_model(attention=EVA, **{**VIT, "img_size": size})
        taken, _ = fit_weights(here, source_of(run, there.state_dict()), "x")
        expected = resample_abs_pos_embed(there.pos_embed, here.patch_embed.grid_size, (4, 8))
        assert torch.equal(taken["pos_embed"], expected)
    assert torch.equal(taken["pos_embed"][:, 0], there.pos_embed[:, 0])


def test_groups_of_layer_decay_and_the_frozen_backbone():
    for model, head in ((VIT, "head"), (of_type("vit"), "classifier")):
        network = create_model(attention=EVA, **model)
        groups = create_optimizer(network, Optim(layer_decay=0.5), 16).param_groups
        assert len({group["lr_scale"] for group in groups}) == 4  # stem, two blocks, head
        kept = {name for name, _ in network.named_parameters()} - {*freeze(network, "backbone")}
        assert kept == {f"{head}.weight", f"{head}.bias"}


def run_training(output: Path, **sections) -> Path:
    """Trains RUN with other sections, and returns its directory."""
    with pytest.MonkeyPatch.context() as patch:
        use_few_images(50, 24, patch.setattr)
        train.main([str(write_run(output.with_suffix(".yaml"), **sections)), "--output", str(output)])
    return output


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    """A trained run of a ViT of timm with softmax attention."""
    return run_training(tmp_path_factory.mktemp("hosted") / "run", attention="softmax")


def test_a_run_without_a_mechanism_is_validated_exported_and_not_analysed(tmp_path, capsys):
    """A model without attention; one with its own is analysed as what computes the same."""
    resnet = {"name": "timm:resnet10t", "img_size": 32, "num_classes": 10, "kwargs": {"channels": [8, 8, 8, 8]}}
    short = {"optim": {"lr": 0.002, "lr_base_size": 8}, "schedule": {"epochs": 1, "warmup_epochs": 0}}
    for name, model in {"resnet": resnet, "vit": VIT}.items():
        run_training(tmp_path / name, model=model, attention=None, **short)
    validate.main([str(tmp_path / "resnet")])
    export_main([str(tmp_path / "resnet"), str(tmp_path / "x.safetensors")])
    predict.main([str(tmp_path / "x.safetensors"), str(ROOT / "reference/bag.png")])
    assert "bag.png" in capsys.readouterr().out
    arguments = ["--images", "4", "--draws", "1", "--attention", "softmax", "--output", tmp_path / "out"]
    assert "attention=softmax" in refusal(analyze.main, ["replace", tmp_path / "vit", *arguments], capsys)
    analyze.main([*map(str, ["replace", tmp_path / "vit", "attention=softmax", *arguments])])
    assert float(read_rows(tmp_path / "out/replace.csv")[0]["change"]) == 0


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.complete)])
@pytest.mark.parametrize(
    "model", [VIT, pytest.param(of_type("clip", num_classes=10), marks=pytest.mark.complete)], ids=["timm", "hf"]
)
def test_a_killed_run_ends_in_the_same_bits(fork_server, tmp_path, model, ranks):
    config, kill = str(write_run(tmp_path / "x.yaml", model=model)), ("engine.training.optim.ModelEmaV3.update", 8)
    for name, faults in {"whole": {}, "killed": {0: [(*kill, "SIGKILL")]}}.items():
        command = [config, "--output", str(tmp_path / name)]
        statuses, _ = fork_server.run(command, tmp_path / "log", faults=faults, ranks=ranks)
        assert (statuses[0] == 0) is not bool(faults)
    assert fork_server.run(command, tmp_path / "log", ranks=ranks)[0] == [0] * ranks
    whole, resumed = (
        load_checkpoint(sorted((tmp_path / name).glob("step_12*.pt"))[-1]) for name in ("whole", "killed")
    )
    for weights in ("model", "model_ema"):
        assert whole[weights].keys() == resumed[weights].keys()
        assert all(torch.equal(x, resumed[weights][key]) for key, x in whole[weights].items())


def test_validation_prediction_and_exports(run_directory, tmp_path, capsys):
    validate.main([str(run_directory), "data.dataset=digits"])
    assert "top-1" in capsys.readouterr().out
    validate.main([str(run_directory), "data.dataset=digits", "model.img_size=24"])
    assert "resampled: pos_embed" in "".join(capsys.readouterr())
    path = sorted(run_directory.glob("step_12*.pt"))[-1]
    checkpoint = load_checkpoint(path)
    run = parse_run(checkpoint["config"], "x")
    export(str(tmp_path / "x.safetensors"), run, checkpoint, "plain")
    (tmp_path / "image.png").write_bytes((ROOT / "reference/bag.png").read_bytes())
    predict.main([str(tmp_path / "x.safetensors"), str(tmp_path / "image.png")])
    assert "image.png" in capsys.readouterr().out
    onnx = pytest.importorskip("onnx")
    assert "differs by" in export(str(tmp_path / "x.onnx"), run, checkpoint, "plain")
    metadata = onnx.load(tmp_path / "x.onnx").metadata_props
    assert json.loads({each.key: each.value for each in metadata}["config.json"])["architecture"] == VIT["name"]
    with pytest.raises(UserError, match="cannot describe timm:"):
        export(f"{tmp_path}/timm/", run, checkpoint, "plain")


MECHANISMS = {
    "eva": {"window_size": 7, "num_landmarks": 49},
    "lara": {"num_landmarks": 49},
    "performer": {},
    "linear": {},
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_reference_model_in_timms_vision_transformer_is_our_own(name):
    """Its logits, and the loss and all gradients of alignment, are ours to the bit: what the page says of our model, it
    says of timm's."""
    path = ROOT / "reference/fashion_mnist.safetensors"
    checkpoint = load_checkpoint(path)
    run = parse_run(checkpoint["config"], "x")
    options = {"img_size": 56, "patch_size": 4, "in_chans": 1, "num_classes": 10, "embed_dim": 48, "depth": 3}
    options |= {"num_heads": 3, "class_token": False, "global_pool": "avg", "fc_norm": False}

    def of_timm() -> torch.nn.Module:
        model = timm.models.VisionTransformer(**options)
        model.patch_embed.proj = conv_stem(1, 48, 4)
        return model

    attention, pixels, found = {"name": name, **MECHANISMS[name]}, torch.randn(2, 1, 56, 56), []
    for is_ours in (True, False):
        torch.manual_seed(0)
        if is_ours:
            teacher, student = (create_model(attention=each, **run.model) for each in ("softmax", attention))
        else:
            teacher, student = replace_attention(of_timm(), "softmax"), replace_attention(of_timm(), attention)
        teacher.load_state_dict(checkpoint["model"])
        assert not student.load_state_dict(checkpoint["model"], strict=False).unexpected_keys
        state = {key.replace(".attn.core.", ".attn."): x for key, x in student.state_dict(keep_vars=True).items()}
        torch.manual_seed(1)
        for key in sorted(state.keys() - checkpoint["model"].keys()):
            torch.nn.init.normal_(state[key], std=0.2)
        images = Teacher(teacher, (), None, *[((0.0,), (1.0,))] * 2)
        objective = Alignment(
            torch.nn.Identity(), Distill(teacher="init.weights", type="attention"), student.eval(), images
        )
        loss = objective(objective.fitted, pixels, torch.empty(0))
        loss.backward()
        gradients = {key: x.grad for key, x in state.items() if x.grad is not None}
        found.append({"teacher": teacher(pixels), "logits": student(pixels), "loss": loss, **gradients})
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert {f"blocks.{n}.attn.{part}.weight" for n in range(3) for part in ("qkv", "proj")} < ours.keys()
    assert not torch.equal(ours["teacher"], ours["logits"])
    assert all(torch.equal(x, theirs[key]) for key, x in ours.items())


def test_alignment_of_a_run(run_directory, tmp_path):
    """By train.py, with the teacher of init.weights; the error of the first layers falls."""
    sections = {
        "init": {"weights": str(run_directory)},
        "distill": {"teacher": "init.weights", "type": "attention", "alpha": 1.0},
    }
    run_training(tmp_path / "run", **sections, attention={**EVA, "num_landmarks": 1})
    losses = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in losses if "error_0" in record]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("question", ["replace", "maps", pytest.param("error", marks=pytest.mark.complete), "search"])
def test_analyses(run_directory, tmp_path, capsys, question):
    """Softmax in the place of softmax changes nothing, and another mechanism something."""
    arguments = {
        "replace": ["data.dataset=digits", "--images", "20", "--draws", "1", "--align", "2"],
        "maps": [str(ROOT / "reference/bag.png")],
        "error": ["data.dataset=digits", "--images", "4", "--draws", "1", "--budgets", "16", "--temperatures", "1"],
        "search": ["data.dataset=digits", "--images", "20", "--align", "2", "--budget", "macs=0.97"],
    }
    names = ["linear"] if question == "search" else ["softmax", "linear"]
    output = ["--output", str(tmp_path / "out")]
    analyze.main([question, str(run_directory), *arguments[question], "--attention", *names, *output])
    out = capsys.readouterr().out
    assert "linear" in out
    if question == "replace":
        softmax, linear = read_rows(tmp_path / "out/replace.csv")
        assert float(softmax["error"]) == float(softmax["change"]) == 0
        assert float(linear["error"]) > 0
        assert float(linear["aligned_output_error"]) != float(linear["output_error"])
