"""Attention mechanisms over a 2-D token grid, one file each, behind one factory.

attn = create_attention("eva", dim=192, num_heads=3, grid=(28, 28), window_size=7, num_landmarks=49)
y = attn(x, (28, 28))                                   # (B, 784, 192) -> (B, 784, 192)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from attention.abc import Abc
from attention.base import Attention, Grid, Site
from attention.bigbird import BigBird
from attention.clustered import Clustered
from attention.combiner import Combiner
from attention.cosformer import Cosformer
from attention.dpfp import Dpfp
from attention.eva import Eva
from attention.lara import Lara
from attention.linear import Linear
from attention.linear_sra import LinearSra
from attention.linformer import Linformer
from attention.local import Local
from attention.longformer import Longformer
from attention.nystrom import Nystrom
from attention.options import OptionError, nearest, parse_options
from attention.orthoformer import Orthoformer
from attention.performer import Performer
from attention.ra import Ra
from attention.reformer import Reformer
from attention.rfa import Rfa
from attention.scatterbrain import Scatterbrain
from attention.smyrf import Smyrf
from attention.softmax import Softmax
from attention.sparse_transformer import SparseTransformer
from attention.sra import Sra
from attention.synthesizer import Synthesizer
from attention.t2r import T2r
from attention.transformer_ls import TransformerLs
from attention.transnormer import Transnormer
from attention.xca import Xca

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
    "bigbird": BigBird,
    "clustered": Clustered,
    "reformer": Reformer,
}

__all__ = ["ATTENTION", "Attention", "AttentionFactory", "Grid", "OptionError", "Site", "create_attention"]


@dataclass(frozen=True)
class AttentionFactory:
    """A mechanism with checked options: call it with the fields of a `Site` to build a layer.

    Attributes:
        name: key of `ATTENTION`. config: the mechanism's `Config`.
    """

    name: str
    config: Any

    @classmethod
    def from_options(cls, options: str | Mapping[str, Any], path: str = "attention") -> "AttentionFactory":
        """From ``"eva"`` or ``{"name": "eva", "window_size": 7, ...}``.

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

    def __call__(self, **site: Any) -> Attention:
        """Builds the layer for `Site(**site)`.

        Raises:
            OptionError: options that the site's dimensions cannot honour.
        """
        return ATTENTION[self.name](Site(**site), self.config)


def create_attention(name: str, **options: Any) -> Attention:
    """Builds one attention layer: keywords are the fields of `Site` (dim, num_heads, grid, ...) and the mechanism's
    options.

    Raises:
        OptionError: unknown mechanism or option, wrong type or value, or a geometry that cannot be honoured.
    """
    site = {field.name: options.pop(field.name) for field in fields(Site) if field.name in options}
    return AttentionFactory.from_options({"name": name, **options})(**site)
