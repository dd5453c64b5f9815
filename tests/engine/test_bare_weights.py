"""Exports of weights of other programs; test_released.py has the released code's."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch
import yaml
from timm.utils import ParseKwargs

from engine.checkpoints.export import main as export
from engine.checkpoints.weight_sources import read_weights
from engine.evaluation.inference import load
from tests.support.refusals import refusal

PAGE = Path(__file__).parents[2] / "docs/integration.md"
SIZES = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 3}


@pytest.fixture
def stock(tmp_path):
    """A model of timm, its checkpoint as timm's train.py writes it, and the configuration of the same model of ours."""
    model = timm.create_model("vit_tiny_patch16_224", **SIZES).eval()
    torch.save({"arch": "vit_tiny_patch16_224", "state_dict": model.state_dict()}, tmp_path / "last.pth.tar")
    options = {"name": "deit_tiny_p16", "class_token": True, **SIZES}
    run = {"model": options, "attention": {"name": "softmax"}, "data": {"crop_pct": 1.0}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run))
    return model


def test_weights_of_timm_become_an_export(stock, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    export(["last.pth.tar", "out.safetensors", "--config", "config.yaml", "data.interpolation=bilinear"])
    printed = capsys.readouterr().out
    assert f"loaded  {len(stock.state_dict()):>5}\n" in printed
    assert printed.endswith("out.safetensors: the weights of last.pth.tar, of the model deit_tiny_p16\n")
    trained = load("out.safetensors")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(trained.model(images), stock(images))
    assert "bilinear" in str(trained.transform)


@pytest.mark.parametrize(("choice", "taken"), [([], 1), (["--weights", "ema"], 1), (["--weights", "plain"], 0)])
def test_either_kind_of_weights_is_exported(choice, taken, stock, tmp_path):
    plain, path, out = stock.state_dict(), tmp_path / "both.pth.tar", tmp_path / "out.safetensors"
    averaged = {name: x + 1 for name, x in plain.items()}
    torch.save({"arch": "vit_tiny_patch16_224", "state_dict": plain, "state_dict_ema": averaged}, path)
    export([str(path), str(out), "--config", str(tmp_path / "config.yaml"), *choice])
    assert torch.equal(load(out).model.norm.bias, (plain, averaged)[taken]["norm.bias"])


def test_a_directory_of_timms_own_architecture_is_read_as_its_file(stock, tmp_path):
    """With heads and means, as by the name that timm has for it."""
    timm.models.save_for_hf(stock, tmp_path / "hub", model_args=SIZES)
    source = read_weights(str(tmp_path / "hub"))
    assert (source.model.blocks[0].attn.num_heads, source.images["mean"]) == (2, [0.5] * 3)
    export([str(tmp_path / "hub"), str(tmp_path / "out.safetensors"), "--config", str(tmp_path / "config.yaml")])
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(load(tmp_path / "out.safetensors").model(images), stock(images))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--config", "config.yaml", "model.num_classes=4"], "not all is loaded as it is: 2 re-made (head.weight,"),
        (
            ["--config", "config.yaml", "attention={name: xca}"],
            "not all is loaded as it is: 1 fresh (blocks.0.attn.temperature",
        ),
        (["--config", "config.yaml", "model.depth=2"], "weights of another architecture (12 missing: blocks.1"),
        (["--config", "config.yaml", "--weights", "ema"], "last.pth.tar: holds no ema weights"),
        ([], "engine.checkpoints.export last.pth.tar FILE.safetensors --config CONFIG.yaml` makes one of it, where"),
    ],
)
def test_other_weights_than_those_of_the_configuration_are_refused(
    arguments, problem, stock, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert problem in refusal(export, ["last.pth.tar", "out.safetensors", *arguments], capsys)
    assert not (tmp_path / "out.safetensors").exists()


def test_other_options_than_those_of_timms_training_are_refused_with_the_overrides_to_add(stock, tmp_path, capsys):
    """The file states them for `init.weights` too, which compares the heads and the means."""
    images = {"mean": [0.5], "std": [0.25, 0.5, 0.5], "crop_pct": 1.0, "interpolation": "bilinear"}
    args = argparse.Namespace(gp="avg", img_size=32, in_chans=None, model_kwargs={"num_heads": 4, "depth": 1}, **images)
    path = str(tmp_path / "stated.pth.tar")
    torch.save({"arch": "vit_tiny_patch16_224", "args": args, "state_dict": stock.state_dict()}, path)
    source = read_weights(path)
    assert (source.num_heads, source.images) == (4, {"mean": [0.5] * 3, "std": [0.25, 0.5, 0.5]})
    unset = argparse.Namespace(gp=None, img_size=None, model_kwargs={}, mean=None, crop_pct=None, interpolation="")
    other, out, config = (str(tmp_path / name) for name in ("unset.pth.tar", "unset.safetensors", "config.yaml"))
    torch.save({"arch": "vit_tiny_patch16_224", "args": unset, "state_dict": stock.state_dict()}, other)
    export([other, out, "--config", config])
    command = [path, str(tmp_path / "out.safetensors"), "--config", str(tmp_path / "config.yaml")]
    line = refusal(export, command, capsys)
    assert "timm's train.py had model.global_pool=avg (not token), model.num_heads=4 (not 2), data.mean=" in line
    added = shlex.split(line.partition("; add ")[2].removesuffix(" to the command\n"))
    assert [text.partition("=")[0] for text in added] == [
        *("model.global_pool", "model.num_heads", "data.mean", "data.std", "data.interpolation")
    ]
    export([*command, *added])
    assert "heads" not in capsys.readouterr().out
    assert load(tmp_path / "out.safetensors").model.blocks[0].attn.num_heads == 4


def test_options_of_a_host_are_those_of_timms_training(tmp_path, capsys):
    sizes = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
    kwargs = {**sizes, "act_layer": "quick_gelu"}
    trained = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, **kwargs)
    args = argparse.Namespace(img_size=32, model_kwargs=kwargs)
    torch.save({"arch": "vit_tiny_patch16_224", "args": args, "state_dict": trained.state_dict()}, tmp_path / "x.tar")
    model = {"name": "timm:vit_small_patch16_224", "img_size": 32, "num_classes": 5, "kwargs": sizes}
    (tmp_path / "host.yaml").write_text(yaml.safe_dump({"model": model, "attention": None}))
    command = [str(tmp_path / name) for name in ("x.tar", "x.safetensors")] + ["--config", str(tmp_path / "host.yaml")]
    line = refusal(export, command, capsys)
    assert "had model.kwargs.act_layer=quick_gelu (not None), model.name=timm:vit_tiny_patch16_224 (not timm:vi" in line
    export(command + shlex.split(line.partition("; add ")[2].removesuffix(" to the command\n")))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(load(tmp_path / "x.safetensors").model(images), trained.eval()(images))


def test_a_configuration_for_weights_that_have_one_is_refused(stock, tmp_path, capsys):
    out, config = str(tmp_path / "out.safetensors"), str(tmp_path / "config.yaml")
    export([str(tmp_path / "last.pth.tar"), out, "--config", config])
    error = refusal(export, [out, tmp_path / "again.safetensors", "--config", config], capsys)
    assert "has its own configuration; leave --config out; options are key.path=value\n" in error


@pytest.fixture(scope="module")
def by_timm(tmp_path_factory):
    """A checkpoint as timm's train.py writes it for the command on the page, and the arguments to export it."""
    text = re.sub(r"\s*#.*", "", PAGE.read_text())
    (train,) = re.findall(r"^python -m models (timm/train.py .*) \.\.\.$", text, re.MULTILINE)
    (command,) = re.findall(r"^python -m engine.checkpoints.export \S+ \S+ (.*)$", text, re.MULTILINE)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    args, _ = parser.parse_known_args(shlex.split(train))
    model = timm.create_model(args.model, **args.model_kwargs).eval()
    path = tmp_path_factory.mktemp("timm") / "model_best.pth.tar"
    torch.save({"arch": args.model, "args": args, "state_dict": model.state_dict()}, path)
    return model, str(path), shlex.split(command)


@pytest.mark.complete
def test_the_commands_on_the_page_fit_each_other(by_timm, tmp_path):
    model, path, command = by_timm
    export([path, str(tmp_path / "eva.safetensors"), *command])
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "eva.safetensors").model(images), model(images))


def test_another_attention_than_that_of_timms_training_is_refused(by_timm, tmp_path, capsys):
    """Weights fit other options too, such as another scale."""
    _, path, command = by_timm
    for options in ([], ["attention={name: eva, mu_scale: 0.5}"]):
        line = refusal(export, [path, tmp_path / "x.safetensors", *command[:2], *options], capsys)
        assert f"{path}: timm's train.py had attention." in line
        assert "mu_scale=1.0 (not 0.5)" in line
        assert line.endswith("; add 'attention=\"eva\"' to the command\n")
    assert not list(tmp_path.iterdir())
