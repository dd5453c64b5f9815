"""Exports of a checkpoint to timm and ONNX Runtime, and the files that a failed export leaves."""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from timm.layers import to_2tuple

import models
from attention import ATTENTION
from engine.checkpoints import export as export_module
from engine.checkpoints.adapt import restore_model
from engine.checkpoints.export import check_target, export, main, to_onnx
from engine.checkpoints.files import open_weights, save_checkpoint, trained_config
from engine.checkpoints.local_dir import describe_model
from engine.checkpoints.progress import Progress
from engine.checkpoints.weight_sources import read_weights
from engine.evaluation.inference import load
from engine.run.load import dump_run, parse_run
from engine.runtime.errors import ConfigError, UserError
from engine.runtime.ownership import MARKER, claim
from tests.support.facts import FACTS

PAGE = Path(__file__).parents[2] / "docs/validation.md"
EVA = {"name": "eva", "window_size": 2, "num_landmarks": 4}
DEIT = {"name": "deit", "img_size": [24, 16], "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3}
PVT = {
    **{"name": "pvtv2_b0", "img_size": 64, "embed_dims": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
    **{"num_heads": [1, 1, 2, 2], "mlp_ratios": [1, 1, 1, 1]},
}
DATA = {"crop_mode": "squash", "crop_pct": 0.9, "interpolation": "bilinear", "mean": [0.1, 0.2, 0.3], "std": [0.5]}
HYBRID = [{"blocks": "0, 2", **EVA}, {"blocks": 1, "name": "softmax"}]
CLASSES = ["tench", "über", "house,\n3"]


def trained(model: dict, attention="softmax") -> dict:
    """A checkpoint of a model that has learned random numbers."""
    model = {**model, "num_classes": len(CLASSES), "init_std": 0.2} if model["name"] == "deit" else model
    run = parse_run({"model": {"num_classes": len(CLASSES), **model}, "attention": attention, "data": DATA}, "x")
    torch.manual_seed(0)
    state = models.create_model(attention=run.attention, **run.model).state_dict()
    metadata = {"config": dump_run(run), "processes": 1, "images": 9, "progress": asdict(Progress(epoch=7))}
    return metadata | {"classes": CLASSES, "model": state}


def model_of(checkpoint: dict) -> torch.nn.Module:
    run = parse_run(checkpoint["config"], "x")
    model = models.create_model(attention=run.attention, **run.model).eval()
    model.load_state_dict(checkpoint["model"])
    return model


def export_plain(target: str, checkpoint: dict) -> str:
    return export(target, parse_run(checkpoint["config"], "x"), checkpoint, "plain")


@torch.no_grad()
def outputs(model: torch.nn.Module, batch: int = 2) -> torch.Tensor:
    size = model.in_chans, *to_2tuple(model.config.img_size)
    return model(torch.randn(batch, *size, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("model", "attention"),
    [
        ({**DEIT, "in_chans": 1, "class_token": True, "drop_path_rate": 0.1}, EVA),
        ({**DEIT, "name": "deit_tiny_p16", "global_pool": "avg", "dynamic_img_size": True}, "xca"),
        (PVT, [{"name": "performer", "num_samples": 4}, "linear", "sra", "softmax"]),
        ({**DEIT, "depth": 3}, HYBRID),
    ],
    ids=["class token", "other sizes", "pvt", "hybrid"],
)
def test_timm_rebuilds_a_directory(model, attention, tmp_path):
    checkpoint = trained(model, attention)
    assert export_plain(f"{tmp_path}/new/", checkpoint) == ""
    assert sorted(os.listdir(tmp_path / "new")) == ["config.json", MARKER, "model.safetensors"]
    rebuilt = timm.create_model(f"local-dir:{tmp_path}/new", pretrained=True).eval()
    again = tmp_path / "pushed"  # push_to_hf_hub uploads what save_for_hf writes
    timm.models.save_for_hf(rebuilt, again, safe_serialization=True)
    expected = outputs(model_of(checkpoint))
    for there in (rebuilt, timm.create_model(f"local-dir:{again}", pretrained=True).eval()):
        assert torch.equal(outputs(there), expected)
        assert there.pretrained_cfg["label_names"] == CLASSES
        grey = model.get("in_chans") == 1
        assert timm.data.resolve_model_data_config(there) == {
            "input_size": (1, 24, 16) if grey else (3, 64, 64) if model is PVT else (3, 24, 16),
            **{"interpolation": "bilinear", "crop_pct": 0.9, "crop_mode": "squash"},
            **({"mean": [pytest.approx(0.2)], "std": [0.5]} if grey else {"mean": [0.1, 0.2, 0.3], "std": [0.5] * 3}),
        }
    assert not any("rate" in name for name in json.loads((tmp_path / "new/config.json").read_text())["model_args"])
    for directory in ("new", "pushed"):
        found = load(tmp_path / directory)
        assert torch.equal(outputs(found.model), expected)
        assert found.classes == CLASSES
        assert open_weights(tmp_path / directory).checkpoint["config"]["data"]["crop_mode"] == "squash"
        assert read_weights(str(tmp_path / directory)).state.keys() == checkpoint["model"].keys()


def test_an_export_without_a_history_is_read(tmp_path):
    """timm wrote the model, of its factory or of ours, with or without pickle and names. It is evaluated in fp32."""
    names = {1: "ant", 0: "dog"}
    for number, create in enumerate((timm.create_model, models.create_model)):
        model = create("deit_tiny_p16", attention={"name": "xca"}, depth=1, num_classes=2, img_size=32).eval()
        directory, config = tmp_path / str(number), {"label_names": names} if number else None
        timm.models.save_for_hf(model, directory, config, safe_serialization=bool(number))
        found = load(directory)
        assert torch.equal(outputs(found.model), outputs(model))
        assert found.classes == (["dog", "ant"] if number else ["0", "1"])
        assert read_weights(f"timm:local-dir:{directory}").classes == (["dog", "ant"] if number else None)
        assert parse_run(open_weights(directory).checkpoint["config"], "x").train.amp is None


def test_a_directory_in_the_cache_of_the_hub_is_read(tmp_path):
    """Its files are links. One to a pipe is refused."""
    model = models.create_model("deit_tiny_p16", depth=1, num_classes=2, img_size=32).eval()
    timm.models.save_for_hf(model, tmp_path / "blobs", safe_serialization=True)
    (tmp_path / "snapshot").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "snapshot" / name).symlink_to(Path("../blobs", name))
    assert torch.equal(outputs(load(tmp_path / "snapshot").model), outputs(model))
    assert read_weights(str(tmp_path / "snapshot")).state.keys() == model.state_dict().keys()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "blobs" / name).unlink()
        os.mkfifo(tmp_path / "blobs" / name)
        with pytest.raises(UserError):
            load(tmp_path / "snapshot")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architecture": "resnet18"}, "of the model 'resnet18', which is none of these; timm.create_model('"),
        ({"architecture": ["deit"]}, "damaged (TypeError: "),
        ({"pretrained_cfg": 3}, "damaged (TypeError: "),
        ({"model_args": {"num_classes": 9}}, "do not fit: "),
        ({"model_args": {"num_classes": 10**9}}, "do not fit: "),
        ({"model_args": {"depth": [0] * 10**5}}, "a configuration of too many values"),
        ({"model_args": {"attention": {"name": "eva", "windw": 2}}}, "attention(eva).windw: unknown option"),
        ({"model_args": {"attention": {"name": "__import__('os')"}}}, "unknown mechanism \"__import__('os')\""),
        ({"model_args": {"depth": 10**9}}, "model.depth"),
        ({"model_args": {"features_only": True}}, "model.features_only: unknown option"),
        ({"label_names": {"0": "a", "2": "b"}}, "label_names has the keys 0, 2; number the classes from 0 to 1, or"),
    ],
)
def test_a_strangers_directory_is_refused_in_one_line(changes, problem, tmp_path):
    model = models.create_model("deit_tiny_p16", depth=1, num_classes=2, img_size=32)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in changes.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((UserError, ConfigError)) as caught:
        load(tmp_path)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_timm_refuses_wrong_attention_by_name(tmp_path):
    export_plain(f"{tmp_path}/", trained(DEIT, EVA))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"window_size"', '"windw_size"'))
    with pytest.raises(ValueError, match=r"attention\(eva\).windw_size: unknown option; did you mean 'window_size'"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


@pytest.mark.complete
def test_graphs_take_any_number_of_images(tmp_path):
    """Also as on the page, with the transform and the class names of the run."""
    onnxruntime = pytest.importorskip("onnxruntime")
    checkpoint = trained({**DEIT, "in_chans": 1}, {"name": "linear"})
    assert "on batches of 1 and 3 differs by " in export_plain(f"{tmp_path}/x.onnx", checkpoint)
    images = torch.randn(4, 1, 24, 16)
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model_of(checkpoint)(images), rtol=1e-5, atol=1e-5)
    assert [axis.shape[0] for axis in session.get_inputs() + session.get_outputs()] == ["batch", "batch"]
    assert json.loads(session.get_modelmeta().custom_metadata_map["config.json"])["label_names"] == CLASSES
    (code,) = re.findall(r"```\n(session = .*?)```", PAGE.read_text(), re.DOTALL)
    names = {"onnxruntime": onnxruntime, "json": json, "timm": timm, "image": Image.effect_noise((30, 40), 90)}
    exec(code.replace("eva.onnx", f"{tmp_path}/x.onnx"), names)
    save_checkpoint(tmp_path / "x.pt", checkpoint)
    model, transform, _ = load(tmp_path / "x.pt")
    expected = model(transform(names["image"])[None])
    torch.testing.assert_close(torch.from_numpy(names["logits"]), expected, rtol=1e-5, atol=1e-5)


def test_a_graph_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    (tmp_path / "x.onnx").write_text("before")

    def zeros(images):
        return images.new_zeros(len(images), 3)

    monkeypatch.setattr(export_module, "to_onnx", lambda *args: (b"after", zeros))
    with pytest.raises(UserError, match=r"x.onnx: not written: its logits differ from the model's by .* above 1e-03"):
        export_plain(f"{tmp_path}/x.onnx", trained(DEIT))
    assert (tmp_path / "x.onnx").read_text() == "before"


def test_an_export_of_an_export_tells_of_the_training(tmp_path):
    checkpoint, first = trained(DEIT), tmp_path / "first.safetensors"
    larger = parse_run(checkpoint["config"], "x", ["model.img_size=[32, 24]", "optim.opt=sgd"])
    export(str(first), larger, checkpoint, "plain")
    main([str(first), f"{tmp_path}/second/"])
    for source in (first, tmp_path / "second"):
        found = open_weights(source).checkpoint
        assert trained_config(found) == checkpoint["config"]
        _, line = restore_model(parse_run(found["config"], "x", ["model.img_size=[40, 24]"]), found, "plain")
        assert line.startswith("model.img_size = [40, 24], trained at [24, 16]; resampled: ")


def test_a_directory_that_cannot_be_written_stays(tmp_path, monkeypatch):
    export_plain(f"{tmp_path}/x/", trained(DEIT))
    before = {path: path.read_bytes() for path in (tmp_path / "x").iterdir()}

    def fail(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.runtime.ownership.write_atomically", fail)
    with pytest.raises(UserError, match="x: cannot be written: No space left on device; what was there is unchanged"):
        export_plain(f"{tmp_path}/x/", trained(DEIT, "xca"))
    assert {path: path.read_bytes() for path in (tmp_path / "x").iterdir()} == before
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("x.bin", "x.bin: no kind of export; choose a directory DIR/ or a file .safetensors or .onnx"),
        ("no/x.onnx", "no/x.onnx: no directory 'no'"),
        ("run/", "run/: the directory of a run; name another one"),
        (
            "made/x.safetensors",
            "made/x.safetensors: the export would replace a result that made/made_by_eav.json lists",
        ),
        ("x.onnx", r"x.onnx: needs the package onnxruntime \(.*\); pip install 'efficient-attention-vision\[export\]'"),
    ],
)
def test_targets_are_checked_before_any_work(target, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    claim(Path("made"), ["x.safetensors"])
    Path("run").mkdir()
    Path("run/step_3_epoch_1.pt").touch()
    for package in ("onnx", "onnxscript"):  # not imported here, which takes seconds
        monkeypatch.setitem(sys.modules, package, sys)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=problem):
        check_target(target)


def test_a_checkpoint_is_not_exported_over_itself(tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    export_plain(str(path), trained(DEIT, "softmax"))
    before = path.read_bytes()
    with pytest.raises(SystemExit):
        main([str(path), f"{tmp_path}/../{tmp_path.name}/x.safetensors"])
    assert "is the checkpoint itself; name another file" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.stress
@pytest.mark.parametrize("name", ATTENTION)
def test_every_mechanism(name, tmp_path):
    case = FACTS[name].CASES[0]
    img_size = [4 * side for side in case.grid]
    checkpoint = trained({**DEIT, "img_size": img_size, "depth": 2}, {"name": name, **case.options})
    model, images = model_of(checkpoint), torch.randn(2, 3, *img_size)
    export_plain(f"{tmp_path}/", checkpoint)
    assert torch.equal(timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()(images), model(images))
    description = describe_model(model, parse_run(checkpoint["config"], "x"), CLASSES)
    _, compute = to_onnx(model, images, description)
    difference = export_module.largest_difference(model, compute, torch.randn(4, 3, *img_size))
    print(f"{name} {difference:.1e}")
    assert difference < 1e-5
    assert torch.equal(compute(images), compute(images))  # whatever a mechanism samples
