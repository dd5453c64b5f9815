"""`engine.checkpoints.convert` on weights of other programs; test_released.py has the released code's."""

import pytest
import timm
import torch
import yaml

from engine.checkpoints.convert import main as convert
from engine.evaluation.inference import load

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
    convert(["last.pth.tar", "out.safetensors", "--config", "config.yaml", "data.interpolation=bilinear"])
    printed = capsys.readouterr().out
    assert f"loaded  {len(stock.state_dict()):>5}\n" in printed
    assert printed.endswith("out.safetensors: the plain weights of last.pth.tar, of the model deit_tiny_p16\n")
    trained = load("out.safetensors")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(trained.model(images), stock(images))
    assert "bilinear" in str(trained.transform)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--config", "config.yaml", "model.num_classes=4"],
            "not all is loaded as it is: 2 re-made (head.weight,",
        ),
        (
            ["--config", "config.yaml", "attention={name: xca}"],
            "not all is loaded as it is: 1 fresh (blocks.*.attn.temperature",
        ),
        (["--config", "config.yaml", "model.depth=2"], "weights of another architecture: 1 blocks of width 24, where"),
        (["--config", "config.yaml", "--weights", "ema"], "--weights chooses from a checkpoint that has its own conf"),
        (
            [],
            "engine.checkpoints.convert last.pth.tar FILE.safetensors --config CONFIG.yaml` makes one of it, where",
        ),
    ],
)
def test_other_weights_than_those_of_the_configuration_are_refused(
    arguments, problem, stock, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        convert(["last.pth.tar", "out.safetensors", *arguments])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()
