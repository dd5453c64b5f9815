"""The contract every attention mechanism meets.

Shape letters used throughout: B images, (H, W) token grid, N = H*W tokens in raster order n = y*W + x, C channels
(dim), h heads, d = C/h channels per head, g windows, w tokens per window, e keys that a window attends to, c landmarks
or groups, t tokens per group, s random samples, P prefix tokens (class token, registers), which precede those of the
grid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.options import OptionError
from attention.parts.geometry import Grid, merge_heads, split_heads, split_prefix
from attention.parts.linear import init_linear
from attention.parts.local_term import LocalTerm
from attention.parts.masking import stand_in

PrefixTokens = Literal["refused", "plain", "exact"]


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Where an attention layer stands in a network: what the network knows of it and a mechanism may need.

    Attributes:
        dim: channels C; num_heads: heads h, a divisor of C.
        grid: the (H, W) the layer is built for; it sizes parameters and is checked before any work starts.
        num_prefix_tokens: class and register tokens P that precede the grid tokens.
        layer, depth: index of the layer and number of layers of the network.
        reduction: spatial reduction R that a pyramid assigns to this stage (PVT-v2: 8, 4, 2, 1); None elsewhere.
        qkv_bias: whether the query/key/value projection has a bias. proj_drop: dropout rate of the output.
        shared: what layers of the network share, under keys of the mechanism's choice; the network makes one dict.
    """

    dim: int
    num_heads: int
    grid: Grid
    num_prefix_tokens: int = 0
    layer: int = 0
    depth: int = 1
    reduction: int | None = None
    qkv_bias: bool = True
    proj_drop: float = 0.0
    shared: dict[Any, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.dim % self.num_heads:
            raise OptionError("num_heads", f" = {self.num_heads} does not divide dim = {self.dim}")

    @property
    def num_tokens(self) -> int:
        """Tokens N of the grid."""
        return self.grid[0] * self.grid[1]

    @property
    def head_dim(self) -> int:
        """Channels d of a head."""
        return self.dim // self.num_heads


class Cost(NamedTuple):
    """Of a layer, in addition to its four C x C projections; negative where it has fewer of these."""

    parameters: int
    macs: int


class Attention(nn.Module):
    """Base of all mechanisms: owns the projections, with timm's parameter names; a mechanism writes `attend`.

    A mechanism derives from this class, nests its options as `Config`, and stands in `attention.ATTENTION`.
    """

    Config: ClassVar[type]
    prefix_tokens: ClassVar[PrefixTokens] = "refused"
    """What prefix tokens are to the mechanism.

    refused: a layer with prefix tokens cannot be built. plain: ordinary tokens, as to mechanisms that ignore order;
    `attend` gets queries of all P + N. exact: they attend to all tokens by softmax, which this class does; `attend`
    gets queries of the grid and keys of all P + N, every token of the grid attends to the prefix tokens, and windows,
    landmarks and positions are the grid's alone.
    """
    key_mask_refusal: ClassVar[str | None] = "it does not declare what it does with masked tokens"
    """Why the mechanism refuses a key mask; None where `attend` takes one as its last argument."""
    num_projections: ClassVar[int] = 3
    """How many of queries, keys and values `qkv` makes: 2 where keys are queries, 1 where there are only values."""
    local_size: ClassVar[int] = 5
    """Side in tokens of the filters of the local term, which a mechanism has whose option `local` is true; 0 where the
    mechanism makes one of its own."""
    local_by_head: ClassVar[bool] = True
    """Whether all heads share the filters of the local term; else every channel has its own."""

    def __init__(self, context: LayerContext, config: Any):
        super().__init__()
        self.config = config
        self.num_heads = context.num_heads
        self.head_dim = context.dim // context.num_heads
        self.num_prefix_tokens = context.num_prefix_tokens
        if context.num_prefix_tokens and self.prefix_tokens == "refused":
            problem = f" = {context.num_prefix_tokens}: {self.name()} does not declare what it does with prefix tokens"
            raise OptionError("num_prefix_tokens", f"{problem}; use a model without a class token and registers")
        if context.num_prefix_tokens and getattr(config, "causal", False):
            self.refuse("causal", True, "prefix tokens attend to every token; use a model without them")
        if getattr(config, "local", False) and getattr(config, "causal", False):
            self.refuse("local", True, "its convolution takes values of later tokens; with causal set local: false")
        self.qkv = nn.Linear(context.dim, self.num_projections * context.dim, bias=context.qkv_bias)
        self.proj = nn.Linear(context.dim, context.dim)
        self.proj_drop = nn.Dropout(context.proj_drop)
        width = self.head_dim if self.local_by_head else context.dim
        has_local_term = getattr(config, "local", False) and self.local_size > 0
        self.local_term = LocalTerm(width, self.local_size) if has_local_term else None
        self.gate: nn.Module | None = None  # of the layer's input; what it gives multiplies what `proj` gets
        for linear in (self.qkv, self.proj):
            init_linear(linear)

    @classmethod
    def name(cls) -> str:
        """The mechanism's name, that of its file."""
        return cls.__module__.rpartition(".")[2]

    @property
    def ignores_order(self) -> bool:
        """Whether a token's output is a function of the set of tokens, wherever they stand, so that some may be left
        out; the grid then is (1, N)."""
        places = getattr(self.config, "causal", False) or getattr(self.config, "local", False)
        return self.prefix_tokens == "plain" and not places

    @classmethod
    def refuse(cls, name: str, value: Any, problem: str) -> NoReturn:
        """Raises the OptionError for option `name` of this mechanism."""
        raise OptionError(f"attention({cls.name()}).{name}", f" = {value}: {problem}")

    @classmethod
    def cost(cls, context: LayerContext, config: Any) -> Cost:
        """What a layer costs in addition to its four C x C projections (4 C^2 + 4 C parameters, 4 N C^2 MACs), exactly.

        Multiply-accumulates are those of matrix products and convolutions, padding included, for one image in
        evaluation. Prefix tokens are not counted.
        """
        raise NotImplementedError(f"{cls.__name__} does not define cost")

    def refuse_unused(self, neutral: Mapping[str, Any], why: str) -> None:
        """Raises the OptionError for the first option that does not have its `neutral` value."""
        for name, value in neutral.items():
            if getattr(self.config, name) != value:
                self.refuse(name, getattr(self.config, name), f"{why}; set {name}: {value}")

    @property
    def attn_drop(self) -> float:
        """Dropout rate of attention weights in the present mode; 0 where the mechanism has no such option."""
        return getattr(self.config, "attn_drop", 0.0) if self.training else 0.0

    def project(self, x: Tensor, grid: Grid) -> tuple[Any, ...]:
        """(B, P + N, C) -> queries, keys and values, each (B, h, P + N, d), and what else `attend` takes."""
        return split_heads(self.qkv(x), self.num_projections, self.num_heads)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Queries (B, h, N, d), keys and values (B, h, P + N, d), the grid -> attended values (B, h, N, d).

        A mechanism whose `project` gives other things than q, k and v takes these in their place.
        Where prefix tokens are plain there are queries of all P + N tokens. A mechanism without `key_mask_refusal` also
        takes key_mask, None or (B, P + N) bool: which tokens count, at least one of every image. Masked keys have
        weights of exactly zero, masked queries no influence on other outputs, and their own are never read.
        `stand_in` says what they hold. One that is decoded with what `past` keeps takes that, too: then q, k and v are
        those of the next token alone.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define attend")

    def forward(self, x: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """(B, P + N, C) tokens, N of an (H, W) grid -> (B, P + N, C). The grid may differ from construction's.

        Args:
            key_mask: which tokens of the grid count, (B, N) bool: true for those that do, as for torch's attention and
                Hugging Face's attention_mask. What others hold has no effect and no gradient; their outputs are zero.

        Raises:
            ValueError: another number of tokens than the prefix tokens and the grid make; a mask of another shape or
                type, or for a mechanism that refuses masks.
        """
        (H, W), P = grid, self.num_prefix_tokens
        if x.shape[1] != P + H * W:
            raise ValueError(
                f"attention({self.name()}): got {x.shape[1]} tokens, but {P} prefix tokens and a {H}x{W} grid make"
                f" {P + H * W}; give the (H, W) of these tokens"
            )
        if key_mask is None:
            return self.output(self.attend_all(self.project(x, grid), grid), x)
        self.check_key_mask(key_mask, (x.shape[0], H * W))
        counts = F.pad(key_mask, (P, 0), value=True)
        x = stand_in(x, counts)
        # Where no token of an image counts, its zeros attend to each other.
        y = self.attend_all(self.project(x, grid), grid, counts | ~counts.any(1, keepdim=True))
        return self.output(y, x).masked_fill(~counts[..., None], 0)

    def attend_all(self, projected: tuple[Any, ...], grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        """What `project` gives, queries of all P + N tokens among it -> their attended values (B, h, P + N, d), the
        local term included.

        key_mask: see `attend`.
        """
        y = self.attend_with_prefix(projected, grid, key_mask)
        return y if self.local_term is None else y + self.local_term.convolve(projected[2], grid, key_mask)

    def attend_with_prefix(self, projected: tuple[Any, ...], grid: Grid, key_mask: Tensor | None) -> Tensor:
        """`attend`, by softmax for prefix tokens that are exact: as `attend_all`, without the local term."""
        (q, *others), mask = projected, [] if key_mask is None else [key_mask]
        if self.num_prefix_tokens == 0 or self.prefix_tokens == "plain":
            return self.attend(q, *others, grid, *mask)
        q_prefix, q = split_prefix(q, grid[0] * grid[1])
        attn_mask = None if key_mask is None else key_mask[:, None, None]
        k, v = others[:2]
        y_prefix = F.scaled_dot_product_attention(q_prefix, k, v, attn_mask, self.attn_drop)
        return torch.cat([y_prefix, self.attend(q, *others, grid, *mask)], 2)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """What `attend_all` gives, (B, h, P + N, d), for tokens x (B, P + N, C) -> the layer's output (B, P + N, C)."""
        y = merge_heads(y)
        return self.proj_drop(self.proj(y if self.gate is None else y * self.gate(x)))

    def check_key_mask(self, key_mask: Tensor, shape: tuple[int, int]) -> None:
        """Raises the ValueError for a mask that the mechanism does not take, or that is not bool of `shape` (B, N)."""
        if self.key_mask_refusal:
            raise ValueError(f"attention({self.name()}): refuses a key_mask, for {self.key_mask_refusal}")
        if key_mask.dtype != torch.bool or key_mask.shape != shape:
            raise ValueError(
                f"attention({self.name()}): got a key_mask of {key_mask.dtype} {tuple(key_mask.shape)}; give torch.bool"
                f" {shape}, (B, N), true at the tokens of the grid that count"
            )

    def extra_repr(self) -> str:
        return f"{self.config}"
