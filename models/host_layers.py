"""The attention layer of a host, whose call of torch's `scaled_dot_product_attention` goes to a mechanism."""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attention import Attention, Grid


class PassGrid:
    """Forward hook of the convolution that makes the tokens: the (H, W) grid of the present forward pass.

    Attributes:
        grid: of the latest pass.
        is_plain: True while the model runs without a mask, see `Replaced.attended`.
        pending: every grid so far -> passes that wait for their backward pass, in which activation checkpointing
            computes layers again.
    """

    def __init__(self) -> None:
        self.grid: Grid | None = None
        self.is_plain = False
        self.pending: Counter[Grid] = Counter()

    def __call__(self, module: nn.Module, args: Any, image: Tensor) -> None:
        H, W = image.shape[-2:]
        self.grid = (int(H), int(W)) if torch.jit.is_tracing() else (H, W)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.pending[self.grid] += image.requires_grad  # that of a frozen patch embedding gets no gradient
            if image.requires_grad:
                image.register_hook(lambda gradient, grid=self.grid: self.pending.subtract([grid]))

    def start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_plain = len(args) < 2 and kwargs.get("attention_mask") is None

    def stop(self, module: nn.Module, args: Any, output: Any) -> None:
        self.is_plain = False

    def of(self, number: int) -> Grid | None:
        """The grid of a layer with so many tokens; None in a backward pass that may be of passes of two shapes."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return self.grid
        grids = {grid: passes for grid, passes in self.pending.items() if math.prod(grid) == number}
        found = [grid for grid, passes in grids.items() if passes > 0] or [*grids]
        return self.grid if not found else found[0] if len(found) == 1 else None

    def __reduce__(self) -> tuple[type["PassGrid"], tuple[()]]:
        return PassGrid, ()  # copies know of no pass


class Replaced(nn.Module):
    """Mixin of a host's attention module: its call of `scaled_dot_product_attention` goes to `core`."""

    host: ClassVar[type[nn.Module]]  # the module's own class
    host_name: str  # the module's name in its host
    core: Attention  # the mechanism, without projections
    pass_grid: PassGrid | None  # None for tokens without order
    extra: tuple[None, ...]  # further inputs of `attend`

    def forward(self, *args: Any, grid: Grid | None = None, **kwargs: Any) -> Any:
        """The host's forward pass; `grid` is the (H, W) grid of tokens that no forward pass of the model made."""
        if grid is not None and self.pass_grid is not None:
            self.pass_grid.grid = grid
        calls = Calls(self.attended)
        with calls:  # in two lines for torch.compile
            output = super().forward(*args, **kwargs)
        if calls.number != 1:
            problem = f"{calls.number} calls of scaled_dot_product_attention, of which {self.core.label} replaces one"
            remedy = "keep timm's fused attention, or attn_implementation='sdpa', and ask for no attention weights"
            raise ValueError(f"{self.host_name}: {problem}; {remedy}")
        return output

    def project(self, x: Tensor, grid: Grid, **others: Any) -> tuple[Any, ...]:
        """The arguments of `core.attend_all` for tokens x (B, P + N, C): queries, keys and values, or fewer.

        What the host computes after its attention is ignored.
        """
        found = []

        def keep(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found.append(self.projected(query, key, value))
            return query  # of the shape of attended values

        with Calls(keep):
            super().forward(x, **others)
        return found[0]

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Tokens, and all other arguments by name, of a call of `forward` in the present forward pass."""
        _, first, *others = inspect.signature(self.host.forward).parameters
        named = dict(zip((first, *others), args, strict=False)) | {**kwargs}
        x = named.pop(first)
        return x, named | {"grid": self.pass_grid.grid if self.pass_grid else (1, x.shape[1])}

    def attended(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attended values in the place of `scaled_dot_product_attention(query, key, value, ...)`."""
        core = self.core
        # transformers makes a mask of ones in exported graphs, and with torch 2.11 in compiled ones
        if torch.compiler.is_exporting() and self.pass_grid and self.pass_grid.is_plain:
            kwargs["attn_mask"] = None
        if problem := call_problem(query, key, value, *args, **kwargs):
            raise ValueError(f"{self.host_name}: {core.label} cannot serve a layer that {problem}")
        N = query.shape[2] - core.num_prefix_tokens
        grid = (1, N) if core.ignores_order() or not self.pass_grid else self.pass_grid.of(N)
        if grid is None or grid[0] * grid[1] != N:
            of_pass = f"a {grid[0]}x{grid[1]} grid" if grid else "no grid, or grids of two shapes"
            problem = f"{N} tokens after {core.num_prefix_tokens} prefix tokens, but this pass has {of_pass}"
            raise ValueError(f"{self.host_name}: {core.label} got {problem}; keep all patches, in their order")
        return core.attend_all(self.projected(query, key, value), grid)

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
        query, key = query.to(value.dtype), key.to(value.dtype)  # as torch's attention does under autocast
        return (value,) if self.core.num_projections == 1 else (query, key, value, *self.extra)


class Calls(TorchFunctionMode):
    """Context in which `serve` gets the calls of a function, by default attention, which `number` counts."""

    def __init__(self, serve: Callable[..., Tensor], function: Any = F.scaled_dot_product_attention):
        super().__init__()
        self.serve, self.function = serve, function
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self.function:
            return func(*args, **(kwargs or {}))
        self.number += 1
        return self.serve(*args, **(kwargs or {}))


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


def first_line(error: Exception) -> str:
    """Type and first line of an error that other people's code raised."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@functools.cache
def with_mixin(mixin: Any, host: Any) -> Any:
    """The class of a host, or of its attention module, with a mixin; its attribute `host` is the host's own."""
    own = {"host": host, "__reduce_ex__": lambda self, protocol: (create_empty, (mixin, host), vars(self))}
    return type(f"{mixin.__name__}{host.__name__}", (mixin, host), own)


def create_empty(mixin: Any, host: Any) -> Any:
    """A module without attributes, which a copy or a pickle then has."""
    return object.__new__(with_mixin(mixin, host))
