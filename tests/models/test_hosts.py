"""Models of timm and transformers with another attention: `replace_attention` and the census."""

import copy
import functools
import io
from contextlib import nullcontext

import pytest
import timm
import torch
import transformers
from timm.models import VisionTransformer
from torch import nn

from attention import ATTENTION, LayerContext, OptionError
from models import replace_attention
from models.census import main
from models.host_layers import Replaced, call_problem
from models.hosts import attention_calls
from models.of_transformers import FAMILIES
from tests.support.comparisons import BF16_RMS, FP32_RMS, FP64, rms_ratio
from tests.support.facts import CASES, light
from tests.support.partition import chosen

SIZE = 64, 96
EVA = {"name": "eva", "window_size": 2, "num_landmarks": 4}
VIT = {"embed_dim": 48, "depth": 2, "num_heads": 3}
OF_TIMM = {  # small options of a host for every attention class that is reached
    "vit_tiny_patch16_224": VIT,
    "vit_small_patch14_reg4_dinov2": {**VIT, "patch_size": 16},
    "vit_small_patch16_dinov3": VIT,
}
OTHERS = {
    "eva02_tiny_patch14_224": {**VIT, "patch_size": 16},
    "vit_base_patch16_rope_mixed_224": VIT,
    "vit_base_patch16_siglip_224": VIT,
    "vit_base_patch16_xp_224": VIT,
    "deit3_small_patch16_224": VIT,
    "pit_ti_224": {"base_dims": (16, 16, 16), "depth": (1, 1, 1)},
    "volo_d1_224": {},
    "caformer_s18": {"img_size": None},
    "fastvit_sa12": {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 64), "img_size": None},
    "cpubone_nano": {"img_size": None},
    "lowformer_b0": {"img_size": None},
    "iformer_h": {"img_size": None},
    "csatv2": {"dims": (16,) * 4, "depths": (1,) * 4, "transformer_depths": (0, 0, 1, 1), "img_size": None},
}
GIVEN = {"volo_d1_224": SIZE}
"""Image sizes of hosts that do not describe their own."""
HOSTS = [*OF_TIMM, *(pytest.param(name, marks=pytest.mark.complete) for name in OTHERS)]
ALL_FAMILIES = [*FAMILIES.split(), "vit_mae"]
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64}
SMALL |= {"image_size": 64, "patch_size": 16}


def of_timm(name, **options):
    torch.manual_seed(0)
    options = {"num_classes": 5, "img_size": SIZE, **(OF_TIMM | OTHERS)[name], **options}
    return timm.create_model(name, **{key: value for key, value in options.items() if value is not None}).eval()


def of_family(name, **options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **options})
    return transformers.AutoModel.from_config(config).eval()


def images(size=SIZE, count=2):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))


def outputs(host, x):
    y = host(x)
    return y if isinstance(y, torch.Tensor) else y.last_hidden_state


def gradients(host, x):
    host.zero_grad()
    y = outputs(host, x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y, {name: p.grad for name, p in host.named_parameters() if p.grad is not None}


def assert_same(a, b):
    (y, of_a), (z, of_b) = a, b
    assert torch.equal(y, z)
    assert of_a.keys() == of_b.keys()
    assert all(torch.equal(of_a[name], of_b[name]) for name in of_a)


complete = pytest.mark.complete


@pytest.mark.parametrize("name", [*HOSTS, *chosen(ALL_FAMILIES, ("dinov2", "dinov3_vit").__contains__)])
def test_softmax_is_the_host_to_the_bit(name):
    """In timm, and in transformers."""
    make, x = (of_family, images((64, 64))) if name in ALL_FAMILIES else (of_timm, images())
    host, replaced = make(name), replace_attention(make(name), "softmax", GIVEN.get(name))
    count = 2 if name in ALL_FAMILIES else len(attention_calls(host, GIVEN.get(name)))
    assert sum(isinstance(module, Replaced) for module in replaced.modules()) == count
    assert host.state_dict().keys() == replaced.state_dict().keys()
    for model in (host, replaced):
        torch.manual_seed(1)  # vit_mae draws its patches
        model.result = gradients(model, x)
    assert_same(host.result, replaced.result)


def queries_of(host, x):
    """The queries of the first attention layer, without prefix tokens: (B, N, h * d)."""
    core, found = next(module.core for module in host.modules() if isinstance(module, Replaced)), []
    attend = core.attend
    core.attend = lambda q, *others: (found.append(q), attend(q, *others))[1]
    host(x)
    del core.attend
    return found[0][:, :, core.num_prefix_tokens :].transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize("name", HOSTS)
def test_tokens_are_in_raster_order(name):
    """A change of a patch changes its own token most; after convolutions perhaps a neighbour of it."""
    is_convolutional = "img_size" in (OF_TIMM | OTHERS)[name]
    size = (256, 384) if is_convolutional else SIZE
    host = replace_attention(of_timm(name), "softmax", GIVEN.get(name))
    layer = next(module for module in host.modules() if isinstance(module, Replaced))
    x = images(size, count=1)
    before, (H, W) = queries_of(host, x), layer.pass_grid.grid
    assert 1 < H < W
    for row, column in [(0, W - 1), (H - 1, 0), (H - 1, W - 2)]:
        height, width = size[0] // H, size[1] // W
        changed = x.clone()
        changed[..., row * height : (row + 1) * height, column * width : (column + 1) * width] += 3
        difference = (queries_of(host, changed) - before).norm(dim=-1)[0]
        most = divmod(int(difference.argmax()), W)
        assert max(abs(most[0] - row), abs(most[1] - column)) <= is_convolutional


@complete
def test_transformers_recompute_compile_and_take_other_sizes():
    host = replace_attention(of_family("dinov2_with_registers"), {**EVA, "window_size": 3}).train()
    results, x = [], images((96, 160))
    for is_checkpointed in (False, True):
        if is_checkpointed:
            host.activation_checkpointing_enable()
        torch.manual_seed(1)
        results.append(gradients(host, x))
    assert_same(*results)
    compiled = torch.compile(host.eval(), fullgraph=True, backend="eager")
    with torch.no_grad():
        assert rms_ratio(outputs(compiled, x), outputs(host, x)) < FP32_RMS
        exported = torch.export.export(host, (x,)).module()  # with a mask of ones
        assert rms_ratio(outputs(exported, x), outputs(host, x)) < FP32_RMS
        mask = {"attention_mask": torch.ones(2, 65, dtype=torch.bool)}
        with pytest.raises(Exception, match="adds a mask or a position bias"):
            torch.export.export(host, (x,), mask)


REFUSED = {  # mechanism -> the reason, by default
    **dict.fromkeys(["transformer_ls", "linear_sra", "abc", "inline", "reformer", "sra"], "has projections of its own"),
    "vittt": "has projections of its own",
    **dict.fromkeys(["rala", "polaformer", "mala", "mlla", "circulant"], "gates its output by the layer's input"),
}
WITH_OPTION = {"reduction": "has projections of its own", "scales": "has an output projection of its own"}
PLAIN = {"mlla": ["block"], "inline": ["local"]}
"""Refused mechanism -> options without which it has no gate and no projections of its own."""

ONE_LAYER = [x for x in CASES if len(x.grid) == 2 and not {"depth", "layer"} & x.options.keys()]  # as the host has


@pytest.mark.parametrize("case", light(ONE_LAYER))
def test_every_mechanism_is_its_own_layer_or_refused(case):
    """A host's layer with the projections of the mechanism's own layer has the same outputs and gradients."""
    P, context = case.options.get("num_prefix_tokens", 0), LayerContext.__dataclass_fields__
    size = {"patch_size": 2, "img_size": tuple(2 * side for side in case.grid)}
    tokens = {"class_token": P > 0, "reg_tokens": max(0, P - 1), "global_pool": "avg"}
    host = VisionTransformer(**size, **tokens, embed_dim=12, depth=1, num_heads=3).double()
    own_options = ATTENTION[case.name].Config.__dataclass_fields__
    options = {key: value for key, value in case.options.items() if key in own_options or key not in context}
    reason = REFUSED.get(case.name) or next((x for key, x in WITH_OPTION.items() if key in case.options), None)
    is_refused = reason and not any(case.options.get(key, True) is False for key in PLAIN.get(case.name, ()))
    remedy = "keeps its own projections; choose other options, or another mechanism"
    with pytest.raises(OptionError, match=f"{reason}.*{remedy}") if is_refused else nullcontext():
        replace_attention(host, {"name": case.name, **options})
    if is_refused:
        return
    ours, layer, x = case.build(), host.blocks[0].attn, case.tokens()
    names = {name: value for name, value in ours.state_dict().items() if not name.startswith(("qkv.", "proj."))}
    layer.core.load_state_dict(names)
    layer.proj.load_state_dict(ours.proj.state_dict())
    with torch.no_grad():
        for name, parameter in ours.qkv.named_parameters():
            layer.qkv.get_parameter(name)[-len(parameter) :] = parameter
    layer.pass_grid.grid = case.grid
    for is_training in (False, True):
        results = []
        for function in (functools.partial(ours.train(is_training), grid=case.grid), layer.train(is_training)):
            torch.manual_seed(3)
            x = x.detach().requires_grad_()
            y = function(x)
            results.append((y, *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), x)))
        torch.testing.assert_close(*results, rtol=FP64, atol=FP64)


def test_another_image_size_has_its_own_grid():
    """Parameters of positions are those of the grid at replacement; windows and landmarks follow the image."""
    host = replace_attention(of_timm("vit_small_patch14_reg4_dinov2", dynamic_img_size=True), EVA)
    core, x, grids = host.blocks[0].attn.core, images((48, 160)), []
    attend = core.attend
    core.attend = lambda *args: (grids.append(args[3]), attend(*args))[1]
    y = host(x)
    assert grids == [(3, 10)]
    assert not torch.equal(host(x.mT.contiguous()), y)
    assert grids == [(3, 10), (10, 3)]


def test_a_mechanism_for_each_block():
    host = of_timm("vit_tiny_patch16_224")
    replace_attention(host, [{"blocks": 1, "name": "softmax"}, {"blocks": 0, **EVA}])
    assert [block.attn.core.name() for block in host.blocks] == ["eva", "softmax"]
    with pytest.raises(OptionError, match=r"attention\[0\].blocks = 2: there is no block 2; there are 0 to 1"):
        replace_attention(of_timm("vit_tiny_patch16_224"), [{"blocks": 2, **EVA}])


@pytest.mark.parametrize("name", chosen([*OF_TIMM, *FAMILIES.split()], "vit_small_patch16_dinov3".__eq__))
def test_copies_and_half_types(name):
    make, x = (of_family, images((64, 64))) if name in ALL_FAMILIES else (of_timm, images())
    host = replace_attention(make(name), EVA)
    y = outputs(host, x)
    file = io.BytesIO()
    torch.save(host, file)
    file.seek(0)
    for copied in (copy.deepcopy(host), torch.load(file, weights_only=False)):
        assert torch.equal(outputs(copied, x), y)
        *of_copy, own = (m.pass_grid for each in (copied, host) for m in each.modules() if isinstance(m, Replaced))
        assert of_copy[0] is of_copy[1] is not of_copy[2] is own
    with torch.autocast("cpu", torch.bfloat16):
        assert rms_ratio(outputs(host, x).float(), y) < 2 * BF16_RMS  # projections, norms and head as well
    half = replace_attention(make(name).bfloat16(), EVA)
    half.load_state_dict(host.state_dict())
    assert rms_ratio(outputs(half, x.bfloat16()).float(), y) < 3 * BF16_RMS


@pytest.mark.parametrize(("is_together", "is_frozen"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", [[(64, 96), (32, 48)], [(64, 96), (96, 64)]])
def test_checkpointing_recomputes_every_pass_on_its_own_grid(sizes, is_together, is_frozen):
    """Crops of several sizes go forward before one goes backward, or one after the other."""
    host = replace_attention(of_timm("vit_small_patch14_reg4_dinov2", dynamic_img_size=True), EVA).train()
    host.patch_embed.requires_grad_(not is_frozen)
    results, is_ambiguous = [], is_together and sizes[0] == sizes[1][::-1]
    for is_checkpointed in (False, True):
        host.set_grad_checkpointing(is_checkpointed)
        host.zero_grad()
        torch.manual_seed(1)
        if is_together:
            loss = sum(host(images(size)).square().sum() for size in sizes)
            refused = pytest.raises(ValueError, match="this pass has no grid, or grids of two shapes")
            with refused if is_checkpointed and is_ambiguous else nullcontext():
                loss.backward()
        else:
            for size in sizes:
                host(images(size)).square().sum().backward()
        results.append([p.grad for p in host.parameters() if p.grad is not None])
    assert is_ambiguous or all(map(torch.equal, *results))


@complete
def test_training_in_a_compiled_graph():
    host, x = replace_attention(of_timm("vit_small_patch16_dinov3"), EVA), images()
    (y, eager), (z, compiled) = (
        gradients(host, x),
        gradients(torch.compile(host, fullgraph=True, backend="aot_eager"), x),
    )
    assert rms_ratio(z, y) < FP32_RMS
    names = {name: f"_orig_mod.{name}" for name in eager}
    assert all(rms_ratio(compiled[names[name]], grad) < 10 * FP32_RMS for name, grad in eager.items())


@complete
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_exported(backend):
    host = replace_attention(of_timm("vit_small_patch14_reg4_dinov2", dynamic_img_size=True), EVA)
    compiled = torch.compile(host, fullgraph=True, backend=backend)
    with torch.no_grad():
        for size in (SIZE, (48, 160), (160, 48)):  # the second makes a graph for all sizes
            assert rms_ratio(compiled(images(size)), host(images(size))) < FP32_RMS
        if backend == "eager":  # once: an export has no backend
            exported = torch.export.export(host, (images(),)).module()
            assert rms_ratio(exported(images()), host(images())) < FP32_RMS


def changed(problem):
    """A host that is refused as a whole."""
    host = of_timm("vit_tiny_patch16_224")
    if problem == "scripted":
        return torch.fx.GraphModule(host, torch.fx.Graph())
    if problem == "exported":
        return object()
    if problem == "compiled":
        return torch.compile(host)
    if problem == "block compiled":
        host.blocks[0].compile()
    if problem == "quantised":
        host.head.weight = nn.Parameter(torch.zeros(5, 48, dtype=torch.int8), requires_grad=False)
    if problem == "parallel":
        return nn.DataParallel(host)
    if problem == "replaced":
        return replace_attention(host, "softmax")
    if problem == "unfused":
        host.blocks[1].attn.fused_attn = False
    if problem == "dropout":
        host.blocks[1].attn.attn_drop.p = 0.1
    if problem == "patched":
        host.blocks[1].attn.forward = host.blocks[1].attn.forward
    if problem == "scale":
        config = transformers.ViTConfig(**SMALL)
        host = transformers.ViTModel(config)
        host.layers[1].attention.scaling = 1.0
    if problem == "eager":
        return transformers.ViTModel(transformers.ViTConfig(**SMALL, attn_implementation="eager"))
    return host


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("scripted", "GraphModule is compiled, traced, quantised, .*; replace the attention of the model itself"),
        ("exported", "object is .* or no torch.nn.Module; replace the attention of the model itself"),
        ("compiled", "OptimizedModule is compiled"),
        ("block compiled", "VisionTransformer is compiled"),
        ("quantised", "VisionTransformer is compiled, traced, quantised"),
        ("parallel", "DataParallel is .* wrapped"),
        ("replaced", "has attention of this package already; create it anew"),
        ("unfused", r"blocks.1.attn has fused_attn = False, .*; call timm.layers.set_fused_attn"),
        ("dropout", r"blocks.1.attn drops attention weights \(dropout 0.1; make it 0, and set .* attn_drop\)"),
        (
            "scale",
            r"layers.1.attention scales its logits by 1 and not by 0.25; a mechanism can take the place of plain",
        ),
        ("patched", "blocks.1.attn has a forward pass that was set by hand, as by accelerate"),
        ("eager", r"ViTModel .* it has attn_implementation = 'eager': call its set_attn_implementation\('sdpa'\)"),
    ],
)
def test_a_model_is_refused_before_any_change(problem, message):
    host = changed(problem)
    modules = getattr(host, "modules", list)
    before = [type(module) for module in modules()]
    with pytest.raises(OptionError, match=f"model: .*{message}"):
        replace_attention(host, EVA)
    assert [type(module) for module in modules()] == before
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "depth", "message"),
    [
        ("resnet18", {}, "ResNet has no attention among its tokens that calls torch's scaled_dot_product_attention"),
        ("beit_base_patch16_224", {}, r"blocks.0.attn adds a mask or a position bias to its logits \(attn_mask\)"),
        ("swin_tiny_patch4_window7_224", {"depths": (1,) * 4}, "layers.0.blocks.0.attn has fused_attn = False"),
        ("pvt_v2_b0", {"depths": (1,) * 4}, "stages.0.blocks.0.attn has keys of another length, 49 for 3136 queries"),
        ("hiera_tiny_224", {}, "windows in a dimension of their own"),
        ("mobilevit_xxs", {}, "folds windows into the batch"),
        ("naflexvit_base_patch16_gap", {}, r"blocks.0.attn has tokens that no convolution makes.* no grid \(NaFlex\)"),
    ],
)
def test_an_architecture_is_refused_by_name(name, depth, message):
    with torch.device("meta"):
        host = timm.create_model(name, **depth)
    with pytest.raises(OptionError, match=message):
        replace_attention(host, EVA)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("identity", "takes no prefix tokens, and num_prefix_tokens = 5; set"),
        ({**EVA, "window_size": 9}, r"attention\(eva\).window_size = 9: .* 4x6 grid"),
        ({**EVA, "windows": 2}, "did you mean 'window_size'"),
        ({"name": "relu_linear", "scales": [3]}, "has an output projection of its own"),
    ],
)
def test_a_mechanism_is_refused_before_any_change(attention, message):
    host = of_timm("vit_small_patch16_dinov3")
    keys = host.state_dict().keys()
    with pytest.raises(OptionError, match=message):
        replace_attention(host, attention)
    assert host.state_dict().keys() == keys
    assert not any(isinstance(module, Replaced) for module in host.modules())


def test_attention_is_replaced_on_the_meta_device():
    with torch.device("meta"):  # agents have a method of projections, which is checked with numbers
        host = replace_attention(of_timm("vit_small_patch16_dinov3"), {"name": "agent", "num_landmarks": 4})
        assert host(torch.empty(2, 3, *SIZE)).is_meta
    assert all(weight.is_meta for weight in host.parameters())


def test_calls_that_say_something_else_are_refused():
    host = replace_attention(of_timm("vit_tiny_patch16_224"), EVA)
    layer, x = host.blocks[0].attn, torch.randn(2, 25, 48)
    host(images())
    with pytest.raises(ValueError, match=r"blocks.0.attn: .* is causal"):
        layer(x, is_causal=True)
    with pytest.raises(ValueError, match="adds a mask or a position bias to its logits"):
        layer(x, attn_mask=torch.ones(25, 25, dtype=torch.bool))
    with pytest.raises(ValueError, match="got 20 tokens after 1 prefix tokens, but this pass has a 4x6 grid"):
        layer(x[:, :21])
    layer.fused_attn = False
    with pytest.raises(ValueError, match=r"blocks.0.attn: 0 calls of scaled_dot_product_attention"):
        host(images())


def test_heads_that_no_mechanism_has_are_refused():
    q, k, v = (torch.empty(2, heads, 4, d) for heads, d in ((6, 8), (2, 8), (6, 4)))
    assert "grouped heads, 6 of queries and 2 of keys" in call_problem(q, k, k)
    assert "grouped heads" in call_problem(q, q, q, enable_gqa=True)
    assert "heads of 8 channels for queries and of 4 for values" in call_problem(q, q, v)
    assert not call_problem(q, q, q)


def test_patches_without_order_are_for_mechanisms_that_ignore_it():
    """Patch dropout leaves some tokens out in training; vit_mae shuffles them; yolos has others behind them."""
    build = functools.partial(of_timm, "vit_tiny_patch16_224", patch_drop_rate=0.5)
    assert_same(
        *[gradients(model.train(False), images()) for model in (build(), replace_attention(build(), "softmax"))]
    )
    replace_attention(build(), "linear").train()(images()).sum().backward()
    for host in (build(), of_family("vit_mae"), of_family("yolos", image_size=SIZE, num_detection_tokens=9)):
        with pytest.raises(OptionError, match=r"needs a grid of tokens.*; take a mechanism that ignores their order"):
            replace_attention(host, EVA)


def test_a_model_of_text_and_images_names_its_part():
    host = transformers.CLIPModel(transformers.CLIPConfig(text_config=SMALL, vision_config=SMALL))
    with pytest.raises(OptionError, match=r"CLIPModel does not say .* or that part of it \(vision_model\)"):
        replace_attention(host, EVA)
    with pytest.raises(OptionError, match="img_size = 0: CLIPVisionModel refuses images of this size"):
        replace_attention(host.vision_model, EVA, 0)
    replace_attention(host.vision_model, EVA)


def test_a_census_without_patterns_has_the_families_of_transformers(capsys, monkeypatch):
    monkeypatch.setattr(timm, "list_models", lambda patterns: [])
    monkeypatch.setattr("models.census.verdict", lambda name: (False, ""))  # the models are large
    main([])
    assert [line.partition(":")[2].split(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]] == ALL_FAMILIES


def test_census(capsys):
    main(["vit_tiny_patch16_224", "resnet18", "hf:dinov2"])
    assert capsys.readouterr().out.splitlines() == [
        "resnet18: refused: model: ResNet has no attention among its tokens that calls torch's "
        "scaled_dot_product_attention; take another model, such as a ViT of timm",
        "vit_tiny_patch16_224: 12 Attention",
        "hf:dinov2: 12 Dinov2Attention",
        "2 of 3 architectures",
    ]
    main(["hf:vitt"])
    assert "hf:vitt: refused: Unrecognized" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="vitt: no architecture of timm has such a name"):
        main(["vitt"])
