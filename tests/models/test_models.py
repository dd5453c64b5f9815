"""The model families: every registered size, timm's contract, geometry, and the context that attention receives."""

import copy
import dataclasses
import pickle

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.optim._param_groups import param_groups_weight_decay
from torch import nn
from torch._subclasses import FakeTensorMode

import models
from attention import ATTENTION, OptionError, create_attention
from attention.options import parse_options
from attention.parts.features import full_precision
from models import MODELS, create_model, layer_contexts, parse_model
from models.base import attention_layers
from models.block import Block, StochasticDepth, compiled
from models.convert import resample_pos_embed
from models.costs import count_costs
from models.deit import Deit
from models.patches import Patches
from models.pvt import Pvt
from tests.support.partition import chosen
from tests.uniform.test_materialisation import fill_with_garbage

EVA = {"name": "eva", "window_size": 3, "num_landmarks": 6}
TINY = {
    "deit": {"img_size": (48, 40), "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5},
    "pvtv2_b0": {
        **{"img_size": (64, 96), "embed_dims": (8, 12, 16, 24), "depths": (1, 2, 1, 1), "num_heads": (1, 3, 2, 4)},
        "num_classes": 5,
    },
}
FEATURES = {  # shapes of all intermediate features and of the final ones, for a batch of 2
    "deit": ([(2, 24, 6, 5)] * 3, (2, 30, 24)),
    "pvtv2_b0": ([(2, 8, 16, 24), (2, 12, 8, 12), (2, 16, 4, 6), (2, 24, 2, 3)], (2, 24, 2, 3)),
}
families = pytest.mark.parametrize("name", TINY)


def tiny_model(name, attention=EVA, **options):
    torch.manual_seed(0)
    return create_model(name, attention, **(TINY[name] | options))


def shallow_model(name):
    """The model with one block, or with one block in every stage."""
    return tiny_model(name, **({"depths": (1, 1, 1, 1)} if name == "pvtv2_b0" else {"depth": 1}))


def tiny_images(name, seed=1):
    return torch.randn(2, 3, *TINY[name]["img_size"], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "options"),
    chosen(
        [*((name, {}) for name in MODELS), ("deit", {"mask_token": True}), ("deit", {"vocab_size": 7})],
        lambda name, options: name in ("deit", "pvtv2_b0"),
    ),
)
def test_a_pickled_and_a_copied_model_are_the_model(name, options):
    options |= {"num_classes": 0} if "mask_token" in options else {}
    options |= {"patch_size": 1, "in_chans": 1, "img_size": 8} if "vocab_size" in options else {}
    with torch.device("meta"):
        model = create_model(name, "linear", **options)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert str(again) == str(model)
        shapes = [{name: x.shape for name, x in one.state_dict().items()} for one in (again, model)]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", chosen(MODELS, ("deit", "deit_small_p8", "pvtv2_b1", "pvtv2_b2_2xheads").__contains__))
def test_every_size_builds(name):
    family, _ = MODELS[name]
    with torch.device("meta"):
        model = create_model(name)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert isinstance(model, family)
    assert dict(model.named_buffers()).keys() <= model.state_dict().keys()  # nothing to compute beside the state
    assert dataclasses.replace(model.config, img_size=224) == parse_model(name, {})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deit", {"stem": "conv", "class_token": True, "dist_token": True, "reg_tokens": 2}),
        ("deit", {"mask_token": True, "num_classes": 0}),
        ("deit", {"vocab_size": 9, "patch_size": 1, "in_chans": 1, "img_size": (6, 5)}),
        ("pvtv2_b0", {}),
    ],
    ids=str,
)
def test_models_of_the_meta_device_take_their_state_and_nothing_else(name, options):
    images = tiny_images(name)
    if "vocab_size" in options:
        images = images[:, :1, :6, :5].abs().round()
    model = tiny_model(name, **options).eval()
    with torch.device("meta"):
        others = [tiny_model(name, **options).eval() for _ in range(2)]
    fill_with_garbage(others[0].to_empty(device="cpu"))
    for other, assign in zip(others, (False, True), strict=True):
        other.load_state_dict(model.state_dict(), strict=True, assign=assign)
        assert torch.equal(other(images), model(images))


PARAMETERS_M = [  # millions, of papers or timm's stock models; tests/uniform/test_costs.py counts the other sizes
    ("deit_tiny_p8", "eva", 5.828),
    ("deit_base_p16", "softmax", 86.566),
    ("encoder_8x192_2heads", "softmax", 3.938),
    ("encoder_8x192_2heads", "eva", 4.092),  # 96 channels a head
    ("encoder_8x192_3heads", "lara", 4.006),
    ("pvtv2_b0", "sra", 3.67),
    ("pvtv2_b5", "sra", 81.96),
    ("pvtv2_b3_2xheads", "eva", 36.10),
]


@pytest.mark.parametrize(
    ("name", "attention", "millions"), chosen(PARAMETERS_M, lambda name, *_: name in ("deit_tiny_p8", "pvtv2_b0"))
)
def test_parameters(name, attention, millions):
    with torch.device("meta"):
        model = create_model(name, attention)
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    digits = len(str(millions).split(".")[1])
    assert round(count, digits) == millions


def test_timm_builds_the_same():
    for name in TINY:
        torch.manual_seed(0)
        model = timm.create_model(name, attention=EVA, drop_path_rate=0.1, **TINY[name])
        ours = tiny_model(name, drop_path_rate=0.1)
        assert model.pretrained_cfg == ours.pretrained_cfg
        torch.testing.assert_close(model.state_dict(), ours.state_dict(), rtol=0, atol=0)


def test_no_name_of_timm_is_taken():
    assert set(timm.list_models(module="models")) == set(MODELS)
    for name in MODELS:
        assert not callable(getattr(timm.models, name, None))
        assert timm.models.model_entrypoint(name).__module__ == models.__name__


@families
def test_contexts_are_those_of_the_layers_of_one_mechanism(name):
    """All layers of a DeiT; of a pyramid those of every stage but the last, which keeps softmax."""
    depth = TINY[name].get("depth", 5)
    expected = [(layer, depth, 24, 3, (6, 5), None) for layer in range(3)]
    if name != "deit":
        dims, heads, reductions, grids = (8, 12, 12, 16), (1, 3, 3, 2), (8, 4, 4, 2), [(16, 24), *[(8, 12)] * 2, (4, 6)]
        expected = [*zip(range(4), [5] * 4, dims, heads, grids, reductions, strict=True)]
    found = layer_contexts(name, TINY[name])
    assert [(c.layer, c.depth, c.dim, c.num_heads, c.grid, c.reduction) for c in found] == expected
    names = [layer.name() for layer in attention_layers(tiny_model(name, "linear"))]
    assert names[: len(found)] == ["linear"] * len(found)


@families
def test_contract(name):
    model = tiny_model(name).eval()
    images = tiny_images(name)
    intermediate, final = FEATURES[name]
    width = model.num_features
    features = model.forward_features(images)
    assert features.shape == final
    assert model.forward_head(features, pre_logits=True).shape == (2, model.head_hidden_size) == (2, width)
    torch.testing.assert_close(model.forward_head(features), model(images), rtol=0, atol=0)
    pooled = features.mean(1) if features.ndim == 3 else features.mean((2, 3))
    torch.testing.assert_close(model(images), model.get_classifier()(pooled))
    assert dict(model.named_modules())[model.pretrained_cfg["classifier"]] is model.get_classifier()
    assert model.default_cfg["first_conv"] + ".weight" in model.state_dict()
    assert [(info["num_chs"], info["reduction"]) for info in model.feature_info] == [
        (shape[1], -(-images.shape[3] // shape[3])) for shape in intermediate
    ]

    model.reset_classifier(7)
    assert model.num_classes == 7
    assert model(images).shape == (2, 7)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.3)
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), pooled)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images), features)
    with pytest.raises(OptionError, match="global_pool = 'token' is not one of"):
        model.reset_classifier(0, "token")
    assert tiny_model(name, num_classes=0, global_pool="")(images).shape == final


def test_class_token():
    options = TINY["deit"] | {"class_token": True}
    model = create_model("deit", **options).eval()
    images = tiny_images("deit")
    features = model.forward_features(images)
    assert features.shape == (2, 1 + 30, 24)
    torch.testing.assert_close(model(images), model.head(features[:, 0]))
    model.reset_classifier(5, "avg")
    torch.testing.assert_close(model(images), model.head(features[:, 1:].mean(1)))
    ((patches, token),) = model.forward_intermediates(
        images, [2], return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
    )
    torch.testing.assert_close(torch.cat([token, patches], 1), features)
    with pytest.raises(OptionError, match="class_token"):
        parse_model("deit", {"global_pool": "token"})


def test_distillation_token():
    """As in timm, the output is the mean of both heads, also in training without a teacher."""
    options = TINY["deit"] | {"class_token": True, "dist_token": True}
    model, images = create_model("deit", **options), tiny_images("deit")
    assert model.num_prefix_tokens == model.blocks[0].attn.num_prefix_tokens == 2
    x, x_dist = model.forward_features(images)[:, :2].unbind(1)
    logits = model.head(x), model.head_dist(x_dist)
    torch.testing.assert_close(model(images), (logits[0] + logits[1]) / 2)
    model.set_distilled_training()
    torch.testing.assert_close(model(images), logits)
    model.eval()
    torch.testing.assert_close(model(images), (logits[0] + logits[1]) / 2)
    assert model.get_classifier() == (model.head, model.head_dist)
    modules = dict(model.named_modules())
    assert tuple(modules[name] for name in model.pretrained_cfg["classifier"]) == model.get_classifier()
    model.reset_classifier(7)
    assert [head.out_features for head in model.get_classifier()] == [7, 7]
    assert not model.head_dist.training
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), (x + x_dist) / 2)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(images), model.forward_features(images))
    with pytest.raises(OptionError, match="global_pool = 'avg' is not one of"):
        model.reset_classifier(5, "avg")
    with pytest.raises(OptionError, match="global_pool = 'avg': with dist_token, each head reads its own token"):
        create_model("deit", **options, global_pool="avg")
    with pytest.raises(OptionError, match="dist_token = false: there is no second head"):
        tiny_model("deit").set_distilled_training()


def test_costs_of_the_distillation_token():
    """There are two classifiers, and one more token everywhere; all tokens attend to all."""
    plain, distilled = (
        count_costs({"name": "deit", **TINY["deit"], "class_token": True, "dist_token": value}, "softmax")
        for value in (False, True)
    )
    head = 24 * 5
    per_token, pairs = 12 * 24**2, 2 * 24 * (32**2 - 31**2)
    assert distilled.macs - plain.macs == head + 3 * (per_token + pairs)
    assert distilled.parameters - plain.parameters == head + 5 + 24 + 24  # bias, token, position


@families
def test_intermediate_features(name):
    model = tiny_model(name).eval()
    images = tiny_images(name)
    shapes, _ = FEATURES[name]
    final, intermediates = model.forward_intermediates(images)
    torch.testing.assert_close(final, model.forward_features(images), rtol=0, atol=0)
    assert [tuple(y.shape) for y in intermediates] == shapes
    early = model.forward_intermediates(images, [0, -2], stop_early=True, intermediates_only=True)
    torch.testing.assert_close(early, [intermediates[0], intermediates[-2]], rtol=0, atol=0)
    (last,) = model.forward_intermediates(images, 1, norm=True, intermediates_only=True)
    torch.testing.assert_close(last, final.mT.unflatten(2, (6, 5)) if name == "deit" else final)


@families
@pytest.mark.parametrize("feature_cls", ["getter", "fx"])
def test_features_only(name, feature_cls):
    model = tiny_model(name).eval()
    images = tiny_images(name)
    torch.manual_seed(0)
    extractor = timm.create_model(
        name, attention=EVA, features_only=True, feature_cls=feature_cls, out_indices=(0, 2), **TINY[name]
    ).eval()
    shapes, _ = FEATURES[name]
    assert extractor.feature_info.channels() == [shapes[0][1], shapes[2][1]]
    expected = model.forward_intermediates(images, [0, 2], output_fmt="NCHW", intermediates_only=True)
    if (name, feature_cls) == ("deit", "fx"):  # the graph's outputs are the blocks' own
        expected = [y.flatten(2).mT for y in expected]
    torch.testing.assert_close(extractor(images), expected)
    assert model.prune_intermediate_layers([0, -2]) == [0, {"deit": 1, "pvtv2_b0": 2}[name]]
    assert len(model.blocks if name == "deit" else model.stages) == {"deit": 2, "pvtv2_b0": 3}[name]
    assert model(images).shape == {"deit": (2, 30, 24), "pvtv2_b0": (2, 16, 4, 6)}[name]


FIT = {"name": "eva", "fit": True}


@pytest.mark.parametrize("size", [(96, 128), (32, 32), (1, 1), (33, 250), (64, 64)], ids=str)
def test_a_pyramid_that_fits_small_grids_takes_every_image(size):
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (8, 12, 16, 24), "num_heads": (1, 3, 2, 4)}
    extractor = timm.create_model("pvtv2_b0", attention=FIT, features_only=True, **sizes).eval()
    images = torch.randn(2, 3, *size)
    for s, y in enumerate(extractor(images)):
        assert y.shape == (2, sizes["embed_dims"][s], -(-size[0] // (4 * 2**s)), -(-size[1] // (4 * 2**s)))
        assert y.isfinite().all()
    built = create_model("pvtv2_b0", FIT, img_size=size, **sizes).eval()  # for this size
    assert built(images).isfinite().all()
    with pytest.raises(OptionError, match=r"attention\(eva\).(window_size|num_landmarks) = "):
        create_model("pvtv2_b0", "eva", img_size=size, **sizes)


def test_each_stage_shows_the_sizes_that_fit_it():
    model = create_model("pvtv2_b0", FIT, img_size=(64, 96), device="meta")  # 16x24, 8x12, 4x6 and 2x3 tokens
    configs = [stage.blocks[0].attn.config for stage in model.stages[:3]]
    assert [(config.window_size, config.num_landmarks) for config in configs] == [(7, 49), (7, 49), (6, 24)]
    assert "window_size=6, num_landmarks=24" in str(model.stages[2])
    deit = create_model("deit_tiny_p16", {"name": "lara", "fit": True}, img_size=96, device="meta")
    assert [block.attn.config.num_landmarks for block in deit.blocks] == [36] * 12


@families
def test_every_parameter_gets_a_gradient(name):
    model = tiny_model(name, stem="conv") if name == "deit" else tiny_model(name)
    model(tiny_images(name)).square().sum().backward()
    assert [key for key, parameter in model.named_parameters() if not parameter.grad.any()] == []


@families
def test_gradient_checkpointing_restores_the_random_state(name):
    """The recomputation draws the same dropout, stochastic depth and noise as the forward pass."""
    model = tiny_model(name, proj_drop_rate=0.2, drop_path_rate=0.3).train()
    plain = copy.deepcopy(model)
    model.set_grad_checkpointing()
    saved = []
    for net in (plain, model):
        torch.manual_seed(5)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved[-1].append(x.numel()) or x, lambda x: x):
            saved.append([])
            loss = net(tiny_images(name)).square().sum()
        loss.backward()
    assert sum(saved[1]) < sum(saved[0]) / 2
    gradients, recomputed = ({key: p.grad for key, p in net.named_parameters()} for net in (plain, model))
    torch.testing.assert_close(recomputed, gradients, rtol=0, atol=0)
    model.set_grad_checkpointing(False)
    assert not any(getattr(module, "grad_checkpointing", False) for module in model.modules())


def test_patches_by_a_product_are_those_of_the_convolution(monkeypatch):
    embed, images = tiny_model("deit").patch_embed.double(), tiny_images("deit").double()
    results = []
    for by_product in (False, True):
        monkeypatch.setattr(Patches, "by_product", lambda self, x, found=by_product: found)
        y = embed(images)
        gradients = torch.autograd.grad(y.sin().sum(), list(embed.parameters()))
        results.append([y, *gradients])
    for product, convolution in zip(*results, strict=True):
        torch.testing.assert_close(product, convolution)


def test_patches_are_products_on_a_gpu_where_timm_takes_the_images():
    plain, dynamic = (tiny_model("deit", dynamic_img_size=dynamic).patch_embed for dynamic in (False, True))
    height, width = plain.img_size
    step = plain.patch_size[0]
    with FakeTensorMode():
        usual, higher, odd = (torch.empty(2, 3, height + more, width, device="cuda") for more in (0, step, 1))
    assert not plain.by_product(tiny_images("deit"))
    assert [plain.by_product(x) for x in (usual, higher, odd)] == [True, False, False]
    assert [dynamic.by_product(x) for x in (usual, higher, odd)] == [True, True, False]
    assert not tiny_model("deit", stem="conv", patch_size=4).patch_embed.by_product(usual)
    plain.proj.register_forward_hook(print)
    assert not plain.by_product(usual)


def count_graphs(model, run):
    """Number of graphs that the blocks of `model`, compiled for batches of two, use in `run`."""
    torch.compiler.reset()
    graphs = []
    model.compile_blocks({2}, backend=lambda graph, inputs: graphs.append(graph) or graph)
    run(model)
    return len(graphs)


def train_and_evaluate(model, images, smaller=True):
    """Gradients of a training pass, after a pass with a smaller batch, and logits."""
    torch.manual_seed(0)  # of the noise of EVA
    sizes = (1, 2) if smaller else (2,)
    for size in sizes:
        model.zero_grad()
        model.train()(images[:size]).square().sum().backward()
    with torch.no_grad():
        logits = [model.eval()(images[:size]) for size in sizes]
    return [*(parameter.grad for parameter in model.parameters()), *logits]


asks_for_gradients = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo reads the gradients of graph inputs; outside of pytest it hides the warning."""


@asks_for_gradients
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.stress)])
def test_blocks_of_any_rate_are_one_graph_per_mode(checkpointing):
    """In training, the first block is another one, because it begins with no addition of a block before it."""
    model = tiny_model("deit", "softmax", drop_path_rate=0.3)
    model.set_grad_checkpointing(checkpointing)
    assert count_graphs(model, lambda model: train_and_evaluate(model, tiny_images("deit"))) == 3 - checkpointing


KINDS_OF_BLOCKS = {
    "shifted_window": 2,  # every other layer shifts its windows
    "transnormer": 2,  # layers of the first half attend in windows
}
"""Mechanism -> number of kinds of its layers in one network; one otherwise."""


@pytest.mark.stress
@asks_for_gradients
@pytest.mark.parametrize("attention", ATTENTION)
def test_blocks_of_every_kind_are_one_graph_per_mode(attention):
    model = tiny_model("deit", attention, img_size=64, drop_path_rate=0.3)
    images = torch.randn(2, 3, 64, 64)
    graphs = count_graphs(model, lambda model: train_and_evaluate(model, images))
    is_alone = attention == "transnormer"  # the first block, in its kind
    assert graphs == 2 * KINDS_OF_BLOCKS.get(attention, 1) + (not is_alone)


@pytest.mark.complete
def test_compiled_backward_passes_are_not_under_autocast():
    @full_precision
    def product(a, b):
        return a @ b

    def gradient(function):
        a, b = (torch.linspace(-1, 1, 48).view(*shape).requires_grad_() for shape in ((4, 12), (12, 4)))
        with torch.autocast("cpu", torch.bfloat16):
            y = function(a, b)
        return torch.autograd.grad(y.square().sum(), (a, b))

    torch.compiler.reset()
    torch.testing.assert_close(gradient(compiled(product, backend="aot_eager")), gradient(product))


@asks_for_gradients
@pytest.mark.parametrize(
    ("attention", "backend"),
    [("softmax", "eager"), pytest.param(EVA, "aot_eager", marks=pytest.mark.stress, id="eva-aot_eager")],
)
def test_compiled_blocks_change_no_result(attention, backend):
    """Stochastic depth drops all branches of the second block, and none of the first."""
    model = tiny_model("deit", attention, depth=2, drop_path_rate=1 - 1e-6).double()
    images = tiny_images("deit").double()
    expected = train_and_evaluate(model, images)
    names = list(model.state_dict())
    torch.compiler.reset()
    model.compile_blocks({2}, backend=backend)
    torch.testing.assert_close(train_and_evaluate(model, images), expected)
    assert list(model.state_dict()) == names
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        torch.testing.assert_close(average.eval()(images), expected[-1])


@asks_for_gradients
def test_hooks_of_compiled_blocks_are_called_in_training():
    model, outputs = tiny_model("deit", "softmax", depth=3).train(), []
    torch.compiler.reset()
    model.compile_blocks({2}, backend="eager")
    model.blocks[1].register_forward_hook(lambda block, inputs, output: outputs.append(output.shape))
    model(tiny_images("deit"))
    assert outputs == [(2, model.patch_embed.num_patches, model.embed_dim)]


def test_compiled_stochastic_depth_drops_whole_branches_at_its_rate():
    depth = StochasticDepth(0.3)
    depth.rate = torch.tensor(0.3)
    torch.compiler.reset()
    y = torch.compile(depth, backend="eager", fullgraph=True)(torch.ones(4000, 2, 3, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert (y == y[:, :1, :1]).all()
    kept = y[:, 0, 0] != 0
    assert abs(kept.float().mean() - 0.7) < 4 * (0.3 * 0.7 / 4000) ** 0.5
    torch.testing.assert_close(y[kept].float().mean().item(), 1 / 0.7, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", chosen(TINY, lambda name: name == "deit"))
def test_compile_traces_in_one_graph(name):
    model = shallow_model(name).eval()
    images = tiny_images(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize("name", chosen(TINY, lambda name: name == "deit"))
def test_export(name):
    model = shallow_model(name).eval()
    batch = {"x": {0: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(model, (tiny_images(name),), dynamic_shapes=batch).module()
    images = torch.cat([tiny_images(name, seed) for seed in (2, 3)])
    torch.testing.assert_close(exported(images), model(images))


@families
def test_weight_decay_acts_on_matrices_only(name):
    attention = {**EVA, "position_bias": "t5"} if name == "deit" else EVA
    model = tiny_model(name, attention)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    undecayed = ("pos_embed", "position_bias.table")
    for key, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.05 if parameter.ndim > 1 and not key.endswith(undecayed) else 0), key
    prefixed = tiny_model("deit", "softmax", class_token=True, dist_token=True, reg_tokens=2)
    _, decayed = param_groups_weight_decay(prefixed, 0.05, no_weight_decay_list=prefixed.no_weight_decay())
    assert not any(parameter is token for parameter in decayed["params"] for token in prefixed.prefix_tokens())
    agents = tiny_model("deit", {"name": "agent", "num_landmarks": 4}, class_token=True).no_weight_decay()
    own = {key.split(".attn.")[1] for key in agents if ".attn." in key}
    assert own == {*(f"{part}_positions.table" for part in ("image", "row", "column")), "prefix_bias"}


def sites_of(family, config, depth):
    """The arguments that the factory of each layer gets from the model, without the dict that all layers share."""
    sites = []
    family(config, [lambda **site: sites.append(site) or create_attention("softmax", **site)] * depth)
    shared = [site.pop("shared") for site in sites]
    assert all(one is shared[0] for one in shared)
    return sites


def test_sites_of_deit():
    options = TINY["deit"] | {"class_token": True, "qkv_bias": False, "proj_drop_rate": 0.3}
    common = {"dim": 24, "num_heads": 3, "grid": (6, 5), "depth": 3, "num_prefix_tokens": 1}
    assert sites_of(Deit, parse_options(Deit.Config, options), 3) == [
        {**common, "layer": layer, "qkv_bias": False, "proj_drop": 0.3} for layer in range(3)
    ]


def test_sites_of_pvt():
    config = parse_model("pvtv2_b0", TINY["pvtv2_b0"] | {"img_size": (65, 96)})
    common = {"depth": 5, "qkv_bias": True, "proj_drop": 0.0}
    assert sites_of(Pvt, config, 5) == [
        {"dim": 8, "num_heads": 1, "grid": (17, 24), "layer": 0, "reduction": 8, **common},
        {"dim": 12, "num_heads": 3, "grid": (9, 12), "layer": 1, "reduction": 4, **common},
        {"dim": 12, "num_heads": 3, "grid": (9, 12), "layer": 2, "reduction": 4, **common},
        {"dim": 16, "num_heads": 2, "grid": (5, 6), "layer": 3, "reduction": 2, **common},
        {"dim": 24, "num_heads": 4, "grid": (3, 3), "layer": 4, "reduction": 1, **common},
    ]


@families
def test_drop_path_grows_with_depth(name):
    model = tiny_model(name, drop_path_rate=0.4)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    rates = [[block.drop_path1.drop_prob, block.drop_path2.drop_prob] for block in blocks]
    expected = torch.linspace(0, 0.4, len(blocks))
    torch.testing.assert_close(torch.tensor(rates), expected[:, None].expand(-1, 2))


@families
def test_initialisation(name):
    sizes = {"embed_dim": 96} if name == "deit" else {"embed_dims": (64, 72, 80, 96)}
    model = tiny_model(name, "softmax", **sizes)
    for key, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.1), key
        if isinstance(module, nn.Conv2d) and name != "deit":
            fan_out = module.weight[0, 0].numel() * module.out_channels / module.groups
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1), key
        if isinstance(module, nn.Linear | nn.Conv2d) and not key.startswith("patch_embed"):
            assert not module.bias.any(), key
    if name == "deit":
        assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("options", [{"class_token": True, "dist_token": True}, {"mask_token": True, "num_classes": 0}])
def test_the_std_of_linear_layers(options):
    """Every linear layer has the numbers of std 0.02, scaled; a second initialisation leaves trained ones alone."""
    narrow, stock = (tiny_model("deit", init_std=std, **options) for std in (0.1, 0.02))
    linears = [f"{name}.weight" for name, module in narrow.named_modules() if isinstance(module, nn.Linear)]
    stds = {name: 5 if name in linears else 1 for name in stock.state_dict()}
    expected = {name: stds[name] * x for name, x in stock.state_dict().items()}
    torch.testing.assert_close(narrow.state_dict(), expected, rtol=1e-6, atol=0)
    trained = {name: x.clone() for name, x in narrow.state_dict().items() if ".mlp." in name or ".attn." in name}
    narrow.init_weights()
    torch.testing.assert_close({name: narrow.state_dict()[name] for name in trained}, trained, rtol=0, atol=0)
    if "mask_token" in options:
        assert narrow.decoder.weight.std().item() == pytest.approx(0.1, rel=0.1)
        return
    narrow.reset_classifier(40)
    for head in narrow.get_classifier():
        assert head.weight.std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("patch_size", "widths"), [(4, [24, 48, 48]), (8, [12, 24, 48, 48]), (16, [6, 12, 24, 48, 48])]
)
def test_conv_stem(patch_size, widths):
    options = {"img_size": (64, 96), "patch_size": patch_size, "embed_dim": 48, "depth": 1, "num_heads": 3}
    model = create_model("deit", stem="conv", **options)
    images = torch.randn(2, 3, 64, 96)
    stem = model.patch_embed.proj
    halving = [nn.Conv2d, nn.BatchNorm2d, nn.GELU]
    assert [type(layer) for layer in stem] == halving * (len(widths) - 1) + [nn.Conv2d]
    assert [layer.out_channels for layer in stem if isinstance(layer, nn.Conv2d)] == widths
    assert stem(images).shape == (2, 48, 64 // patch_size, 96 // patch_size)
    assert model(images).shape == (2, 1000)


@families
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_blocks_work_on_contiguous_tokens(name, memory_format):
    model = tiny_model(name).eval()
    images = tiny_images(name)
    expected = model(images)
    strides = []
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda _, inputs: strides.append(inputs[0].is_contiguous()))
    model.to(memory_format=memory_format)
    torch.testing.assert_close(model(images.to(memory_format=memory_format)), expected)
    assert strides
    assert all(strides)


def test_other_image_sizes():
    model = tiny_model("deit", dynamic_img_size=True).eval()
    fixed = tiny_model("deit").eval()
    torch.testing.assert_close(model(tiny_images("deit")), fixed(tiny_images("deit")))
    larger = tiny_model("deit", img_size=(72, 56)).eval()
    larger.load_state_dict(resample_pos_embed(fixed.state_dict(), larger, grid=(6, 5)))
    images = torch.randn(2, 3, 72, 56)
    torch.testing.assert_close(model(images), larger(images))
    for given, remedy in ((images, "build it with dynamic_img_size="), (images[..., 1:], "resize them")):
        with pytest.raises(ValueError, match=rf"got images of \(72, .*, .* for \(48, 40\); {remedy}"):
            fixed(given)
    pyramid = tiny_model("pvtv2_b0").eval()
    assert [tuple(y.shape[2:]) for y in pyramid.forward_intermediates(torch.randn(2, 3, 70, 99))[1]] == [
        (18, 25), (9, 13), (5, 7), (3, 4)
    ]  # fmt: skip


def test_resampling_needs_a_known_grid():
    model = tiny_model("deit", img_size=(72, 56))
    with pytest.raises(OptionError, match=r"grid: 30 position embeddings are no square"):
        resample_pos_embed(tiny_model("deit").state_dict(), model)
    same = tiny_model("deit")
    assert resample_pos_embed(same.state_dict(), same)["pos_embed"].data_ptr() == same.pos_embed.data_ptr()
    state_dict = tiny_model("pvtv2_b0").state_dict()
    assert resample_pos_embed(state_dict, tiny_model("pvtv2_b0")) is state_dict


BY_BLOCK = "one mechanism or a list of mappings that name their blocks"
BY_STAGE = "one mechanism or a list of 4, or of mappings that name their stage"


@pytest.mark.parametrize(
    ("name", "attention", "options", "message"),
    [
        ("deit_tiny_p9", "softmax", {}, "model.name: unknown model 'deit_tiny_p9'; did you mean 'deit_tiny_p8'?"),
        ("resnet18", "eva", {}, "model.name: unknown model 'resnet18'; did you mean 'timm:resnet18'?"),
        ("eva_large_patch14_196", "eva", {}, "model.name: unknown model 'eva_large_patch14_196'; did you mean "
            "'timm:eva_large_patch14_196'? Its EvaAttention is softmax attention, and not the mechanism eva"),
        ("deit", "eva", {"img_size": 100}, "model.img_size = 100 is not a multiple of patch_size = 16; nearest: 96"),
        ("deit", "eva", {"img_size": [64, 7]}, "model.img_size = 7 is not a multiple of patch_size = 16; nearest: 16"),
        ("deit", "softmax", {"num_heads": 5}, "model.num_heads = 5 does not divide the width 192"),
        ("deit", "eva", {"stem": "conv", "patch_size": 14}, "model.patch_size = 14: the conv stem takes 4, 8 or 16"),
        ("deit", "eva", {"stem": "conv", "embed_dim": 90}, "model.embed_dim = 90: the conv stem needs a multiple of 8"),
        ("deit", "softmax", {"dist_token": True}, "model.dist_token = true needs class_token: true"),
        ("deit", ["softmax"], {}, f"attention: deit takes {BY_BLOCK}, got ['softmax']"),
        ("pvtv2_b0", ["sra", "sra"], {}, f"attention: pvtv2_b0 takes {BY_STAGE}, got ['sra', 'sra']"),
        ("pvtv2_b0", "sra", {"num_heads": (1, 2, 3, 4)}, "model.num_heads = 3 does not divide the width 160"),
        ("pvtv2_b0", "sra", {"global_pool": "token"}, "model.global_pool: 'token' is not a choice; known: , avg"),
    ],
)  # fmt: skip
def test_errors_name_key_value_and_remedy(name, attention, options, message):
    with pytest.raises(OptionError) as error:
        create_model(name, attention, **options)
    assert str(error.value) == message
