"""Calls that users of timm make, in addition to the parts of timm's contract in test_models.py."""

from pathlib import Path

import pytest
import timm
import torch

from attention import OptionError
from models import create_model
from models.base import attention_layers
from tests.models.test_models import EVA, TINY, families, tiny_images, tiny_model


@families
def test_device_and_dtype(name):
    model = timm.create_model(name, attention=EVA, device="meta", dtype=torch.bfloat16, **TINY[name])
    tensors = model.state_dict().values()
    assert {value.device.type for value in tensors} == {"meta"}
    assert {value.dtype for value in tensors if value.is_floating_point()} == {torch.bfloat16}
    assert model(tiny_images(name).to("meta", torch.bfloat16)).dtype == torch.bfloat16
    features = timm.create_model(name, features_only=True, device="meta", **TINY[name])
    assert {parameter.device.type for parameter in features.parameters()} == {"meta"}


def test_the_answer_to_attention_of_timms_own_models_is_on_the_page_of_integration():
    with pytest.raises(TypeError, match="unexpected keyword argument 'attention'") as refused:
        timm.create_model("vit_tiny_patch16_224", attention="eva")
    page = (Path(__file__).parents[2] / "docs/integration.md").read_text()
    assert str(refused.value).partition(" got an ")[2] in page
    assert 'models.create_model("timm:vit_tiny_patch16_224", attention="eva")' in page
    assert len(attention_layers(create_model("timm:vit_tiny_patch16_224", attention="eva", num_classes=2))) == 12


@pytest.mark.parametrize("options", [{"depht": 3}, {"attention": {"name": "eva", "windw_size": 3}}])
def test_unknown_options_are_type_errors(options):
    with pytest.raises(TypeError, match=r"unknown option; did you mean '(depth|window_size)'"):
        timm.create_model("deit_tiny_p16", device="meta", **options)
    with pytest.raises(OptionError) as error:
        timm.create_model("deit_tiny_p16", depth=0)
    assert not isinstance(error.value, TypeError)


@families
def test_a_new_classifier_is_in_the_mode_of_its_model(name):
    model = tiny_model(name).eval()
    model.reset_classifier(3)
    assert not any(module.training for module in model.modules())
    model.train().reset_classifier(0)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("name", ["agent", "focused_linear", "slab", "polaformer"])
def test_pretrained_weights_of_another_size_are_resampled(family, name, tmp_path):
    small, large = ({"img_size": size} for size in ((64, 128) if family == "deit" else (128, 256)))
    dynamic = {"dynamic_img_size": True} if family == "deit" else {}
    source, file = tiny_model(family, name, **small, **dynamic), tmp_path / "weights.pth"
    torch.save(source.state_dict(), file)
    options = TINY[family] | large | {"attention": name, "pretrained_cfg_overlay": {"file": file, "num_classes": 5}}
    model = timm.create_model(family, pretrained=True, **options).eval()
    images = torch.randn(1, 3, *2 * [large["img_size"]])
    torch.testing.assert_close(model(images), source.eval()(images))


def test_pretrained_weights_of_other_classes_and_channels(tmp_path):
    """The classifiers and the first convolution are those of the options, before weights are loaded."""
    options = {"class_token": True, "dist_token": True, "stem": "conv"}
    source, file = tiny_model("deit", "softmax", **options), tmp_path / "weights.pth"
    torch.save(source.state_dict(), file)
    given = TINY["deit"] | options | {"num_classes": 10, "in_chans": 1}
    overlay = {"file": file, "num_classes": 5}
    model = create_model("deit", "softmax", pretrained=True, pretrained_cfg_overlay=overlay, **given).eval()
    assert model.head.out_features == model.head_dist.out_features == 10
    gray = torch.randn(2, 1, 48, 40)
    x, grid = source.eval().embed(gray.expand(-1, 3, -1, -1))
    torch.testing.assert_close(model.embed(gray), (x, grid))
    torch.testing.assert_close(model.encode(x, grid), source.encode(x, grid))
    again = timm.create_model("deit", **timm.models.get_model_args(model))
    assert again.pretrained_cfg["classifier"] == ("head", "head_dist")
    assert again.pretrained_cfg["first_conv"] == "patch_embed.proj.0"
    tokens = tiny_model("deit", "softmax", vocab_size=7, patch_size=1, in_chans=1, img_size=(4, 6))
    assert tokens.pretrained_cfg["first_conv"] is None


@families
def test_output_dict(name):
    model = tiny_model(name).eval()
    images = tiny_images(name)
    final, intermediates = model.forward_intermediates(images, [0, 2])
    outputs = model.forward_intermediates(images, [0, 2], output_dict=True)
    torch.testing.assert_close(outputs, {"image_features": final, "image_intermediates": intermediates})
    alone = model.forward_intermediates(images, [0, 2], output_dict=True, intermediates_only=True)
    assert set(alone) == {"image_intermediates"}


@families
def test_dropout_of_attention_weights(name):
    model = tiny_model(name, attn_drop_rate=0.25)
    rates = [module.config.attn_drop for module in model.modules() if hasattr(module, "num_heads")]
    assert rates == [0.25] * len(rates) != []
    with pytest.raises(OptionError, match=r"attention\(performer\).attn_drop: unknown option"):
        tiny_model(name, "performer", attn_drop_rate=0.25)
    tiny_model(name, "performer", attn_drop_rate=0.0)


def test_dropout_after_position_embeddings():
    model = tiny_model("deit", pos_drop_rate=0.5)
    tokens, _ = model.embed(tiny_images("deit"))
    assert 0.4 < (tokens == 0).double().mean() < 0.6
    kept, _ = model.eval().embed(tiny_images("deit"))
    torch.testing.assert_close(tokens, torch.where(tokens == 0, 0, 2 * kept))
