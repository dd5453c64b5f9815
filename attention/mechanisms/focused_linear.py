"""Focused linear attention (Han et al. 2023, arXiv:2308.00442): powers make queries and keys point along few channels.

With t = (ReLU(x) + 1e-6) / softplus(a) over all C channels and a learned a, the features of queries and keys are

    phi(x) = |t| t^p / |t^p|,   y = sum_m phi(q_n) . phi(k_m) v_m / sum_m phi(q_n) . phi(k_m) + local term,

head by head. First, a learned vector for each token of the grid (resampled for other grids) is added to the keys. The
local term is a depthwise convolution of the values, with filters that heads share. Prefix tokens have neither.
With a reduction R > 1, for PVT, keys and values are those of a grid shrunk as by `sra`, of M = N / R^2 tokens; for the
local term its values are stretched over the grid, as an image.
Cost: 2 N d C + 25 N C multiply-accumulates; N C parameters for the tokens. With R > 1 the sums over keys have M d C of
the first term's 2 N d C, and `sra`'s convolution is added; M C parameters.

Norms over all C channels, the floor 1e-6, softplus(a) and the vectors follow the released code; the paper's equations
are per head and lack all four. The released code stretches values along the raster order instead, so that rows mix
(`stretch: raster`).
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, total, up_to_side
from ..ops.random_features.maps import focused, of_both
from ..ops.random_features.op import linear_attention, weighted_values_reference
from ..options import Options, fit_option, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, split_prefix
from ..parts.position import KeyPositions
from .sra import add_reduction, project_shrunk, reduction_cost, reduction_option, shrunk, stretched


@full_precision
def focused_linear(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, *, power: float, key_mask: Tensor | None = None
) -> Tensor:
    """Attention with focused features, by the scale a (h, d) and the power p."""
    phi_q, phi_k = of_both(lambda x: focus(x, scale, power), q, k)
    return linear_attention(phi_q, phi_k, v, "mean", key_mask=key_mask)


def focus(x: Tensor, scale: Tensor, power: float) -> Tensor:
    """The feature map phi of tokens (..., h, N, d), which keeps their norm over all heads."""
    return focused(x, F.softplus(scale)[:, None], power=power)


def focused_linear_reference(q, k, v, scale, *, power):
    """`focused_linear` as a dense matrix of weights."""
    features = []
    for x in (q, k):
        t = (x.relu() + 1e-6) / (1 + scale.exp()).log()[:, None]
        raised = t**power
        features.append(raised * ((t**2).sum((1, 3), True) / (raised**2).sum((1, 3), True)) ** 0.5)
    kernel = features[0] @ features[1].mT
    return weighted_values_reference(kernel, v, "mean")


NO_STRETCH = "acts with reduction above 1 and local"


class FocusedLinear(Attention):
    prefix_tokens = "plain"
    has_positions = True  # keys depend on their positions
    reduction: int
    sr: nn.Module | None

    class Config(Options):
        power: float = option(3.0, "exponent p of the features", low=1)
        reduction: int | None = reduction_option()
        stretch: Literal["image", "raster"] = option(
            "image",
            "interpolation of shrunk values for the local term: image: bilinear; raster: linear along the raster "
            "order (released code);"
            " acts with reduction above 1 and local",
        )
        local: bool = local_option(True)
        fit: bool = fit_option(
            reduction=up_to_side,
            stretch=lambda stretch, layer, config: (
                "image" if config.local and min(config.reduction, max(layer.grid)) == 1 else stretch,
                f": {NO_STRETCH}; set stretch: image",
            ),
        )

    def __init__(self, context: LayerContext, config: Any):
        super().__init__(context, config)
        add_reduction(self, context, config.reduction)
        if not config.local:
            self.refuse_unused({"stretch": "image"}, NO_STRETCH)
        self.key_positions = KeyPositions(context.dim, shrunk(context.grid, config.reduction))
        self.feature_scale = nn.Parameter(torch.zeros(context.dim))

    @classmethod
    def cost(cls, context: LayerContext, config: Any) -> Cost:
        (h, d), N, C = (context.num_heads, context.head_dim), context.num_tokens, context.dim
        M = math.prod(shrunk(context.grid, config.reduction))
        own = Cost(M * C + C, M * d * C + N * d * (C + h))  # sums over keys; means and normalisers of queries
        return total(own, reduction_cost(context, config.reduction))

    @classmethod
    def refuses_key_mask(cls, config: Any) -> str | None:
        return "its convolution shrinks the grid with every token of it" if config.reduction > 1 else None

    project = project_shrunk

    def local_values(self, values: Tensor, grid: Grid) -> Tensor:
        if self.config.stretch == "image":
            return stretched(values, grid, self.reduction)
        prefix, tokens = split_prefix(values, math.prod(shrunk(grid, self.reduction)))
        rows = F.interpolate(tokens.mT.flatten(0, 1), grid[0] * grid[1], mode="linear", align_corners=False)
        return torch.cat([prefix, rows.unflatten(0, values.shape[:2]).mT], 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        scale = self.feature_scale.view(self.num_heads, -1)
        k = self.key_positions(k, shrunk(grid, self.reduction))
        return focused_linear(q, k, v, scale, power=self.config.power, key_mask=key_mask).to(v.dtype)
