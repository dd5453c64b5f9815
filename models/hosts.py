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
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
"""First word of the messages of refused hosts."""


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


class PassGrid:
    """Forward hook of the convolution that makes the tokens: the (H, W) grid of the present forward pass.

    Attributes:
        grid: of the latest pass.
        is_plain: True while the model runs without a mask, see `Replaced.attended`.
        pending: grid -> passes that wait for their backward pass, in which activation checkpointing computes layers
            again.
    """

    def __init__(self) -> None:
        self.grid: Grid | None = None
        self.is_plain = False
        self.pending: Counter[Grid] = Counter()

    def __call__(self, module: nn.Module, args: Any, image: Tensor) -> None:
        H, W = image.shape[-2:]
        self.grid = (int(H), int(W)) if torch.jit.is_tracing() else (H, W)
        if image.requires_grad and not torch.compiler.is_compiling():
            self.pending[self.grid] += 1
            image.register_hook(functools.partial(self.finish, self.grid))

    def start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_plain = len(args) < 2 and kwargs.get("attention_mask") is None

    def stop(self, module: nn.Module, args: Any, output: Any) -> None:
        self.is_plain = False

    def finish(self, grid: Grid, gradient: Tensor) -> None:
        self.pending[grid] -= 1

    def of(self, number: int) -> Grid | None:
        """The grid of a layer with so many tokens; None in a backward pass that may be of passes of two shapes."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return self.grid
        grids = [grid for grid, passes in self.pending.items() if passes > 0 and math.prod(grid) == number]
        return self.grid if not grids else grids[0] if len(grids) == 1 else None

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

    def forward(self, *args: Any, grid: Grid | None = None, **kwargs: Any) -> Any:
        """The host's forward pass; `grid` is the (H, W) grid of tokens that no forward pass of the model made."""
        if grid is not None and self.pass_grid is not None:
            self.pass_grid.grid = grid
        calls = Calls(self.attended)
        with calls:
            output = super().forward(*args, **kwargs)
        if calls.number != 1:
            problem = f"{calls.number} calls of scaled_dot_product_attention, of which {self.core.label} replaces one"
            remedy = "keep timm's fused attention, or attn_implementation='sdpa', and ask for no attention weights"
            raise ValueError(f"{self.host_name}: {problem}; {remedy}")
        return output

    def project(self, x: Tensor, grid: Grid, **others: Any) -> tuple[Any, ...]:
        """What the host gives to `core.attend_all` for tokens x (B, P + N, C) and its further arguments.

        The rest of its forward pass is not computed.
        """

        def stop(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            raise _Projected(self.projected(query, key, value))

        try:
            with Calls(stop):
                super().forward(x, **others)
        except _Projected as found:
            return found.projected
        raise AssertionError(f"{self.host_name} calls no attention")

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Tokens, and all other arguments by name, of a call of `forward` in the present forward pass."""
        bound = inspect.signature(self.host.forward).bind(self, *args, **kwargs)
        (_, (_, x), *others), extra = bound.arguments.items(), dict[str, Any]()
        names = {p.name: p.kind for p in bound.signature.parameters.values()}
        for name, value in others:
            extra |= value if names[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
        return x, extra | {"grid": self.pass_grid.grid if self.pass_grid else (1, x.shape[1])}

    def attended(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attended values in the place of `scaled_dot_product_attention(query, key, value, ...)`."""
        core = self.core
        # transformers makes a mask of ones in exported graphs, and with torch 2.11 in compiled ones
        if torch.compiler.is_exporting() and self.pass_grid and self.pass_grid.is_plain:
            kwargs["attn_mask"] = None
        if problem := call_problem(query, key, value, *args, **kwargs):
            raise ValueError(f"{self.host_name}: {core.label} cannot serve a layer that {problem}")
        N = query.shape[2] - core.num_prefix_tokens
        grid = self.pass_grid.of(N) if self.pass_grid else None
        if core.ignores_order():
            grid = 1, N
        elif grid is None or grid[0] * grid[1] != N:
            of_pass = f"a {grid[0]}x{grid[1]} grid" if grid else "no grid, or grids of two shapes"
            problem = f"{N} tokens after {core.num_prefix_tokens} prefix tokens, but this pass has {of_pass}"
            raise ValueError(f"{self.host_name}: {core.label} got {problem}; keep all patches, in their order")
        return kernels.by_path(core.attend_all, self.projected(query, key, value), grid)

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
        query, key = query.to(value.dtype), key.to(value.dtype)  # as torch's attention does under autocast
        return (value,) if self.core.num_projections == 1 else (query, key, value, *self.extra)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _create_empty, (self.host,), self.__dict__


class _Projected(Exception):
    """End of a forward pass at its attention, see `Replaced.project`."""

    def __init__(self, projected: tuple[Any, ...]):
        super().__init__()
        self.projected = projected


class Calls(TorchFunctionMode):
    """Context in which `serve` gets the calls of `scaled_dot_product_attention`, which `number` counts."""

    def __init__(self, serve: Callable[..., Tensor]):
        super().__init__()
        self.serve = serve
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.number += 1
        return self.serve(*args, **(kwargs or {}))


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
        raise OptionError(KEY, f"{refused.name} {refused.problem}; {remedy}")
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
        module.__class__ = _with_core(module.__class__)
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
        raise OptionError(KEY, f"{type(model).__name__} {problem}")
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
            problem = "has fused_attn = False, so that its attention is no call that can be replaced"
            raise OptionError(KEY, f"{name} {problem}; call timm.layers.set_fused_attn(True, experimental=True) before")
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if not layers and implementation != "sdpa":
        problem = f"has attn_implementation = {implementation!r}; call its set_attn_implementation('sdpa')"
        raise OptionError(KEY, f"{type(model).__name__} {problem}")
    if not layers:
        problem = "has no attention among its tokens that calls torch's scaled_dot_product_attention"
        raise OptionError(KEY, f"{type(model).__name__} {problem}; take another model, such as a ViT of timm")
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
        return f"drops attention weights (dropout {dropout_p:.4g}; make it 0, and set the mechanism's attn_drop)"
    return ""


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
        raise OptionError(KEY, f"{problem}; give img_size, or the part of the model that takes images") from error
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


@functools.cache
def _with_core(host: Any) -> type[Replaced]:
    """The class of a host's attention module with a `core`."""
    return cast(type[Replaced], type(f"Replaced{host.__name__}", (Replaced, host), {"host": host}))


def _create_empty(host: Any) -> Replaced:
    """A module without attributes, which copies and pickles then have."""
    cls = _with_core(host)
    return cls.__new__(cls)
