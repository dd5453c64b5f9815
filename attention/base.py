"""The contract every attention mechanism meets.

Shape letters used throughout: B images, (H, W) token grid, N = H*W tokens in raster order n = y*W + x, or of clips
(T, H, W), N = T*H*W and n = (t*H + y)*W + x, C channels (dim), h heads, d = C/h channels per head, g windows, w tokens
per window, e keys that a window attends to, c landmarks or groups, t tokens per group, s random samples, P prefix
tokens (class token, registers), which precede the grid tokens.

Arguments that ops share, and that their docstrings do not repeat: queries q (B, h, N, d), keys and values k, v (B, h,
P + N, d); bias, the position bias of a window, (h, w, e); attn_drop, the dropout rate of attention weights; key_mask
(B, P + N) bool, true for keys that count; causal: query n attends to keys up to the n-th. An
op returns attended values (B, h, N, d), in float32 at least if it has the decorator `full_precision`. Where prefix
tokens are plain, N counts them too.
"""

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .inputs import check_inputs
from .ops import kernels
from .options import OptionError, check_fields
from .parts.geometry import Grid, each_axis, merge_heads, raster, split_heads, split_prefix
from .parts.linear import init_linear
from .parts.local_term import LocalTerm
from .parts.masking import stand_in
from .parts.transforms import softmax_attention

if TYPE_CHECKING:
    from .ops.packed.op import Packing


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """The place of an attention layer in a network: everything a mechanism may need to know about the network.

    Attributes:
        dim: channels C; num_heads: heads h, a divisor of C.
        grid: the (H, W), or (T, H, W), the layer is built for; it sizes parameters and is checked before work starts.
        num_prefix_tokens: class and register tokens P that precede the grid tokens.
        layer, depth: index of the layer and number of layers of the network.
        num_same_before: number of earlier layers with the same mechanism; None: all earlier ones have it.
        reduction: spatial reduction R that a pyramid assigns to this stage (PVT-v2: 8, 4, 2, 1); None elsewhere.
        qkv_bias: True if the query/key/value projection has a bias. proj_drop: dropout rate of the output.
        shared: objects that the network's layers share, under keys of the mechanism's choice; one dict per network.
    Raises:
        OptionError: a value of another type or out of its range; heads that do not divide the channels.
    """

    dim: int = field(metadata={"low": 1})
    num_heads: int = field(metadata={"low": 1})
    grid: Grid = field(metadata={"low": 1})
    num_prefix_tokens: int = field(default=0, metadata={"low": 0})
    layer: int = field(default=0, metadata={"low": 0})
    depth: int = field(default=1, metadata={"low": 1})
    num_same_before: int | None = field(default=None, metadata={"low": 0})
    reduction: int | None = field(default=None, metadata={"low": 1})
    qkv_bias: bool = True
    proj_drop: float = field(default=0.0, metadata={"low": 0, "high": 1})
    shared: dict[Any, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name, value in check_fields(self).items():
            object.__setattr__(self, name, value)
        if len(self.grid) not in (2, 3):
            raise OptionError("grid", f" = {self.grid}: expected 2 values, (H, W), or 3 for clips, (T, H, W)")
        if self.dim % self.num_heads:
            raise OptionError("num_heads", f" = {self.num_heads} does not divide dim = {self.dim}")

    @property
    def num_tokens(self) -> int:
        """Tokens N of the grid."""
        return math.prod(self.grid)

    @property
    def head_dim(self) -> int:
        """Channels d of a head."""
        return self.dim // self.num_heads


def at_most(limit: Callable[[LayerContext, Any], Any], problem: str) -> Callable[..., tuple[Any, str]]:
    """A rule of `fit_option` for an option that is at most `limit` of the layer; both may have a number for each axis.

    problem: the start of the error's text; {H} (of clips TxH), {W}, {most} and {config} are filled in.
    """

    def rule(value: Any, context: LayerContext, config: Any) -> tuple[Any, str]:
        (*sides, W), limits = context.grid, limit(context, config)
        axes = next((len(x) for x in (value, limits) if isinstance(x, tuple)), 0)
        most = tuple(map(min, each_axis(value, axes), each_axis(limits, axes))) if axes else min(value, limits)
        text = f": {problem}; at most {most}".format(H="x".join(map(str, sides)), W=W, most=most, config=config)
        return value if most in (value, each_axis(value, axes)) else most, text

    return rule


up_to_tokens = at_most(lambda layer, _: layer.num_tokens, "more than the tokens of the {H}x{W} grid")
up_to_filter = at_most(lambda layer, _: 2 * max(layer.grid) - 1, "larger than the {H}x{W} grid")


def up_to_side(value: Any, context: LayerContext, config: Any) -> tuple[Any, str]:
    """The rule of a window: one side is at most the longest of the grid, one for each axis at most that; else None."""
    grid = raster(context.grid, config.layout)
    if isinstance(value, tuple) and (len(value) != len(context.grid) or 0 in value or config.layout == "1d"):
        return None, f"give one side, or with layout 2d one above 0 for each of {len(context.grid)} axes"
    most = grid if isinstance(value, tuple) else max(grid)
    return at_most(lambda *_: most, "larger than the {H}x{W} grid")(value, context, config)


class Cost(NamedTuple):
    """Cost of a layer beyond four C x C projections; negative for a layer with fewer projections."""

    parameters: int
    macs: int


def projections(context: LayerContext, count: int) -> Cost:
    """Cost of `count` C x C projections of every token, with a bias if `qkv` has one."""
    C = context.dim
    return Cost(count * C * (C + context.qkv_bias), count * context.num_tokens * C * C)


def total(*costs: Cost) -> Cost:
    """The sum of costs."""
    return Cost(sum(cost.parameters for cost in costs), sum(cost.macs for cost in costs))


class Attention(nn.Module):
    """Base of all mechanisms: owns the projections, with timm's parameter names; a mechanism writes `attend`.

    A mechanism derives from this class, nests its options as `Config`, and is added to `attention.ATTENTION` by
    `attention.register`.
    """

    Config: ClassVar[type]
    prefix_tokens: ClassVar[Literal["refused", "plain", "exact"]] = "refused"
    """Treatment of prefix tokens by the mechanism.

    refused: a layer with prefix tokens cannot be built. plain: prefix tokens are ordinary tokens, as for mechanisms
    that ignore order; `attend` gets queries of all P + N tokens. exact: this class lets prefix tokens attend to all
    tokens by softmax; `attend` gets queries of the grid and keys of all P + N tokens, every token of the grid attends
    to the prefix tokens, and windows, landmarks and positions cover the grid alone.
    """
    has_positions: ClassVar[bool] = False
    """True if the mechanism itself depends on the positions of tokens, at all options."""
    takes_clips: ClassVar[bool] = False
    """True if `attend` takes grids (T, H, W); those that ignore order take any grid."""
    key_mask_refusal: ClassVar[str] = "it does not declare what it does with masked tokens"
    """The reason that `refuses_key_mask` gives for a mechanism whose `attend` has no argument key_mask."""
    num_projections: ClassVar[int] = 3
    """Number of C x C outputs of `qkv`: 3 for queries, keys and values, 2 if keys are queries, 1 for values alone."""
    size_option: ClassVar[str | None] = None
    """Option, an integer, by which the mechanism trades cost for accuracy (landmarks, samples, the side of a window);
    None if it has none."""
    local_size: ClassVar[int] = 5
    """Side in tokens of the filters of the local term that the option `local` adds; 0 for a mechanism that makes its
    own local term."""
    local_by_head: ClassVar[bool] = True
    """True if all heads share the filters of the local term; otherwise every channel has its own filter."""
    has_gate: ClassVar[bool] = False
    """True if a linear map of the layer's input multiplies the input of `proj`."""

    def __init_subclass__(cls) -> None:
        cls.__doc__ = cls.__doc__ or getattr(sys.modules.get(cls.__module__, cls), "__doc__", None)  # of the file

    def __init__(self, context: LayerContext, config: Any):
        super().__init__()
        self.config = config
        self.label = f"attention({self.name()})"  # made here: torch 2.11 would guard compiled graphs by the cache of re
        self.refusal = self.refuses_key_mask(config)  # here too: compiled graphs have no signatures
        self.grid = context.grid
        self.num_heads = context.num_heads
        self.head_dim = context.dim // context.num_heads
        self.num_prefix_tokens = context.num_prefix_tokens
        if context.num_prefix_tokens and self.prefix_tokens == "refused":
            problem = f" takes no prefix tokens, and num_prefix_tokens = {context.num_prefix_tokens}"
            remedy = "set class_token, dist_token and reg_tokens of the model to false, false and 0"
            raise OptionError(self.label, f"{problem}; {remedy}, or take another mechanism")
        if context.num_prefix_tokens and config.causal:
            self.refuse("causal", True, "prefix tokens attend to every token; use a model without them")
        if config.local and config.causal:
            self.refuse("local", True, "its convolution takes values of later tokens; with causal set local: false")
        for name, (_, problem) in self.too_large(context, config).items():
            raise OptionError(f"{self.label}.{name}", problem)
        self.qkv = nn.Linear(context.dim, self.num_projections * context.dim, bias=context.qkv_bias)
        self.proj = nn.Linear(context.dim, context.dim)
        self.proj_drop = nn.Dropout(context.proj_drop)
        width = self.head_dim if self.local_by_head else context.dim
        has_local_term = config.local and self.local_size > 0
        self.local_term = LocalTerm(width, self.local_size) if has_local_term else None
        self.gate: nn.Module | None = None  # maps the layer's input to factors of the input of `proj`
        for linear in (self.qkv, self.proj):
            init_linear(linear)
        if self.has_gate:
            self.gate = init_linear(nn.Linear(context.dim, context.dim, bias=context.qkv_bias))

    @classmethod
    def name(cls) -> str:
        """The mechanism's name: the name of the class in snake case, sparse_transformer for `SparseTransformer`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    def ignores_order(self) -> bool:
        """True if a token's output depends on the set of tokens and not on their positions, so that tokens may be left
        out of the input; the grid is then (1, N)."""
        return self.without_order(self.config)

    @classmethod
    def without_order(cls, config: Any) -> bool:
        """`ignores_order` of layers with these options."""
        return cls.prefix_tokens == "plain" and not (cls.has_positions or config.causal or config.local)

    @classmethod
    def refuse(cls, name: str, value: Any, problem: str) -> NoReturn:
        """Raises the OptionError for option `name` of this mechanism."""
        raise OptionError(f"attention({cls.name()}).{name}", f" = {value}: {problem}")

    @classmethod
    def too_large(cls, context: LayerContext, config: Any) -> dict[str, tuple[Any, str]]:
        """Options that the context's grid is too small for: the largest value that it allows, and the error's text.

        Raises:
            OptionError: a grid (T, H, W), which layers with these options do not take; a value that `fit` cannot mend.
        """
        if len(context.grid) == 3 and not (cls.without_order(config) or (cls.takes_clips and not config.local)):
            problem = f" has no form for clips {context.grid} with these options"
            remedy = "one that ignores the order of tokens, such as performer, with local and causal false"
            raise OptionError(f"attention({cls.name()})", f"{problem}; take local, eva, lara, or {remedy}")
        found: dict[str, tuple[Any, str]] = {}
        for name, largest in next(
            (f.metadata["largest"] for f in dataclasses.fields(config) if f.name == "fit"), {}
        ).items():
            if (value := getattr(config, name)) is not None:
                most, problem = largest(value, context, config)
                if most is None:
                    cls.refuse(name, [*value], problem)
                found |= {name: (most, f" = {value}{problem}")} if most != value else {}
        return found

    @classmethod
    def fitted(cls, context: LayerContext, config: Any) -> Any:
        """The options of a layer: `config`, or with the option `fit` the largest sizes that the grid allows."""
        if not config.fit:
            return config
        sizes = {name: most for name, (most, _) in cls.too_large(context, config).items()}
        return dataclasses.replace(config, **sizes)

    @classmethod
    def cost(cls, context: LayerContext, config: Any) -> Cost:
        """Exact cost of a layer beyond its projections `qkv` and `proj`.

        Counts the multiply-accumulates of matrix products, convolutions and Fourier transforms, padding included, for
        one image in evaluation. Does not count prefix tokens, nor the local term of this class.
        """
        raise NotImplementedError(f"{cls.__name__} does not define cost")

    @classmethod
    def local_cost(cls, context: LayerContext, config: Any) -> Cost:
        """Cost of the local term that this class adds if the option `local` is true."""
        width, taps = context.head_dim if cls.local_by_head else context.dim, cls.local_size**2
        has_term = config.local and taps > 0
        return Cost(width * (taps + 1), taps * context.num_tokens * context.dim) if has_term else Cost(0, 0)

    @classmethod
    def layer_cost(cls, context: LayerContext, config: Any) -> Cost:
        """Cost beyond four C x C projections (4 C^2 + 4 C parameters, 4 N C^2 MACs), of which `qkv` may lack some."""
        own = projections(context, cls.num_projections - 3)
        return total(own, cls.cost(context, config), cls.local_cost(context, config))

    @classmethod
    def refuses_key_mask(cls, config: Any) -> str | None:
        """The reason why a layer with these options refuses a key mask; None if it takes one."""
        return None if "key_mask" in inspect.signature(cls.attend).parameters else cls.key_mask_refusal

    def refuse_unused(self, neutral: Mapping[str, Any], why: str) -> None:
        """Raises the OptionError for the first option that does not have its `neutral` value."""
        for name, value in neutral.items():
            if getattr(self.config, name) != value:
                self.refuse(name, getattr(self.config, name), f"{why}; set {name}: {value}")

    @property
    def attn_drop(self) -> float:
        """Dropout rate of attention weights in the present mode; 0 where the mechanism has no such option."""
        return self.config.attn_drop if self.training else 0.0

    def project(self, x: Tensor, grid: Grid) -> tuple[Any, ...]:
        """Projects x (B, P + N, C) to queries, keys, values, each (B, h, P + N, d), and further inputs of `attend`.

        All are tensors (B, ...) or None.
        """
        return split_heads(self.qkv(x), self.num_projections, self.num_heads)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Maps queries (B, h, N, d), keys and values (B, h, P + N, d) and the grid to attended values (B, h, N, d).

        A mechanism whose `project` returns other tensors than q, k and v takes those instead. If prefix tokens are
        plain, there are queries of all P + N tokens. A mechanism that takes key masks also has key_mask, None or
        (B, P + N) bool, true for tokens that count; at least one token of every image counts. Masked keys have
        weights of exactly zero, masked queries do not influence other outputs, and outputs of masked queries are never
        read. Masked tokens hold the values that `stand_in` gives them.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define attend")

    def forward(self, x: Tensor, grid: Grid | None = None, key_mask: Tensor | None = None) -> Tensor:
        """Attends over tokens (B, P + N, C), the last N of which form an (H, W) grid: (B, P + N, C).

        Args:
            grid: (H, W), or (T, H, W) for a layer of clips; None: the grid of construction, from which it may differ.
            key_mask: (B, N) bool, true for tokens of the grid that count, as in torch's attention and Hugging Face's
                attention_mask. The values of other tokens have no effect and no gradient; their outputs are zero.

        Raises:
            TypeError: the grid is not a pair of ints, or three for a layer of clips.
            ValueError: x is not (B, P + H*W, C), for instance an image (B, C, H, W); the mask has another shape or
                type, or the mechanism refuses masks.
        """
        grid = self.grid if grid is None else grid
        if torch.jit.is_tracing():  # it records sizes as tensors, but a traced graph belongs to one grid
            grid = tuple(map(int, grid))
        P = self.num_prefix_tokens
        grid = check_inputs(self.label, x, grid, P, self.num_heads * self.head_dim, len(self.grid))
        if key_mask is None:
            return self.output(self.attended(x, grid), x)
        self.check_key_mask(key_mask, (x.shape[0], math.prod(grid)))
        counts = F.pad(key_mask, (P, 0), value=True)
        x = stand_in(x, counts)
        # If no token of an image counts, its zeros attend to each other.
        key_mask = counts | ~counts.any(1, keepdim=True)
        y = self.attend_all(self.project(x, grid), grid, key_mask)
        return self.output(y, x).masked_fill(~counts[..., None], 0)

    def packing(self, grid: Grid) -> "Packing | None":
        """The layer's attention as kernels on the packed projection compute it; None if they do not."""
        return None

    def attended(self, x: Tensor, grid: Grid) -> Tensor:
        """Attended values (B, h, P + N, d) of x (B, P + N, C): by a kernel that reads the packed projection if one
        covers the layer, otherwise by `attend_all`.
        """
        packing = self.packing(grid) if len(grid) == 2 and kernels.takes_kernels(x) else None
        if packing is None or self.attn_drop:
            return self.attend_all(self.project(x, grid), grid)
        packed = self.qkv(x).unflatten(2, (3, self.num_heads, self.head_dim))

        def apart(packed: Tensor, packing: "Packing") -> Tensor:
            return self.attend_all(split_heads(packed.flatten(2), 3, self.num_heads), grid)

        attend = kernels.covering("packed_attention", packed, packing)
        if attend is None:
            return apart(packed, packing)

        def together(packed: Tensor, packing: "Packing") -> Tensor:
            return self.with_local_term(attend(packed, packing), packed[:, :, 2].transpose(1, 2), grid)

        return kernels.prefer(self.label, together, apart, packed, packing)

    def attend_all(self, projected: tuple[Any, ...], grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """Attended values (B, h, P + N, d) of all P + N tokens: `attend`, exact prefix tokens and the local term.

        projected: queries, keys and values, or whatever else `project` returns. key_mask: see `attend`.
        """
        (q, *others), mask = projected, [] if key_mask is None else [key_mask]
        if self.num_prefix_tokens == 0 or self.prefix_tokens == "plain":
            y = self.attend(q, *others, grid, *mask)
        else:
            q_prefix, q = split_prefix(q, math.prod(grid))
            attn_mask = None if key_mask is None else key_mask[:, None, None]
            y_prefix = softmax_attention(q_prefix, *others[:2], attn_mask, self.attn_drop)
            y = torch.cat([y_prefix, self.attend(q, *others, grid, *mask)], 2)
        return self.with_local_term(y, projected[0 if self.num_projections == 1 else 2], grid, key_mask)

    def with_local_term(self, y: Tensor, values: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """Attended values y (B, h, P + N, d) and, if there is one, the local term of the values of `project`."""
        if self.local_term is None:
            return y
        return y + self.local_term.convolve(self.local_values(values, grid), grid, key_mask)

    def local_values(self, values: Tensor, grid: Grid) -> Tensor:
        """The values (B, h, P + N, d) that the local term convolves, from those of `project`."""
        return values

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """The layer's output (B, P + N, C) from attended values y (B, h, P + N, d) and the layer's input x."""
        y = merge_heads(y)
        return self.proj_drop(self.proj(y if self.gate is None else y * self.gate(x)))

    def check_key_mask(self, key_mask: Tensor, shape: tuple[int, int]) -> None:
        """Raises the ValueError for a mask that the mechanism does not take, or that is not bool of `shape` (B, N)."""
        if self.refusal:
            raise ValueError(f"{self.label}: takes no key_mask: {self.refusal}")
        if key_mask.dtype != torch.bool or key_mask.shape != shape:
            raise ValueError(
                f"{self.label}: got a key_mask of {key_mask.dtype} {tuple(key_mask.shape)}; give torch.bool"
                f" {shape}, (B, N), true at the tokens of the grid that count"
            )

    @property
    def core(self) -> "Attention":
        """The mechanism of a layer, here the layer itself: layers of other people's models have one inside."""
        return self

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Tokens, and the other arguments by name, of a call of `forward`; a key mask only if there is one."""
        x, *others = args
        named = dict(zip(("grid", "key_mask"), others, strict=False)) | {**kwargs}
        return x, {name: value for name, value in named.items() if value is not None}

    def extra_repr(self) -> str:
        return f"{self.config}"
