"""Attention mechanisms over a 2-D token grid, one file each, behind one factory.

attn = create_attention("eva", dim=192, num_heads=3, grid=(28, 28), window_size=7, num_landmarks=49)
y = attn(x, (28, 28))                                   # (B, 784, 192) -> (B, 784, 192)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .base import Attention, LayerContext
    from .factory import AttentionFactory, create_attention, options_of
    from .ops import kernels
    from .option_tables import OptionInfo
    from .options import OptionError
    from .parts.geometry import Grid
    from .registry import ATTENTION, register

__version__ = "0.1.0"  # the project's version, which pyproject.toml reads here

Name = Literal[
    "softmax", "local", "performer", "ra", "lara", "eva", "sra", "combiner", "transformer_ls", "smyrf",
    "scatterbrain", "scatterbrain_lsh", "eva_lsh", "eva_clustered", "linear", "xca", "cosformer", "transnormer",
    "t2r", "rfa", "dpfp", "linear_sra", "nystrom", "linformer", "abc", "synthesizer", "orthoformer", "longformer",
    "sparse_transformer", "bigbird", "clustered", "reformer", "efficient", "hydra", "focused_linear", "relu_linear",
    "slab", "inline", "shifted_window", "neighborhood", "hilo", "bilevel_routing", "agent", "rala", "mlla",
    "polaformer", "monarch", "mala", "circulant", "vittt", "sla", "identity", "mean", "pooling", "convolution",
]  # fmt: skip
"""The mechanisms of this package."""

__all__ = [
    "ATTENTION",
    "Attention",
    "AttentionFactory",
    "Grid",
    "LayerContext",
    "OptionError",
    "OptionInfo",
    "create_attention",
    "kernels",
    "options_of",
    "register",
]


def __getattr__(name: str) -> Any:
    """Imports the factory, and torch with it, at the first use of a name: options and command lines do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".factory", __name__), name)
