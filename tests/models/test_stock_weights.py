"""Stock timm weights load strictly and give the same logits: DeiT with softmax, PVT-v2 with spatial reduction."""

import pytest
import timm
import torch

from models import create_model
from models.convert import from_timm_pvt, resample_pos_embed
from tests.support.cases import perturbed
from tests.support.partition import chosen


def stock_model(name, **options):
    """A timm model with no parameter left at a value such as 0 or 1 that could hide a missing one."""
    torch.manual_seed(0)
    return perturbed(timm.create_model(name, **options).eval(), 0.03)


def assert_same_logits(stock, ours, images, atol=1e-5):
    with torch.no_grad():
        expected = stock(images)
        torch.testing.assert_close(ours.eval()(images), expected, rtol=0, atol=atol)
    assert expected.std() > 0.1  # so that 1e-5 means something


def shapes(model) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


WITHOUT_CLASS_TOKEN = {"class_token": False, "global_pool": "avg", "fc_norm": False}


@pytest.mark.parametrize(
    ("stock_name", "name"),
    chosen(
        [
            ("vit_tiny_patch16_224", "deit_tiny_p16"),
            ("deit_small_patch16_224", "deit_small_p16"),
            ("vit_small_patch8_224", "deit_small_p8"),
            ("vit_base_patch16_224", "deit_base_p16"),
        ],
        lambda stock_name, name: name == "deit_tiny_p16",
    ),
)
@pytest.mark.parametrize("class_token", [False, True])
def test_deit(stock_name, name, class_token):
    """Names and shapes of the whole model; logits of its first two layers, and of all of the smallest."""
    options = {"num_classes": 1000, **({} if class_token else WITHOUT_CLASS_TOKEN)}
    with torch.device("meta"):
        ours, stock = create_model(name, class_token=class_token), timm.create_model(stock_name, **options)
    assert list(shapes(ours).items()) == list(shapes(stock).items())
    depth = {} if name == "deit_tiny_p16" else {"depth": 2}
    stock, model = stock_model(stock_name, **options, **depth), create_model(name, class_token=class_token, **depth)
    model.load_state_dict(stock.state_dict(), strict=True)
    assert_same_logits(stock, model, torch.randn(1, 3, 224, 224))


def test_register_tokens():
    stock = stock_model("vit_tiny_patch16_224", reg_tokens=3)
    model = create_model("deit_tiny_p16", class_token=True, reg_tokens=3)
    model.load_state_dict(stock.state_dict(), strict=True)
    assert_same_logits(stock, model, torch.randn(1, 3, 224, 224))


def test_distilled():
    """Names and shapes of the whole model, and the logits of its first two layers."""
    name, tokens = "deit_tiny_distilled_patch16_224", {"class_token": True, "dist_token": True}
    with torch.device("meta"):
        assert shapes(create_model("deit_tiny_p16", **tokens)) == shapes(timm.create_model(name))
    stock = stock_model(name, depth=2).double()
    model = create_model("deit_tiny_p16", **tokens, depth=2, dtype=torch.float64)
    model.load_state_dict(stock.state_dict(), strict=True)
    images = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    assert_same_logits(stock, model, images, atol=1e-9)
    for net in (stock.train(), model.train()):
        net.set_distilled_training()
    torch.testing.assert_close(model(images), stock(images), rtol=0, atol=1e-9)
    assert isinstance(model(images), tuple)


@pytest.mark.parametrize("size", chosen(["b0", "b1", "b2", "b3", "b4", "b5"], ("b0", "b2").__contains__))
def test_pvt(size):
    """Names and shapes of the whole model; logits of a block of every stage, and of all blocks of the smallest."""
    with torch.device("meta"):
        ours, stock = create_model(f"pvtv2_{size}", attention="sra"), timm.create_model(f"pvt_v2_{size}")
    assert shapes(ours) == {name: value.shape for name, value in from_timm_pvt(stock.state_dict()).items()}
    depths = {} if size == "b0" else {"depths": (1, 1, 1, 1)}
    stock, model = stock_model(f"pvt_v2_{size}", **depths), create_model(f"pvtv2_{size}", attention="sra", **depths)
    model.load_state_dict(from_timm_pvt(stock.state_dict()), strict=True)
    assert_same_logits(stock, model, torch.randn(1, 3, 224, 224))


def test_pvt_on_another_image_size():
    stock = stock_model("pvt_v2_b0")
    model = create_model("pvtv2_b0", attention="sra", img_size=(128, 64))
    model.load_state_dict(from_timm_pvt(stock.state_dict()), strict=True)
    assert_same_logits(stock, model, torch.randn(1, 3, 64, 96))


@pytest.mark.parametrize("class_token", [False, True])
def test_position_embeddings_are_resampled_as_timm_does(class_token):
    stock = stock_model("vit_tiny_patch16_224", **({} if class_token else WITHOUT_CLASS_TOKEN))
    model = create_model("deit_tiny_p16", class_token=class_token, img_size=(96, 160))
    state_dict = stock.state_dict()
    model.load_state_dict(resample_pos_embed(state_dict, model), strict=True)
    stock.set_input_size((96, 160))
    images = torch.randn(2, 3, 96, 160)
    assert_same_logits(stock, model, images)
    assert state_dict["pos_embed"].shape[1] == 196 + class_token  # the argument is left alone


@pytest.mark.complete
def test_pvt_v2_li():
    stock = stock_model("pvt_v2_b2_li")
    model = create_model("pvtv2_b2", attention=["linear_sra"] * 4, mlp_relu=True)
    model.load_state_dict(from_timm_pvt(stock.state_dict()), strict=True)
    assert_same_logits(stock, model, torch.randn(1, 3, 224, 160))
