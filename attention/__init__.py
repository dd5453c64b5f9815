"""Attention mechanisms over a 2-D token grid, one file each, behind one factory.

attn = create_attention("eva", dim=192, num_heads=3, grid=(28, 28), window_size=7, num_landmarks=49)
y = attn(x, (28, 28))                                   # (B, 784, 192) -> (B, 784, 192)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .base import Attention, LayerContext
from .mechanisms.abc import Abc
from .mechanisms.agent import Agent
from .mechanisms.bigbird import Bigbird
from .mechanisms.bilevel_routing import BilevelRouting
from .mechanisms.clustered import Clustered
from .mechanisms.combiner import Combiner
from .mechanisms.cosformer import Cosformer
from .mechanisms.dpfp import Dpfp
from .mechanisms.efficient import Efficient
from .mechanisms.eva import Eva
from .mechanisms.eva_clustered import EvaClustered
from .mechanisms.eva_lsh import EvaLsh
from .mechanisms.focused_linear import FocusedLinear
from .mechanisms.hilo import Hilo
from .mechanisms.hydra import Hydra
from .mechanisms.inline import Inline
from .mechanisms.lara import Lara
from .mechanisms.linear import Linear
from .mechanisms.linear_sra import LinearSra
from .mechanisms.linformer import Linformer
from .mechanisms.local import Local
from .mechanisms.longformer import Longformer
from .mechanisms.mlla import Mlla
from .mechanisms.neighborhood import Neighborhood
from .mechanisms.nystrom import Nystrom
from .mechanisms.orthoformer import Orthoformer
from .mechanisms.performer import Performer
from .mechanisms.polaformer import Polaformer
from .mechanisms.ra import Ra
from .mechanisms.rala import Rala
from .mechanisms.reformer import Reformer
from .mechanisms.relu_linear import ReluLinear
from .mechanisms.rfa import Rfa
from .mechanisms.scatterbrain import Scatterbrain
from .mechanisms.scatterbrain_lsh import ScatterbrainLsh
from .mechanisms.shifted_window import ShiftedWindow
from .mechanisms.slab import Slab
from .mechanisms.smyrf import Smyrf
from .mechanisms.softmax import Softmax
from .mechanisms.sparse_transformer import SparseTransformer
from .mechanisms.sra import Sra
from .mechanisms.synthesizer import Synthesizer
from .mechanisms.t2r import T2r
from .mechanisms.transformer_ls import TransformerLs
from .mechanisms.transnormer import Transnormer
from .mechanisms.xca import Xca
from .ops import kernels
from .options import OptionError, nearest, parse_options
from .parts.geometry import Grid

__version__ = "0.1.0"  # the project's version, which pyproject.toml reads here

ATTENTION: dict[str, type[Attention]] = {
    "softmax": Softmax,
    "local": Local,
    "performer": Performer,
    "ra": Ra,
    "lara": Lara,
    "eva": Eva,
    "sra": Sra,
    "combiner": Combiner,
    "transformer_ls": TransformerLs,
    "smyrf": Smyrf,
    "scatterbrain": Scatterbrain,
    "scatterbrain_lsh": ScatterbrainLsh,
    "eva_lsh": EvaLsh,
    "eva_clustered": EvaClustered,
    "linear": Linear,
    "xca": Xca,
    "cosformer": Cosformer,
    "transnormer": Transnormer,
    "t2r": T2r,
    "rfa": Rfa,
    "dpfp": Dpfp,
    "linear_sra": LinearSra,
    "nystrom": Nystrom,
    "linformer": Linformer,
    "abc": Abc,
    "synthesizer": Synthesizer,
    "orthoformer": Orthoformer,
    "longformer": Longformer,
    "sparse_transformer": SparseTransformer,
    "bigbird": Bigbird,
    "clustered": Clustered,
    "reformer": Reformer,
    "efficient": Efficient,
    "hydra": Hydra,
    "focused_linear": FocusedLinear,
    "relu_linear": ReluLinear,
    "slab": Slab,
    "inline": Inline,
    "shifted_window": ShiftedWindow,
    "neighborhood": Neighborhood,
    "hilo": Hilo,
    "bilevel_routing": BilevelRouting,
    "agent": Agent,
    "rala": Rala,
    "mlla": Mlla,
    "polaformer": Polaformer,
}

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
    of the mechanism.

    Raises:
        OptionError: unknown mechanism or option, wrong type or value, or a geometry that cannot be honoured.
    """
    context = {field.name: options.pop(field.name) for field in fields(LayerContext) if field.name in options}
    return AttentionFactory.from_options({"name": name, **options})(**context)
