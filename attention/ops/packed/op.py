"""What a layer says of itself so that kernels can attend on its packed projection, qkv (B, N, 3, h, d).

Kernels that read queries, keys and values where the projection wrote them, and write their gradients where the
projection reads them, copy and add nothing. The definition is the layer's own `attend_all`.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from ...parts.geometry import Grid, Windows
from ...parts.linear import LandmarkTransform, is_plain
from ..group_values.landmarks import Landmarks
from ..kernels import offer


class Packing(NamedTuple):
    """Softmax over windows, and over groups of tokens with one sample each (EVA).

    Attributes:
        windows: they do not overlap. origin: row and column at which the first window begins, at most 0.
        bias: function that returns the position bias (h, w, w), or None.
        tiles: the groups, which divide the grid; None: no groups. log_count: adds log |P_c| to a group's logit.
        landmarks: of the groups; `transforms_of` returns their transforms.
    """

    windows: Windows
    bias: Callable[[], Tensor | None]
    origin: Grid = (0, 0)
    tiles: Windows | None = None
    log_count: bool = False
    landmarks: Landmarks | None = None


def transforms_of(landmarks: Landmarks) -> list[LandmarkTransform] | None:
    """The transforms of the means of queries and keys, if landmarks are LayerNorm(Linear(mean)) by modules that nothing
    replaced or watches, with one sample about the sum of both; otherwise None.
    """
    config = landmarks.config
    if (config.landmark_transform, config.pool, config.num_samples, config.mu) != ("ln_linear", "mean", 1, "qk"):
        return None
    transforms = [landmarks.q, landmarks.k]
    parts = [(landmarks, Landmarks)]
    for each in transforms:
        parts += [(each, LandmarkTransform), (each.linear, nn.Linear), (each.norm, nn.LayerNorm)]
    return transforms if all(is_plain(*part) for part in parts) else None


offer("packed_attention", f"{__package__}.triton_packed")
