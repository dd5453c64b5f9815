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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from attention import Attention, Grid, OptionError
from models.assignment import Mechanism, assign, layer_factories
from models.host_layers import Calls, PassGrid, Replaced, call_problem, with_mixin

Host = TypeVar("Host", bound=nn.Module)


class Call(NamedTuple):
    """A call of `scaled_dot_product_attention` in a forward pass, by the module `name`.

    Attributes:
        problem: the reason why a mechanism cannot serve it; "" if there is none.
        num_heads, head_dim, num_tokens: heads h, channels d and number of the queries.
        image: name of the convolution whose (H, W) output the tokens were made of; "" without one.
        grid: (H, W); (1, number of tokens) without order.
        num_prefix_tokens: prefix tokens P.
        has_order: False if the tokens are some of the H*W, or are shuffled.
    """

    name: str
    problem: str
    num_heads: int
    head_dim: int
    num_tokens: int
    image: str
    grid: Grid
    num_prefix_tokens: int = 0
    has_order: bool = True

    def place(self) -> dict[str, Any]:
        """Fields of the `LayerContext` of a mechanism in its place."""
        where = {"grid": self.grid, "num_prefix_tokens": self.num_prefix_tokens}
        return {"dim": self.num_heads * self.head_dim, "num_heads": self.num_heads, **where}


class Survey:
    """Hooks of the modules of a model, and the calls of `scaled_dot_product_attention` in its forward pass.

    Attributes:
        calls: those of attention among tokens. Attention that pools them is left out: it has fewer queries than keys
            (learned queries, a class token), or outputs (B, C).
        running: [name, number of calls] of the modules that run, the innermost last.
        image, grid: name and output's (H, W) of the latest convolution.
    """

    images = 2

    def __init__(self, model: nn.Module):
        self.calls: dict[str, Call] = {}
        self.running: list[list[Any]] = []
        self.image: str = ""
        self.grid: Grid = (0, 0)
        for name, module in model.named_modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
            module.register_forward_pre_hook(lambda module, args, name=name: self.running.append([name, 0]))
            module.register_forward_hook(functools.partial(self.leave, name))

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        if isinstance(module, nn.Conv2d):
            self.image, self.grid = name, tuple(output.shape[-2:])
        if isinstance(output, Tensor) and output.ndim == 2:
            self.calls.pop(name, None)

    def record(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.running[-1][1] += 1
        (name, number), N = self.running[-1], query.shape[-2]
        problem = call_problem(query, key, value, *args, **kwargs)
        if number > 1:
            problem = f"calls scaled_dot_product_attention {number} times"
        elif not problem and query.shape[0] != self.images:
            problem = f"folds windows into the batch ({query.shape[0] // self.images} for each image)"
        if key.shape[-2] <= N and (problem or name not in self.calls):
            call = Call(name, problem, query.shape[1], query.shape[-1], N, self.image, self.grid)
            self.calls[name] = call
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


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
    grids: dict[str, PassGrid] = {}
    for call, (core, extra) in zip(layers, cores, strict=True):
        module: Any = model.get_submodule(call.name)
        like = next(module.parameters(), next(model.parameters()))
        module.__class__ = with_mixin(Replaced, module.__class__)
        module.core = core.to(like.device, like.dtype).train(module.training)
        module.host_name, module.extra = call.name, extra
        module.pass_grid = grids.setdefault(call.image, PassGrid()) if call.has_order else None
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
    if problem := _model_problem(model):
        raise OptionError("model", f"{type(model).__name__} {problem}")
    layers = []
    calls, in_training = (_calls(model, img_size, training) for training in (False, True))
    for name, call in calls.items():
        trained, own = in_training.get(name, call), getattr(model, "num_prefix_tokens", None)
        (H, W), P, problem = call.grid, call.num_tokens - math.prod(call.grid), call.problem or trained.problem
        if "forward" in vars(model.get_submodule(name)):
            problem = "has a forward pass that was set by hand, as by accelerate; replace the attention before"
        if P < 0 or trained.num_tokens < call.num_tokens or hasattr(getattr(model, "config", None), "mask_ratio"):
            call = call._replace(grid=(1, call.num_tokens), has_order=False)
        elif own != P and (own is not None or P >= H * W):
            problem = problem or f"has {call.num_tokens} tokens, which are no {H}x{W} grid and its prefix tokens"
        else:
            call = call._replace(num_prefix_tokens=P)
        layers.append(call._replace(problem=problem))
    for name, module in model.named_modules():
        if getattr(module, "fused_attn", True) is False:
            problem = "has fused_attn = False, so that its attention is no call that can be replaced; call"
            raise OptionError("model", f"{name} {problem} timm.layers.set_fused_attn(True, experimental=True) before")
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if not layers and implementation != "sdpa":
        problem = f"has attn_implementation = {implementation!r}; call its set_attn_implementation('sdpa')"
        raise OptionError("model", f"{type(model).__name__} {problem}")
    if not layers:
        problem = "has no attention among its tokens that calls torch's scaled_dot_product_attention"
        raise OptionError("model", f"{type(model).__name__} {problem}; take another model, such as a ViT of timm")
    return layers


def _calls(model: nn.Module, img_size: int | Grid | None, training: bool) -> dict[str, Call]:
    """The calls in a forward pass of `Survey.images` images on the meta device, by the names of their modules."""
    probe = on_meta(model).train(training)
    survey, dtype = Survey(probe), next((x.dtype for x in model.parameters()), None)
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    shape = survey.images, channels, *to_2tuple(img_size or _image_size(model))
    try:
        with torch.no_grad(), torch.device("meta"), Calls(survey.record):
            probe(torch.empty(shape, dtype=dtype))
    except Exception as error:  # the host's own
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        problem = f"{type(model).__name__} refuses images {shape}: {reason}"
        raise OptionError("model", f"{problem}; give img_size, or the part of the model that takes images") from error
    return survey.calls


def on_meta(model: Host) -> Host:
    """A copy of a model on the meta device."""
    memo: dict[int, Any] = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in model.parameters()}
    memo |= {id(x): x.to("meta") for x in model.buffers()}
    return copy.deepcopy(model, memo)


def _image_size(model: nn.Module) -> Any:
    """The image size of a model's description."""
    own = [getattr(module, "img_size", None) for module in model.modules()]
    own.append(getattr(getattr(model, "config", None), "image_size", None))
    own.append(getattr(model, "pretrained_cfg", {}).get("input_size"))
    size = next((size for size in own if size), None)
    if size is None:
        raise OptionError("img_size", f" = None: {type(model).__name__} does not say which images it takes; give it")
    return size if isinstance(size, int) else tuple(size)[-2:]


def _model_problem(model: nn.Module) -> str:
    """The reason why a model is refused as a whole, and the remedy; "" if there is none."""
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    if not modules:
        return "is no torch.nn.Module; give a model of timm or transformers"
    if hasattr(model, "vision_model") and hasattr(model, "text_model"):
        return "takes text as well; give its vision_model"
    if any(isinstance(module, Attention) for module in modules):
        return "has attention of this package already; create it anew, or give `models.create_model` another attention"
    changed = (
        isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule | DistributedDataParallel | DataParallel)
        or hasattr(module, "_orig_mod")
        or module._compiled_call_impl is not None
        or ".quantized." in type(module).__module__
        for module in modules
    )
    if any(changed) or any(type(x.data) is not Tensor or not x.is_floating_point() for x in model.parameters()):
        return "is compiled, traced, quantised, sharded or wrapped; replace the attention of the model itself before"
    return ""


def _create_core(factory: Callable[..., Attention], call: Call) -> tuple[Attention, tuple[None, ...]]:
    """The mechanism of a layer without its projections, and further inputs of its `attend`, all None.

    Raises:
        OptionError: the mechanism refuses the layer, or makes its inputs or outputs by more than a projection.
    """
    core = factory(**call.place())
    if not call.has_order and not core.ignores_order():
        problem = "needs a grid of tokens, which some or shuffled patches are not (patch dropout, mask_ratio)"
        raise OptionError(core.label, f"{problem}; take a mechanism that ignores their order, such as softmax")
    extra: tuple[None, ...] = ()
    problem = "" if core.gate is None else "gates its output by the layer's input"
    if not problem and type(core).project is not Attention.project:
        x = torch.linspace(-1, 1, call.num_tokens)[None, :, None] * torch.ones(call.num_heads * call.head_dim)
        with torch.no_grad():
            own, plain = core.project(x, call.grid), Attention.project(core, x, call.grid)
        extra = own[len(plain) :]
        if len(plain) == 2 or not all(map(torch.equal, own, plain)) or any(x is not None for x in extra):
            problem = "has projections of its own"
    if not problem:
        del core.qkv, core.proj
        tokens = torch.empty(1, call.num_heads, call.num_tokens, call.head_dim, device="meta")
        projected = (tokens,) if core.num_projections == 1 else (tokens, tokens, tokens, *extra)
        if copy.deepcopy(core).to("meta").attend_all(projected, call.grid).shape != tokens.shape:
            problem = "has an output projection of its own"
    if problem:
        remedy = "keeps its own projections; choose other options, or another mechanism"
        raise OptionError(core.label, f"{problem}, and {call.name} {remedy}")
    return core, extra
