"""Checkpoints of the released code of EVA and LARA, read by the function that every command uses."""

import argparse
import functools
import json
import os
import sys
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from attention import AttentionFactory
from attention.options import parse_options
from engine.checkpoints.export import main as export
from engine.checkpoints.files import open_weights
from engine.checkpoints.format import ForeignObject
from engine.checkpoints.released import from_released_file
from engine.checkpoints.weight_sources import read_weights
from engine.checkpoints.weights import build_model
from engine.config.schema import Data
from engine.config.yaml_files import read_config
from engine.run.load import MissingOptions, parse_run
from engine.runtime.errors import UserError
from models import create_model, parse_model
from models.convert import from_released
from tests.models.test_released_models import CASES, LAYOUTS, MODELS, RELEASED
from tests.support.attention_in_full import resolve_attention
from tests.support.launcher import ROOT
from tests.support.refusals import refusal

WINDOWS = {"window_size": 7, "attn_2d": True, "overlap_window": False, "use_rpe": True}
EVA = {"attn_name": "eva", **WINDOWS, "num_landmarks": 49, "adaptive_proj": "default", "use_t5_rpe": False}
LARA = {"attn_name": "lara", "num_landmarks": 49, "mis_type": "mis-opt", "proposal_gen": "pool-mixed"}
LARA |= {"alpha_coeff": 2.0, "use_antithetics": False, "use_multisample": False}
EVA_FILE, PVT_FILE = "evit_d64_p8_eva.safetensors", "pvt_16-32-64-128_lara.safetensors"
GOLDEN = {
    EVA_FILE: {"model": "evit_d64_p8", "num_heads": 2, "data_set": "IMAGENET", **EVA},
    PVT_FILE: {"model": "pvt_16", "num_heads": [2, 4, 8, 16], "input_size": 224, "data_set": "IMAGENET", **LARA},
}


def golden(file: str) -> dict[str, Tensor]:
    """Weights, under the released names, and their logits."""
    return safetensors.torch.load_file(RELEASED / "models" / file)


def weights_of(file: str) -> dict[str, Tensor]:
    return {key.removeprefix("weight."): x for key, x in golden(file).items() if key.startswith("weight.")}


def write_released(path: Path, state: dict, arguments: dict | None, monkeypatch, **others) -> Path:
    """A file as that code writes it: arguments in a namespace of a class that only exists there, attention's in one
    inside it. `others` replace what the file holds.
    """
    library = types.ModuleType("efficient_attention")
    library.NestedNamespace = type("NestedNamespace", (argparse.Namespace,), {"__module__": library.__name__})
    content = {"model": state, "optimizer": {"state": {}}, "epoch": 299, "model_ema": None}
    if arguments is not None:
        nested = {key: x for key, x in arguments.items() if key != "attn_name" and key in {**EVA, **LARA}}
        own = {key: x for key, x in arguments.items() if key not in nested}
        attention, norm_layer = library.NestedNamespace(**nested), functools.partial(nn.LayerNorm, eps=1e-6)
        own |= {"norm_layer": norm_layer, "qkv_bias": (True,), "attn_args": attention, "attn_specific_args": attention}
        content["args"] = library.NestedNamespace(**own)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, library.__name__, library)
        torch.save(content | others, path)
    assert library.__name__ not in sys.modules
    return path


def read(path: Path, *overrides: str) -> nn.Module:
    """The model in a file, in float64."""
    found, checkpoint, _, _, kept = open_weights(path)
    assert [*kept] == ["plain"]
    return build_model(parse_run(checkpoint["config"], str(found), overrides), checkpoint["model"], "file").double()


def assert_logits(model: nn.Module, file: str):
    images = safetensors.torch.load_file(RELEASED / "models" / CASES[file]["images"])["x"].double()
    with torch.no_grad():
        logits = model.eval()(images)
    # The stored logits are float32: half a unit in the last place is 6e-8 of the value.
    atol = 3e-7 * CASES[file]["logits_absmax"]
    torch.testing.assert_close(logits, golden(file)["logits"].double(), rtol=0, atol=atol)


@pytest.mark.parametrize("file", [EVA_FILE, pytest.param(PVT_FILE, marks=pytest.mark.stress)])
def test_logits_are_those_of_the_released_code(file, tmp_path, monkeypatch):
    path = write_released(tmp_path / "ckpt.pth", weights_of(file), GOLDEN[file], monkeypatch)
    assert_logits(read(path), file)


def test_the_command_writes_an_ordinary_export(tmp_path, monkeypatch, capsys):
    path, exported = tmp_path / "ckpt.pth", tmp_path / "eva.safetensors"
    write_released(path, weights_of(EVA_FILE), GOLDEN[EVA_FILE], monkeypatch)
    export([str(path), str(exported)])
    assert capsys.readouterr().out == f"{exported}: the plain weights of {path}, of the model deit\n"
    checkpoint = open_weights(exported).checkpoint
    attention, data = checkpoint["config"]["attention"], checkpoint["config"]["data"]
    assert {"mu_scale": 0.5, "noise": "released", "position_bias": "table_released"}.items() <= attention.items()
    assert (data["crop_pct"], data["interpolation"]) == (0.875, "bicubic")
    assert (data["mean"], data["std"]) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert checkpoint["progress"]["epoch"] == 300
    assert_logits(read(exported), EVA_FILE)
    error = refusal(export, [tmp_path / "gone.pth", exported], capsys)
    assert error == f"error: {tmp_path / 'gone.pth'}: no such run directory or checkpoint\n"


MISSING = {
    "attn_name": None,  # shown by the weights
    "num_heads": "model.num_heads",
    "window_size": "attention.window_size",
    "attn_2d": "attention.layout",
    "overlap_window": "attention.overlap",
    "num_landmarks": "attention.num_landmarks",
    "data_set": "data.mean=... data.std",
}


@pytest.mark.parametrize(("argument", "option"), MISSING.items())
def test_an_option_that_is_not_in_the_file_must_be_given(argument, option, tmp_path, monkeypatch):
    args = {key: value for key, value in GOLDEN[EVA_FILE].items() if key != argument}
    path = write_released(tmp_path / "ckpt.pth", weights_of(EVA_FILE), args, monkeypatch)
    if option is None:
        return assert_logits(read(path), EVA_FILE)
    with pytest.raises(MissingOptions) as caught:
        read(path)
    problem = f"{path}: does not say all options, and none is guessed: give {option}=..."
    assert str(caught.value) == f"{problem} (python -m engine.checkpoints.export writes a file that says them)"


def test_weights_alone_load_with_every_option_given(tmp_path):
    """Also as an argument of the command. With other options they load as well, and give other numbers."""
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(weights_of(EVA_FILE), path)
    options = ["model.num_heads=2", "attention.window_size=7", "attention.num_landmarks=49"]
    options += ["attention.layout=2d", "attention.overlap=0", "data.mean=[0.5]", "data.std=[0.5]"]
    export([str(path), str(tmp_path / "export.safetensors"), *options])
    assert_logits(read(tmp_path / "export.safetensors"), EVA_FILE)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_logits(read(path, *options, "attention.mu_scale=1.0"), EVA_FILE)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"attn_2d": False}, "--attn-2d False: "),
        ({"attn_name": "performer"}, "--attn-name performer: this can be softmax, local, eva, lara only"),
        ({"num_heads": "\x1b[2J"}, "--num-heads \\x1b[2J: that is no int"),
    ],
)
def test_what_only_that_code_can_do_is_refused_by_name(args, says, tmp_path, monkeypatch):
    args, state = {**GOLDEN[EVA_FILE], **args}, weights_of(EVA_FILE)
    path = write_released(tmp_path / "ckpt.pth", state, args, monkeypatch)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: weights of the released code of EVA and LARA, with {says}")
    assert read_weights(str(path)).state.keys() == state.keys()  # a new run says itself what its model is


NAMES = {
    "evit_tiny_p16_eva.json": {"model": "evit_tiny_p16", "num_heads": 3, **EVA},
    "evit_tiny_p8_lara.json": {"model": "evit_tiny_p8", "num_heads": 3, **LARA},
    "pvt_medium2_eva.json": {"model": "pvt_medium2", "num_heads": [2, 4, 10, 16], "input_size": 224, **EVA},
    "pvt_medium2_lara_dense.json": {"model": "pvt_medium2", "num_heads": [2, 4, 10, 16], "input_size": 224, **LARA},
}


@pytest.mark.parametrize("file", NAMES)
def test_the_papers_models_are_those_of_our_configurations(file):
    layout, args = json.loads((RELEASED / "layouts" / file).read_text()), ForeignObject.__new__(ForeignObject)
    args.state = NAMES[file] | {"data_set": "IMAGENET"}
    state = {key: torch.empty(shape, device="meta") for key, shape in layout["shapes"].items()}
    checkpoint = from_released_file({"model": state, "args": args})
    found, ours = checkpoint["config"], read_config(ROOT / "configs" / LAYOUTS[file]).values
    assert parse_options(Data, found["data"]) == Data()
    name = found["model"].pop("name")
    img_size = to_2tuple(found["model"].pop("img_size"))
    assert (name, img_size) == (ours["model"]["name"], (224, 224))
    assert parse_model(name, found["model"]) == parse_model(name, {})
    used = [resolve_attention(name, options["attention"]) for options in (found, ours)]
    layers = [map(AttentionFactory.from_options, x if isinstance(x, list) else [x]) for x in used]
    assert all(a.config == b.config for a, b in zip(*layers, strict=True))
    assert checkpoint["classes"] == sorted(checkpoint["classes"])
    assert len(checkpoint["classes"]) == 1000


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_nothing_in_a_file_is_run(tmp_path, monkeypatch):
    """A call is refused in the place of the arguments and inside them."""
    canary, state = tmp_path / "canary", weights_of(EVA_FILE)
    call = Call(os.system, f"touch {canary}")
    hostile = [
        write_released(tmp_path / "1.pth", state, None, monkeypatch, args=call),
        write_released(tmp_path / "2.pth", state, {**GOLDEN[EVA_FILE], "extra": call}, monkeypatch),
        write_released(tmp_path / "3.pth", state, None, monkeypatch, args=Call(__import__, "antigravity")),
    ]
    for path in hostile:
        with pytest.raises(UserError, match=r"no checkpoint that can be loaded safely \(.*a call of") as caught:
            read(path)
        assert str(caught.value).isprintable()
    assert not canary.exists()
    assert "antigravity" not in sys.modules


def test_objects_are_read_without_their_classes_and_not_too_many(tmp_path, monkeypatch):
    many = types.ModuleType("many")
    monkeypatch.setitem(sys.modules, "many", many)
    for i in range(101):
        setattr(many, f"Class{i}", type(f"Class{i}", (), {"__module__": "many"}))
    objects = [getattr(many, f"Class{i}")() for i in range(101)]
    for object in objects:
        object.__class__.__init__ = object.__class__.__setattr__ = None  # would fail
    path = write_released(tmp_path / "1.pth", weights_of(EVA_FILE), GOLDEN[EVA_FILE], monkeypatch, extra=objects[:50])
    assert_logits(read(path), EVA_FILE)
    path = write_released(tmp_path / "2.pth", weights_of(EVA_FILE), GOLDEN[EVA_FILE], monkeypatch, extra=objects)
    with pytest.raises(UserError, match=r"cannot|no checkpoint that can be loaded safely"):
        read(path)


def test_fine_tuning_starts_from_it(tmp_path, monkeypatch):
    """Also without arguments: the run says what its model is."""
    name, attention, options = MODELS[EVA_FILE]
    with torch.device("meta"):
        expected = create_model(name, attention, **options).state_dict()
    for args in (GOLDEN[EVA_FILE], None):
        path = write_released(tmp_path / "ckpt.pth", weights_of(EVA_FILE), args, monkeypatch)
        state, model, images, *_ = read_weights(str(path))
        assert (model and model.grid, images.keys()) == (((14, 14), {"mean", "std"}) if args else (None, set()))
        assert from_released(state).keys() == expected.keys()
