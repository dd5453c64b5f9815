"""Calls that users of timm make, in addition to the parts of timm's contract in test_models.py."""

import copy
import dataclasses
import math

import pytest
import timm
import torch

from attention import ATTENTION, OptionError
from models import create_model
from models.base import check_grid
from models.convert import resample_pos_embed
from tests.models.test_models import EVA, TINY, families, tiny_images, tiny_model
from tests.support.facts import FACTS
from tests.support.partition import one_of_a_kind


@families
def test_device_and_dtype(name):
    model = timm.create_model(name, attention=EVA, device="meta", dtype=torch.bfloat16, **TINY[name])
    tensors = model.state_dict().values()
    assert {value.device.type for value in tensors} == {"meta"}
    assert {value.dtype for value in tensors if value.is_floating_point()} == {torch.bfloat16}
    assert model(tiny_images(name).to("meta", torch.bfloat16)).dtype == torch.bfloat16
    features = timm.create_model(name, features_only=True, device="meta", **TINY[name])
    assert {parameter.device.type for parameter in features.parameters()} == {"meta"}


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


def test_the_smallest_image_is_declared():
    for attention, side in (({"name": "eva", "fit": True}, 32), ("softmax", 32), ("eva", 128)):
        model = create_model("pvtv2_b0", attention, depths=(1, 1, 1, 1), device="meta")
        assert model.pretrained_cfg["min_input_size"] == (3, side, side)
        model(torch.empty(1, 3, side, side, device="meta"))
    with pytest.raises(OptionError, match="num_landmarks"):
        model(torch.empty(1, 3, 96, 96, device="meta"))
    features = timm.create_model("pvtv2_b0", attention="eva", depths=(1, 1, 1, 1), features_only=True, device="meta")
    assert features.pretrained_cfg["min_input_size"] == (3, 128, 128)


def refusal(function, *arguments):
    """The message of the OptionError that a call raises; None if it raises none."""
    try:
        function(*arguments)
    except OptionError as error:
        return str(error)


@pytest.mark.parametrize("name", ATTENTION)
def test_grids_are_checked_as_the_layer_does_and_without_a_trace(name):
    case = FACTS[name].CASES[0]
    attn = case.build(torch.float32)
    weights = {key: value.clone() for key, value in attn.state_dict().items()}
    state = torch.get_rng_state()
    refusals = [refusal(check_grid, attn, grid) for grid in (case.grid, (1, 1))]
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(attn.state_dict(), weights, rtol=0, atol=0)
    assert refusals == [refusal(attn, torch.zeros(1, math.prod(grid), 12), grid) for grid in (case.grid, (1, 1))]


def test_set_input_size():
    model = tiny_model("deit", class_token=True, reg_tokens=2).eval()
    larger = tiny_model("deit", class_token=True, reg_tokens=2, img_size=(72, 56)).eval()
    larger.load_state_dict(resample_pos_embed(model.state_dict(), larger, grid=(6, 5)))
    model.pos_embed.requires_grad_(False)
    model.set_input_size((72, 56))
    assert model.config == larger.config
    assert model.grid == (9, 7)
    assert not model.pos_embed.requires_grad
    images = torch.randn(2, 3, 72, 56)
    torch.testing.assert_close(model(images), larger(images), rtol=0, atol=0)


def assert_rebuilt(model, images):
    """The model that timm builds from the arguments of `model` has its outputs, with its weights."""
    rebuilt = timm.create_model("deit", **timm.models.get_model_args(model)).eval()
    rebuilt.load_state_dict(model.state_dict())
    torch.testing.assert_close(rebuilt(images), model.eval()(images), rtol=0, atol=0)


@pytest.mark.parametrize("name", one_of_a_kind(ATTENTION))
def test_a_resized_model_can_be_built_at_its_size(name):
    """Or it is refused, and stays as it is; also by patches, and with weights of a file of the other size."""
    case = FACTS[name].CASES[0]
    options = {"patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2, "num_classes": 5}
    options["attention"] = {"name": name, **case.options}
    model = timm.create_model("deit", img_size=(28, 20), **options).eval()
    small, state = torch.randn(2, 3, 28, 20), copy.deepcopy(model.state_dict())
    before = model(small)
    if name in ("linformer", "synthesizer"):
        tensor = {"linformer": "projection", "synthesizer": "factors"}[name]
        problem = rf"blocks\.0\.attn: for this size attention\({name}\) has other weights.*: {tensor}; create a new"
        with pytest.raises(OptionError, match=problem):
            model.set_input_size((56, 40))
        torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
        torch.testing.assert_close(model(small), before, rtol=0, atol=0)
        return
    frozen = [weight for weight, _ in model.named_parameters() if ".attn." in weight][::2]
    for weight in frozen:
        model.get_parameter(weight).requires_grad_(False)
    random = torch.get_rng_state()
    model.set_input_size((56, 40))
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module.training for module in model.modules())
    assert [weight for weight, x in model.named_parameters() if not x.requires_grad] == frozen
    assert_rebuilt(model, torch.randn(2, 3, 56, 40))
    model.set_input_size(patch_size=(4, 4))
    assert_rebuilt(model, torch.randn(2, 3, 56, 40))


def test_a_mechanism_whose_weights_follow_the_grid_is_not_resized():
    """In a DeiT, null is the reduction that leaves 49 keys."""
    model = tiny_model("deit", "sra", img_size=56)
    problem = (
        r"size attention\(sra\) .*: norm.bias, norm.weight, sr.bias, sr.weight; create .*, or set attention\(sra\)"
    )
    with pytest.raises(OptionError, match=r"blocks\.0\.attn: for this " + problem + r"\.reduction instead of"):
        model.set_input_size(112)
    assert (model.grid, model.config.img_size) == ((7, 7), 56)
    assert model(torch.randn(1, 3, 56, 56)).shape == (1, 5)
    model = tiny_model("deit", {"name": "sra", "reduction": 2}, img_size=56)
    model.set_input_size(112)
    assert_rebuilt(model, torch.randn(1, 3, 112, 112))


def test_a_larger_grid_has_the_sizes_that_fit_it():
    """A grid of 4 x 2 allows 8 of 16 landmarks, and windows of 2 columns; prefix tokens and pruned blocks are there."""
    attention = {"name": "eva", "window_size": 4, "num_landmarks": 16, "fit": True}
    model = tiny_model("deit", attention, img_size=(32, 16), class_token=True)
    assert model.blocks[0].attn.config.num_landmarks == 8
    model.set_input_size((16, 64))
    assert model.blocks[0].attn.config.num_landmarks == 16
    assert_rebuilt(model, torch.randn(2, 3, 16, 64))
    model.prune_intermediate_layers([0])
    model.set_input_size((64, 64))
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 65, 24)


def test_layers_that_no_grid_changes_stay():
    """With their adapters and hooks."""
    model = tiny_model("deit", "softmax")
    layers = [block.attn for block in model.blocks]
    layers[0].qkv = torch.nn.Sequential(layers[0].qkv)
    model.set_input_size((72, 56))
    assert [block.attn for block in model.blocks] == layers


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("name", ["agent", "focused_linear", "slab", "polaformer"])
def test_pretrained_weights_of_another_size_are_resampled(family, name, tmp_path):
    small, large = ({"img_size": size} for size in ((64, 128) if family == "deit" else (128, 256)))
    source, file = tiny_model(family, name, **small), tmp_path / "weights.pth"
    torch.save(source.state_dict(), file)
    options = TINY[family] | large | {"attention": name, "pretrained_cfg_overlay": {"file": file, "num_classes": 5}}
    model = timm.create_model(family, pretrained=True, **options).eval()
    if family == "deit":
        source.set_input_size(128)
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


def test_intermediates_are_of_all_patches():
    model = tiny_model("deit", "softmax", patch_drop_rate=0.5)
    with pytest.raises(ValueError, match=r"model.patch_drop_rate leaves out patches of the maps; set it to 0, or call"):
        model.forward_intermediates(tiny_images("deit"))
    assert model.eval().forward_intermediates(tiny_images("deit"))[1][0].shape == (2, 24, 6, 5)


def test_set_patch_size():
    model = tiny_model("deit").eval()
    plain = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    stock = timm.create_model("vit_tiny_patch16_224", **TINY["deit"], **plain)
    softmax = tiny_model("deit", "softmax")
    stock.load_state_dict(softmax.state_dict())
    for net in (model, softmax, stock.eval()):
        net.set_input_size(patch_size=4)
    assert model.grid == (12, 10)
    assert model.config == dataclasses.replace(tiny_model("deit").config, patch_size=4)
    assert {info["reduction"] for info in model.feature_info} == {4}
    assert model(tiny_images("deit")).shape == (2, 5)
    torch.testing.assert_close(softmax.eval()(tiny_images("deit")), stock(tiny_images("deit")))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"img_size": 100}, "model.img_size = 100 is not a multiple of patch_size = 8; nearest: 96"),
        ({"patch_size": 7}, "model.img_size = 48 is not a multiple of patch_size = 7; nearest: 49"),
        ({"img_size": 8}, r"attention\(eva\).window_size = 3: larger than the 1x1 grid; at most 1"),
        ({"img_size": (24, 8)}, r"num_landmarks = 6 does not divide the 3x1 grid"),
        ({"patch_size": (8, 4)}, r"patch_size = \(8, 4\): patches must be square"),
    ],
)
def test_sizes_that_cannot_be_set_leave_the_model(sizes, message):
    model = tiny_model("deit")
    with pytest.raises(OptionError, match=message):
        model.set_input_size(**sizes)
    assert model.config == tiny_model("deit").config
    assert model(tiny_images("deit")).shape == (2, 5)


@pytest.mark.parametrize("options", [{"stem": "conv"}, {"vocab_size": 7, "patch_size": 1, "in_chans": 1}], ids=str)
def test_patches_that_are_no_single_convolution_keep_their_size(options):
    model = tiny_model("deit", "softmax", **options)
    with pytest.raises(OptionError, match=r"patch_size = 2: .*square, those of a conv stem and of tokens are fixed"):
        model.set_input_size(patch_size=2)
    assert model.config == tiny_model("deit", "softmax", **options).config


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


@pytest.mark.parametrize("tokens", [{"class_token": True}, {"class_token": False, "global_pool": "avg"}])
def test_patches_left_out_are_those_of_timm(tokens):
    """A third of 30 patches, equal under the same seed, in value and gradient; none in evaluation."""
    model = tiny_model("deit", "softmax", patch_drop_rate=0.35, **tokens)
    stock = timm.create_model(
        "vit_tiny_patch16_224", **TINY["deit"], **tokens, patch_drop_rate=0.35, fc_norm=False
    ).train()
    stock.load_state_dict(model.state_dict())
    assert model.embed(tiny_images("deit"))[1] == (1, 19)
    gradients = []
    for net in (model, stock):
        torch.manual_seed(3)
        logits = net(tiny_images("deit"))
        gradients.append(torch.autograd.grad(logits.square().sum(), net.parameters()))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert model.eval().embed(tiny_images("deit"))[1] == (6, 5)
    torch.testing.assert_close(model(tiny_images("deit")), stock.eval()(tiny_images("deit")))


@pytest.mark.parametrize("name", ATTENTION)
def test_patches_are_left_out_where_attention_ignores_order(name):
    """Attention over the remaining tokens equals attention over an image of these tokens alone."""
    case = FACTS[name].CASES[0]
    options = {"img_size": (10, 14), "patch_size": 2, "embed_dim": 12, "depth": 1, "num_heads": 2}
    options["patch_drop_rate"] = 0.2
    attention = {"name": name, **case.options}
    if not case.build().ignores_order():
        with pytest.raises(OptionError, match=rf"patch_drop_rate = 0\.2: attention\({name}\) needs the whole grid; "):
            create_model("deit", attention, **options)
        return
    model = create_model("deit", attention, **options)
    model(torch.randn(2, 3, 10, 14)).sum().backward()
    tokens, grid = model.embed(torch.randn(2, 3, 10, 14))
    assert (tokens.shape[1], grid) == (28, (1, 28))
