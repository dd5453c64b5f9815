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
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.overrides import TorchFunctionMode

from attention import Attention, Grid, OptionError, kernels
from models.assignment import Mechanism, assign, layer_factories

Host = TypeVar("Host", bound=nn.Module)

KEY = "model"
"""What the messages of refused hosts begin with."""


class Call(NamedTuple):
    """A call of `scaled_dot_product_attention` in a forward pass.

    Attributes:
        name: of the module that makes it.
        problem: the reason why a mechanism cannot serve it; "" if there is none.
        is_pooling: True for fewer queries than keys: learned queries, or a class token, that pool the tokens.
        num_heads, head_dim, num_tokens: heads h, channels d and number of the queries.
        image: name of the convolution whose (H, W) output the tokens were made of; "" without one.
        grid: (H, W); (1, number of tokens) if the tokens are some of the H*W, or are shuffled.
        num_prefix_tokens: prefix tokens P.
        has_order: False if the tokens are some of the H*W, or are shuffled.
    """

    name: str
    problem: str
    is_pooling: bool
    num_heads: int
    head_dim: int
    num_tokens: int
    image: str
    grid: Grid
    num_prefix_tokens: int = 0
    has_order: bool = True


class PassGrid:
    """Forward hook of the convolution that makes the tokens: the (H, W) grid of the present forward pass.

    Attributes:
        grid: of the latest pass.
        by_number: number of tokens -> grid, for activation checkpointing, which computes layers of earlier passes
            again; None for a number that grids of two shapes had.
    """

    def __init__(self) -> None:
        self.grid: Grid | None = None
        self.by_number: dict[int, Grid | None] = {}

    def __call__(self, module: nn.Module, args: Any, image: Tensor) -> None:
        H, W = image.shape[-2:]
        self.grid = (int(H), int(W)) if torch.jit.is_tracing() else (H, W)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            number, grid = int(H * W), (int(H), int(W))
            self.by_number[number] = grid if self.by_number.get(number, grid) == grid else None

    def of(self, number: int) -> Grid | None:
        """The grid of a layer with so many tokens; within a backward pass it may be that of an earlier pass."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return self.grid
        return self.by_number.get(number, self.grid)

    def __reduce__(self) -> tuple[type["PassGrid"], tuple[()]]:
        return PassGrid, ()  # copies know of no pass


class Replaced(nn.Module):
    """Mixin of a host's attention module: its call of `scaled_dot_product_attention` goes to `core`.

    Attributes:
        host: the module's own class. host_name: the module's name in its host.
        core: the mechanism, without projections.
        pass_grid: the grid of the present forward pass; None for tokens without order.
        extra: further inputs of `attend`, all None.
    """

    host: ClassVar[type[nn.Module]]
    host_name: str
    core: Attention
    pass_grid: PassGrid | None
    extra: tuple[None, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        swap = Swap(self)
        with swap:
            output = super().forward(*args, **kwargs)
        if swap.number != 1:
            problem = f"{swap.number} calls of scaled_dot_product_attention, of which {self.core.label} replaces one"
            remedy = "keep timm's fused attention, or attn_implementation='sdpa', and ask for no attention weights"
            raise ValueError(f"{self.host_name}: {problem}; {remedy}")
        return output

    def attended(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attended values in the place of `scaled_dot_product_attention(query, key, value, ...)`."""
        core = self.core
        if problem := call_problem(query, key, value, *args, **kwargs):
            raise ValueError(f"{self.host_name}: {core.label} cannot serve a layer that {problem}")
        N = query.shape[2] - core.num_prefix_tokens
        grid = self.pass_grid.of(N) if self.pass_grid else None
        if core.ignores_order():
            grid = 1, N
        elif grid is None or grid[0] * grid[1] != N:
            of_pass = (
                f"a {grid[0]}x{grid[1]} grid" if grid else "no grid, or grids of two shapes before a backward pass"
            )
            problem = f"{N} tokens after {core.num_prefix_tokens} prefix tokens, but this pass has {of_pass}"
            raise ValueError(f"{self.host_name}: {core.label} got {problem}; keep all patches, in their order")
        query, key = query.to(value.dtype), key.to(value.dtype)  # as torch's attention does under autocast
        projected = (value,) if core.num_projections == 1 else (query, key, value, *self.extra)
        return kernels.by_path(core.attend_all, projected, grid)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _create_empty, (self.host,), self.__dict__


class Swap(TorchFunctionMode):
    """Context in which calls of `scaled_dot_product_attention` go to a module's mechanism.

    Attributes:
        number: of these calls.
    """

    def __init__(self, module: Replaced):
        super().__init__()
        self.module = module
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.number += 1
        return self.module.attended(*args, **(kwargs or {}))


class Survey(TorchFunctionMode):
    """Context that records the calls of `scaled_dot_product_attention` of a model, whose modules have its hooks.

    Attributes:
        images: images of a batch. calls: the calls, in their order.
        running: [name, number of calls] of the modules that run, the innermost last.
        image, grid: name and output's (H, W) of the latest convolution.
    """

    def __init__(self, model: nn.Module, images: int):
        super().__init__()
        self.images = images
        self.calls: list[Call] = []
        self.running: list[list[Any]] = []
        self.image: str = ""
        self.grid: Grid = (0, 0)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self.enter, name))
            module.register_forward_hook(functools.partial(self.leave, name))

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.running.append([name, 0])

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()
        if isinstance(module, nn.Conv2d):
            self.image, self.grid = name, tuple(output.shape[-2:])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.record(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def record(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
        self.running[-1][1] += 1
        name, number = self.running[-1]
        problem = call_problem(query, key, value, *args, **kwargs)
        if number > 1:
            problem = f"calls scaled_dot_product_attention {number} times"
            self.calls = [call for call in self.calls if call.name != name]
        elif not problem and query.shape[0] != self.images:
            problem = f"folds windows into the batch ({query.shape[0] // self.images} for each image)"
        h, (N, d) = query.shape[1], query.shape[-2:]
        call = Call(name, problem, key.shape[-2] > N, h, d, N, self.image, self.grid)
        if name not in {call.name for call in self.calls}:  # of a module that runs once more
            self.calls.append(call)


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
    layers = attention_calls(model, img_size)
    for call in layers:
        if call.problem:
            raise OptionError(KEY, f"{call.name} {call.problem}; no mechanism can take its place")
    entries, shared = assign(type(model).__name__, attention, [len(layers)]), dict[Any, Any]()
    cores = [
        _create_core(functools.partial(factory, layer=layer, depth=len(layers), shared=shared), call)
        for layer, (factory, call) in enumerate(zip(layer_factories(entries), layers, strict=True))
    ]
    grids: dict[str, PassGrid] = {}
    for call, (core, extra) in zip(layers, cores, strict=True):
        module: Any = model.get_submodule(call.name)
        like = next(module.parameters(), next(model.parameters()))
        module.__class__ = _with_core(module.__class__)
        module.core = core.to(like.device, like.dtype).train(module.training)
        module.host_name, module.extra = call.name, extra
        module.pass_grid = grids.setdefault(call.image, PassGrid()) if call.has_order else None
    for image, pass_grid in grids.items():
        model.get_submodule(image).register_forward_hook(pass_grid)
    return model


def attention_calls(model: nn.Module, img_size: int | Grid | None = None) -> list[Call]:
    """The attention layers of a model, in the order in which they run; attention that pools the tokens is left out.

    Raises:
        OptionError: `replace_attention` takes no such model; it has no attention layer; it runs on no image.
    """
    if problem := _model_problem(model):
        raise OptionError(KEY, f"{type(model).__name__} {problem}")
    calls, in_training = ({call.name: call for call in _calls(model, img_size, mode)} for mode in (False, True))
    layers = []
    for call in calls.values():
        if call.is_pooling:
            continue
        trained = in_training.get(call.name, call)
        (H, W), P, problem = call.grid, call.num_tokens - math.prod(call.grid), call.problem or trained.problem
        own = getattr(model, "num_prefix_tokens", P)
        if P < 0 or trained.num_tokens < call.num_tokens or hasattr(getattr(model, "config", None), "mask_ratio"):
            call = call._replace(grid=(1, call.num_tokens), has_order=False)
        elif not problem and (own != P or P >= H * W):
            problem = f"has {call.num_tokens} tokens, which are no {H}x{W} grid and its prefix tokens"
        else:
            call = call._replace(num_prefix_tokens=P)
        layers.append(call._replace(problem=problem))
    for name, module in model.named_modules():
        if getattr(module, "fused_attn", True) is False and name not in calls:
            problem = "has fused_attn = False, so that its attention is no call that can be replaced"
            raise OptionError(KEY, f"{name} {problem}; call timm.layers.set_fused_attn(True, experimental=True) before")
    if not layers:
        raise OptionError(KEY, f"{type(model).__name__} {_no_attention(model)}")
    return layers


def call_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """The reason why no mechanism can serve a call of `scaled_dot_product_attention`; "" if there is none."""
    d = query.shape[-1]
    if query.ndim != 4:
        return f"has queries of shape {tuple(query.shape)}, windows in a dimension of their own"
    if attn_mask is not None:
        return "adds a mask or a position bias to its logits (attn_mask)"
    if is_causal:
        return "is causal (is_causal)"
    if enable_gqa or query.shape[1] != key.shape[1]:
        return f"has grouped heads, {query.shape[1]} of queries and {key.shape[1]} of keys"
    if query.shape[2] != key.shape[2]:
        return f"has keys of another length, {key.shape[2]} for {query.shape[2]} queries"
    if d != value.shape[3]:
        return f"has heads of {d} channels for queries and of {value.shape[3]} for values"
    if scale is not None and not math.isclose(scale * d**0.5, 1, rel_tol=1e-5):
        return f"scales its logits by {scale:.4g} and not by {d**-0.5:.4g}"
    if dropout_p:
        return f"drops attention weights (dropout {dropout_p:.4g}); make that 0, and give the mechanism attn_drop"
    return ""


def _calls(model: nn.Module, img_size: int | Grid | None, training: bool) -> list[Call]:
    """The calls in a forward pass of two images, on the meta device."""
    size = img_size or _image_size(model)
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    tensors = [*model.parameters(), *model.buffers()]
    dtype = next((x.dtype for x in tensors if x.is_floating_point()), None)
    memo: dict[int, Any] = {id(x): nn.Parameter(x.detach().to("meta"), x.requires_grad) for x in model.parameters()}
    memo |= {id(x): x.to("meta") for x in model.buffers()}
    probe = copy.deepcopy(model, memo).train(training)
    for module in probe.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    try:
        with torch.no_grad(), torch.device("meta"), (survey := Survey(probe, images=2)):
            probe(torch.empty(2, channels, *to_2tuple(size), dtype=dtype))
    except Exception as error:  # the host's own
        shape, reason = f"(2, {channels}, {size})", str(error).partition("\n")[0]
        problem = f"{type(model).__name__} refuses images {shape}: {type(error).__name__}: {reason}"
        raise OptionError(KEY, f"{problem}; give img_size, or the part of the model that takes images") from error
    return survey.calls


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
    modules = [*model.modules()]
    if hasattr(model, "vision_model") and hasattr(model, "text_model"):
        return "takes text as well; give its vision_model"
    if any(isinstance(module, Attention) for module in modules):
        return "has attention of this package already; create it anew, or give `models.create_model` another attention"
    if any(isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule) for module in modules):
        return "is a frozen graph; replace the attention before it is scripted, traced or exported"
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        return "is compiled; replace the attention before torch.compile"
    if isinstance(model, DistributedDataParallel | DataParallel):
        return "is wrapped for several devices; replace the attention of its module before"
    is_packed = any(".quantized." in type(module).__module__ for module in modules)
    if is_packed or any(type(x.data) is not Tensor or not x.is_floating_point() for x in model.parameters()):
        return "has quantised or sharded weights; replace the attention before"
    return ""


def _no_attention(model: nn.Module) -> str:
    """The reason why a model has no layer that a mechanism can serve, and the remedy."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if implementation != "sdpa":
        return f"has attn_implementation = {implementation!r}; call its set_attn_implementation('sdpa')"
    problem = "has no attention among its tokens that calls torch's scaled_dot_product_attention"
    return f"{problem}; take another model, such as a VisionTransformer of timm"


def _create_core(factory: Callable[..., Attention], call: Call) -> tuple[Attention, tuple[None, ...]]:
    """The mechanism of a layer without its projections, and the number of further inputs that its `attend` has."""
    where: dict[str, Any] = {"grid": call.grid, "num_prefix_tokens": call.num_prefix_tokens}
    core = factory(dim=call.num_heads * call.head_dim, num_heads=call.num_heads, **where)
    if not call.has_order and not core.ignores_order():
        problem = "needs a grid of tokens, which some or shuffled patches are not (patch dropout, mask_ratio)"
        raise OptionError(core.label, f"{problem}; take a mechanism that ignores their order, such as softmax")
    extra = _extra_inputs(core, call)
    del core.qkv, core.proj
    tokens = torch.empty(1, call.num_heads, call.num_tokens, call.head_dim, device="meta")
    projected = (tokens,) if core.num_projections == 1 else (tokens, tokens, tokens, *extra)
    y = copy.deepcopy(core).to("meta").attend_all(projected, call.grid)
    if y.shape != tokens.shape:
        raise OptionError(core.label, f"has an output projection of its own, and {call.name} {_HAS_ITS_OWN}")
    return core, extra


_HAS_ITS_OWN = "keeps its own projections; choose other options, or another mechanism"


def _extra_inputs(core: Attention, call: Call) -> tuple[None, ...]:
    """Inputs of `attend` after queries, keys and values, all None.

    Raises:
        OptionError: the mechanism makes its inputs in another way than by projection of the layer's input.
    """
    if core.gate is not None:
        raise OptionError(core.label, f"gates its output by the layer's input, and {call.name} {_HAS_ITS_OWN}")
    x = torch.randn(1, call.num_tokens, call.num_heads * call.head_dim)
    with torch.no_grad():
        own, plain = core.project(x, call.grid), Attention.project(core, x, call.grid)
    extra = own[len(plain) :]
    is_plain = len(plain) in (1, 3) and all(map(torch.equal, own, plain)) and all(y is None for y in extra)
    if not is_plain:
        raise OptionError(core.label, f"has projections of its own, and {call.name} {_HAS_ITS_OWN}")
    return extra


@functools.cache
def _with_core(host: Any) -> type[Replaced]:
    """The class of a host's attention module with a `core`."""
    return cast(type[Replaced], type(f"Replaced{host.__name__}", (Replaced, host), {"host": host}))


def _create_empty(host: Any) -> Replaced:
    """A module without attributes, which copies and pickles then have."""
    cls = _with_core(host)
    return cls.__new__(cls)
