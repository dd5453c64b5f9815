"""Attention mechanisms over a 2-D token grid, one file each, behind one factory.

attn = create_attention("eva", dim=192, num_heads=3, grid=(28, 28), window_size=7, num_landmarks=49)
y = attn(x, (28, 28))                                   # (B, 784, 192) -> (B, 784, 192)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from .base import Attention, LayerContext
from .ops import kernels
from .options import OptionError, nearest, parse_options
from .parts.geometry import Grid

__version__ = "0.1.0"  # the project's version, which pyproject.toml reads here

NAMES = """
    softmax local performer ra lara eva sra combiner transformer_ls smyrf scatterbrain scatterbrain_lsh eva_lsh
    eva_clustered linear xca cosformer transnormer t2r rfa dpfp linear_sra nystrom linformer abc synthesizer
    orthoformer longformer sparse_transformer bigbird clustered reformer efficient hydra focused_linear relu_linear
    slab inline shifted_window neighborhood hilo bilevel_routing agent rala mlla polaformer identity mean pooling
    convolution
"""


def _mechanism(name: str) -> type[Attention]:
    """The class of a mechanism: `SparseTransformer` of the file mechanisms/sparse_transformer.py."""
    title = "".join(word.capitalize() for word in name.split("_"))
    return getattr(import_module(f".mechanisms.{name}", __name__), title)


ATTENTION: dict[str, type[Attention]] = {name: _mechanism(name) for name in NAMES.split()}

__all__ = [
    "ATTENTION",
    "Attention",
    "AttentionFactory",
    "Grid",
    "LayerContext",
    "OptionError",
    "create_attention",
    "kernels",
]


@dataclass(frozen=True)
class AttentionFactory:
    """A mechanism with checked options: call it with the fields of a `LayerContext` to build a layer.

    Attributes:
        name: key of `ATTENTION`. config: the mechanism's `Config`.
    """

    name: str
    config: Any

    @classmethod
    def from_options(cls, options: str | Mapping[str, Any], path: str = "attention") -> "AttentionFactory":
        """Builds a factory from ``"eva"`` or ``{"name": "eva", "window_size": 7, ...}``.

        Raises:
            OptionError: unknown mechanism or option, wrong type or value; `path` begins the message.
        """
        options = {"name": options} if isinstance(options, str) else options
        if not isinstance(options, Mapping) or "name" not in options:
            raise OptionError(path, f"expected a mechanism's name or a mapping with one, got {options!r}")
        name = options["name"]
        if not isinstance(name, str) or name not in ATTENTION:
            raise OptionError(f"{path}.name", f"unknown mechanism {name!r}{nearest(name, ATTENTION)}")
        rest = {key: value for key, value in options.items() if key != "name"}
        return cls(name, parse_options(ATTENTION[name].Config, rest, f"{path}({name})"))

    def __call__(self, **context: Any) -> Attention:
        """Builds the layer for `LayerContext(**context)`.

        Raises:
            OptionError: options that the context's dimensions cannot honour.
        """
        return ATTENTION[self.name](LayerContext(**context), self.config)


def create_attention(name: str, **options: Any) -> Attention:
    """Builds one attention layer: keywords are the fields of `LayerContext` (dim, num_heads, grid, ...) and the options
    of the mechanism. A name that is both is the mechanism's option.

    Raises:
        OptionError: unknown mechanism or option, wrong type or value, or a geometry that cannot be honoured.
    """
    known = {field.name for field in fields(ATTENTION[name].Config)} if name in ATTENTION else set()
    of_context = {field.name for field in fields(LayerContext)} - known
    context = {option: options.pop(option) for option in of_context & options.keys()}
    return AttentionFactory.from_options({"name": name, **options})(**context)
