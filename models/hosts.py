"""Other people's models with another attention: `replace_attention` for models of timm and transformers.

A host stays as it is. Its attention modules end in one call of torch's `scaled_dot_product_attention`, and this call
goes to a mechanism: projections, norms of queries and keys, rotary positions, gates, the output projection and the rest
are the host's own. One forward pass on the meta device finds the modules, without weights and without a list of
classes. Whatever a call asks for and a mechanism does not do (a mask, grouped heads, ...) is refused.

vit = timm.create_model("vit_small_patch16_dinov3", pretrained=True)
vit = replace_attention(vit, {"name": "eva", "window_size": 7, "num_landmarks": 49})
"""

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from attention import Attention, Grid, OptionError
from models.assignment import Mechanism, assign, layer_factories
from models.host_layers import Calls, PassGrid, Replaced, call_problem, first_line, with_mixin

Host = TypeVar("Host", bound=nn.Module)

IMAGES = 2
"""Images of a forward pass on the meta device; more than one, so that windows in the batch show."""


class Call(NamedTuple):
    """A call of `scaled_dot_product_attention` in a forward pass, by the module `name`, for N queries.

    Attributes:
        problem: the reason why a mechanism cannot serve it; "" if there is none.
        image: name of the convolution whose (H, W) output the tokens were made of; "" without one.
        has_order: False if the tokens are some of the H*W, shuffled, or before others; the grid is then (1, N).
    """

    name: str
    problem: str
    dim: int
    num_heads: int
    num_tokens: int
    image: str
    grid: Grid
    num_prefix_tokens: int = 0
    has_order: bool = True

    def place(self) -> dict[str, Any]:
        """Fields of the `LayerContext` of a mechanism in its place."""
        return {name: getattr(self, name) for name in ("dim", "num_heads", "grid", "num_prefix_tokens")}


def replace_attention(
    model: Host, attention: Mechanism | Sequence[Mechanism], img_size: int | Grid | None = None
) -> Host:
    """Replaces the core of the attention layers of a model of timm or transformers, in place; returns the model.

    Args:
        model: a model of images (B, channels, height, width), before it is compiled, quantised or wrapped.
        attention: a mechanism, by its name or as a mapping with its options, or a list of mechanisms that name their
            blocks, see `models.assignment`. Blocks are numbered in the order in which they run.
        img_size: height and width of images that the model takes; None: those of its own description. The mechanism's
            parameters have the sizes of their grid. The model takes the same image sizes as before.
    Raises:
        OptionError: a model or a layer that no mechanism can serve; an unknown mechanism, option or block; a mechanism
            that needs more than queries, keys and values, or that refuses the grid or the prefix tokens. The model is
            then unchanged.
    """
    return replace_calls(model, attention_calls(model, img_size), attention)


def replace_calls(model: Host, layers: Sequence[Call], attention: Mechanism | Sequence[Mechanism]) -> Host:
    """`replace_attention` in the layers of `attention_calls`."""
    if refused := next((call for call in layers if call.problem), None):
        remedy = "a mechanism can take the place of plain self-attention alone"
        raise OptionError("model", f"{refused.name} {refused.problem}; {remedy}")
    entries, shared = assign(type(model).__name__, attention, [len(layers)]), dict[Any, Any]()
    with torch.device("cpu"):  # the check of projections computes
        cores = [
            _create_core(functools.partial(factory, layer=layer, depth=len(layers), shared=shared), call)
            for layer, (factory, call) in enumerate(zip(layer_factories(entries), layers, strict=True))
        ]
    grids = defaultdict[str, PassGrid](PassGrid)
    for call, (core, extra) in zip(layers, cores, strict=True):
        module: Any = model.get_submodule(call.name)
        like = next(module.parameters(), next(model.parameters()))
        module.__class__ = with_mixin(Replaced, module.__class__)
        module.core = core.to(like.device, like.dtype).train(module.training)
        module.host_name, module.extra = call.name, extra
        module.pass_grid = grids[call.image] if call.has_order else None
    for image, pass_grid in grids.items():
        model.get_submodule(image).register_forward_hook(pass_grid)
        if hasattr(model, "config"):
            model.register_forward_pre_hook(pass_grid.start, with_kwargs=True)
            model.register_forward_hook(pass_grid.stop, always_call=True)
    return model


def attention_calls(model: nn.Module, img_size: int | Grid | None = None) -> list[Call]:
    """The attention layers of a model, in the order in which they run; attention that pools the tokens is left out.

    Raises:
        OptionError: `replace_attention` takes no such model; it has no attention layer; it runs on no image.
    """
    kind = type(model).__name__
    if problem := _model_problem(model):
        raise OptionError("model", f"{kind} {problem}")
    layers = []
    calls, in_training = (_calls(model, img_size, training) for training in (False, True))
    for name, call in calls.items():
        trained, own = in_training.get(name, call), getattr(model, "num_prefix_tokens", None)
        (H, W), P, problem = call.grid, call.num_tokens - math.prod(call.grid), call.problem or trained.problem
        if "forward" in vars(model.get_submodule(name)):
            problem = "has a forward pass that was set by hand, as by accelerate; replace the attention before"
        is_whole = call.has_order and P >= 0 and call.num_tokens <= trained.num_tokens
        if not is_whole or hasattr(getattr(model, "config", None), "mask_ratio"):
            call = call._replace(grid=(1, call.num_tokens), has_order=False)
        elif not call.image:
            problem = problem or "has tokens that no convolution makes of an image, so that they have no grid (NaFlex)"
        elif own != P and (own is not None or P >= H * W):
            problem = problem or f"has {call.num_tokens} tokens, which are no {H}x{W} grid and its prefix tokens"
        else:
            call = call._replace(num_prefix_tokens=P)
        layers.append(call._replace(problem=problem))
    if unfused := [name for name, module in model.named_modules() if getattr(module, "fused_attn", True) is False]:
        problem = "has fused_attn = False, so that its attention is no call that can be replaced; call"
        raise OptionError("model", f"{unfused[0]} {problem} timm.layers.set_fused_attn(True, experimental=True) before")
    if not layers:
        implementation = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
        remedy = "take another model, such as a ViT of timm"
        if implementation != "sdpa":
            remedy = f"it has attn_implementation = {implementation!r}: call its set_attn_implementation('sdpa')"
        problem = "has no attention among its tokens that calls torch's scaled_dot_product_attention"
        raise OptionError("model", f"{kind} {problem}; {remedy}")
    return layers


def _calls(model: nn.Module, img_size: int | Grid | None, training: bool) -> dict[str, Call]:
    """The calls of `scaled_dot_product_attention` in a forward pass on the meta device, by the names of their modules.

    Attention that pools tokens is left out: it has fewer queries than keys (learned queries, a class token), or outputs
    (B, C).
    """
    calls, probe = dict[str, Call](), on_meta(model).train(training)
    running: list[list[Any]] = []  # [name, number of calls] of the modules that run, the innermost last
    image: tuple[str, Grid] = "", (0, 0)  # name and output's (H, W) of the latest convolution
    is_last = True  # no tokens are behind those of the image

    def leave(name: str, module: nn.Module, args: Any, output: Any) -> None:
        nonlocal image
        running.pop()
        if isinstance(module, nn.Conv2d):
            image = name, tuple(output.shape[-2:])
        if isinstance(output, Tensor) and output.ndim == 2:
            calls.pop(name, None)

    def join(tensors: list[Tensor], dim: int = 0, **options: Any) -> Tensor:
        nonlocal is_last
        of_image = [x.ndim == 3 and x.shape[1] == math.prod(image[1]) for x in tensors]
        is_last = is_last and (dim not in (1, -2) or of_image[-1] or not any(of_image))
        return torch.cat(tensors, dim, **options)

    def record(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        running[-1][1] += 1
        (name, number), h, N = running[-1], query.shape[1], query.shape[-2]
        problem = call_problem(query, key, value, *args, **kwargs)
        if number > 1:
            problem = f"calls scaled_dot_product_attention {number} times"
        elif not problem and query.shape[0] != IMAGES:
            problem = f"folds windows into the batch ({query.shape[0] // IMAGES} for each image)"
        if key.shape[-2] <= N and (problem or name not in calls):
            calls[name] = Call(name, problem, h * query.shape[-1], h, N, *image, has_order=is_last)
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    for name, module in probe.named_modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module.register_forward_pre_hook(lambda module, args, name=name: running.append([name, 0]))
        module.register_forward_hook(functools.partial(leave, name))
    with torch.no_grad(), Calls(record), Calls(join, torch.cat):
        run_on_meta(probe, img_size)
    return calls


def run_on_meta(probe: nn.Module, img_size: int | Grid | None) -> Any:
    """The output of a model on the meta device for `IMAGES` images; an OptionError says that it refuses them."""
    channels = next((x for m in probe.modules() if (x := getattr(m, "in_chans", getattr(m, "in_channels", 0)))), 3)
    own = [getattr(module, "img_size", None) for module in probe.modules()]
    own.append(getattr(getattr(probe, "config", None), "image_size", None))
    own.append(getattr(probe, "pretrained_cfg", {}).get("input_size", ())[-2:])
    size, weight = next(filter(None, own), None) if img_size is None else img_size, next(probe.parameters(), None)
    problem = "does not say which images it takes"
    remedy = "give img_size, and a model of images (B, channels, height, width) or that part of it (vision_model)"
    if size is not None:
        try:
            with torch.device("meta"):
                return probe(torch.empty(IMAGES, channels, *to_2tuple(size), dtype=getattr(weight, "dtype", None)))
        except Exception as error:  # the host's own
            problem = f"refuses images of this size with {channels} channels ({first_line(error)})"
    raise OptionError("model.img_size", f" = {size}: {type(probe).__name__} {problem}; {remedy}")


def on_meta(model: Host) -> Host:
    """A copy of a model on the meta device."""
    memo: dict[int, Any] = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in model.parameters()}
    memo |= {id(x): x.to("meta") for x in model.buffers()}
    return copy.deepcopy(model, memo)


def _model_problem(model: nn.Module) -> str:
    """The reason why a model is refused as a whole, and the remedy; "" if there is none."""
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    if any(isinstance(module, Attention) for module in modules):
        return "has attention of this package already; create it anew, or give `models.create_model` another attention"
    changed = (
        isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule | DistributedDataParallel | DataParallel)
        or hasattr(module, "_orig_mod")
        or module._compiled_call_impl is not None
        or ".quantized." in type(module).__module__
        for module in modules
    )
    is_plain = modules and all(type(x.data) is Tensor and x.is_floating_point() for x in model.parameters())
    if not is_plain or any(changed):
        problem = "is compiled, traced, quantised, sharded, wrapped or no torch.nn.Module"
        return f"{problem}; replace the attention of the model itself before"
    return ""


def _create_core(factory: Callable[..., Attention], call: Call) -> tuple[Attention, tuple[None, ...]]:
    """The mechanism of a layer without its projections, and further inputs of its `attend`, all None.

    Raises:
        OptionError: the mechanism refuses the layer, or makes its inputs or outputs by more than a projection.
    """
    core, extra, problem = factory(**call.place()), tuple[None, ...](), ""
    if not call.has_order and not core.ignores_order():
        problem = "needs a grid of tokens, but patches are left out (patch dropout), shuffled (mask_ratio) or not last"
        raise OptionError(core.label, f"{problem}; take a mechanism that ignores their order, such as softmax")
    if core.gate is not None:
        problem = "gates its output by the layer's input"
    elif type(core).project is not Attention.project:
        x = torch.linspace(-1, 1, call.num_tokens)[None, :, None].expand(-1, -1, call.dim)
        with torch.no_grad():
            own, plain = core.project(x, call.grid), Attention.project(core, x, call.grid)
        extra = own[len(plain) :]
        if not all(map(torch.equal, own, plain)) or any(x is not None for x in extra):
            problem = "has projections of its own"
    if not problem:
        del core.qkv, core.proj
        tokens = torch.empty(1, call.num_heads, call.num_tokens, core.head_dim, device="meta")
        projected = (tokens,) if core.num_projections == 1 else (tokens, tokens, tokens, *extra)
        if copy.deepcopy(core).to("meta").attend_all(projected, call.grid).shape != tokens.shape:
            problem = "has an output projection of its own"
    if problem:
        remedy = "keeps its own projections; choose other options, or another mechanism"
        raise OptionError(core.label, f"{problem}, and {call.name} {remedy}")
    return core, extra
