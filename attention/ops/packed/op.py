"""Description of a layer's attention for kernels on its packed projection, qkv (B, P + N, 3, h, d).

Kernels that read queries, keys and values where the projection wrote them, and write their gradients where the
projection reads them, copy and add nothing. The definition is the layer's own `attend_all`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ...parts.geometry import Grid, Windows
from ..kernels import offer

if TYPE_CHECKING:
    from ..group_values.landmarks import Landmarks


class Packing(NamedTuple):
    """Softmax over windows, and over groups of tokens with one sample each (EVA).

    Attributes:
        windows: they do not overlap. origin: row and column at which the first window begins, at most 0.
        bias: function that returns the position bias (h, w, w), or None.
        tiles: the groups, which divide the grid; None: no groups. log_count: adds log |P_c| to a group's logit.
        landmarks: of the groups.
    """

    windows: Windows
    bias: Callable[[], Tensor | None]
    origin: Grid = (0, 0)
    tiles: Windows | None = None
    log_count: bool = False
    landmarks: "Landmarks | None" = None


TRITON = f"{__package__}.triton_packed"
"""Module of the kernels."""

offer("packed_attention", TRITON)
