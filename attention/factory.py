"""The factory of attention layers: `create_attention`, `AttentionFactory`, and the options of mechanisms."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from . import Name
from .base import Attention, LayerContext
from .ops import kernels as kernels
from .option_tables import OptionInfo, describe
from .options import OptionError, parse_options
from .parts.geometry import Grid
from .plugins import find_mechanism
from .registry import ATTENTION
from .registry import register as register


@dataclass(frozen=True)
class AttentionFactory:
    """A mechanism with checked options: call it with the fields of a `LayerContext` to build a layer.

    Attributes:
        name: key of `ATTENTION`. config: the mechanism's `Config`.
    """

    name: str
    config: Any

    @property
    def size_option(self) -> str | None:
        """The mechanism's `size_option`."""
        return ATTENTION[self.name].size_option

    @classmethod
    def from_options(cls, options: str | Mapping[str, Any], path: str = "attention") -> "AttentionFactory":
        """Builds a factory from ``"eva"`` or ``{"name": "eva", "window_size": 7, ...}``.

        Raises:
            OptionError: unknown mechanism or option, wrong type or value; `path` begins the message.
        """
        options = {"name": options} if isinstance(options, str) else options
        if not isinstance(options, Mapping) or "name" not in options:
            raise OptionError(path, f"expected a mechanism's name or a mapping with one, got {options!r}")
        name, rest = options["name"], {key: value for key, value in options.items() if key != "name"}
        return cls(name, parse_options(find_mechanism(name, f"{path}.name").Config, rest, f"{path}({name})"))

    def __call__(self, **context: Any) -> Attention:
        """Builds the layer for `LayerContext(**context)`; with the option `fit`, of the sizes that its grid allows.

        Raises:
            OptionError: options that the context's dimensions cannot honour.
        """
        mechanism, where = ATTENTION[self.name], LayerContext(**context)
        return mechanism(where, mechanism.fitted(where, self.config))


def create_attention(
    name: Name | str,
    *,
    dim: int,
    num_heads: int,
    grid: Grid,
    num_prefix_tokens: int = LayerContext.num_prefix_tokens,
    layer: int = LayerContext.layer,
    depth: int = LayerContext.depth,
    num_same_before: int | None = LayerContext.num_same_before,
    reduction: int | None = LayerContext.reduction,
    qkv_bias: bool = LayerContext.qkv_bias,
    proj_drop: float = LayerContext.proj_drop,
    shared: dict[Any, Any] | None = None,
    **options: Any,
) -> Attention:
    """Builds one attention layer, a module that maps tokens (B, P + N, C) and their grid to (B, P + N, C).

    Args:
        name: key of `ATTENTION`.
        dim: channels C of a token.
        num_heads: heads h, a divisor of C.
        grid: rows and columns (H, W) of the N = H*W tokens, or of clips (T, H, W), N = T*H*W. It sizes parameters; the
            layer also takes other grids of as many axes.
        num_prefix_tokens: class and register tokens P, which precede those of the grid.
        layer, depth: index of the layer and number of layers of the network, for mechanisms whose layers differ.
        num_same_before: number of earlier layers with the same mechanism; None: all earlier ones have it.
        reduction: spatial reduction R that a pyramid assigns to the layer's stage; None elsewhere.
        qkv_bias: True if the query/key/value projection has a bias.
        proj_drop: dropout rate of the output.
        shared: dict that the layers of one network share; None for a layer by itself.
        options: the mechanism's own options; `options_of(name)` and ``python -m attention NAME`` list them. A keyword
            above that is also an option of the mechanism, as `reduction` of sra, is given to the mechanism.

    Raises:
        OptionError: unknown mechanism or option, wrong type or value, or a geometry that cannot be honoured.
    """
    context = {"dim": dim, "num_heads": num_heads, "grid": grid, "num_prefix_tokens": num_prefix_tokens}
    context |= {"layer": layer, "depth": depth, "num_same_before": num_same_before, "reduction": reduction}
    context |= {"qkv_bias": qkv_bias, "proj_drop": proj_drop}
    context |= {} if shared is None else {"shared": shared}
    own = {
        field.name: context.pop(field.name) for field in fields(find_mechanism(name).Config) if field.name in context
    }
    return AttentionFactory.from_options({"name": name, **own, **options})(**context)


def options_of(name: str) -> dict[str, OptionInfo]:
    """The options of a mechanism by name, each with its type, default, meaning, range and choices.

    Raises:
        OptionError: unknown mechanism.
    """
    return describe(find_mechanism(name).Config)
