"""The options window_size, layout, overlap, position_bias and causal, which mechanisms with window attention share."""

import math
from typing import Any

from torch import Tensor

from .base import Attention, LayerContext
from .options import option
from .parts.geometry import Grid, Windows, each_axis, raster
from .parts.masking import of_grid
from .parts.position import CAUSAL_INDEX, BiasKind, PositionBias

OPTIONS: dict[str, dict[str, Any]] = {
    "layout": {
        "default": None,
        "meaning": "square windows of the grid, or blocks of the raster order; null: 2d, with causal 1d",
        "chosen": lambda c: "1d" if c.causal else "2d",
    },
    "overlap": {
        "default": 0,
        "meaning": "tokens e by which a window's keys reach beyond it; the papers' overlap is w // 2",
        "low": 0,
    },
    "position_bias": {
        "default": None,
        "meaning": "relative position bias inside the window; null: table, as released table_released",
        "chosen": lambda c: "table_released" if c.released and not c.causal else "table",
    },
    "causal": {"default": False, "meaning": "tokens attend to no later token, in raster order; needs layout 1d"},
}


def window_option(name: str) -> Any:
    """The dataclass field `name` of a mechanism with windows."""
    return option(**OPTIONS[name])


def windows_on(config: Any, grid: Grid, key_mask: Tensor | None = None) -> Windows:
    """The windows of a mechanism's options on this grid; they hold no tokens if window_size is 0.

    key_mask: (B, P + N) bool, true for tokens that count.
    """
    area, side, overlap = raster(grid, config.layout), config.window_size, config.overlap
    size, over = each_axis(side, len(area)), each_axis(overlap if side else 0, len(area))
    if side and config.layout == "1d":
        size, over = (1, side), (0, overlap)
    return Windows(area, size, over, config.causal, of_grid(key_mask, math.prod(grid)))


def position_bias(attn: Attention, context: LayerContext) -> PositionBias:
    """The position bias of a mechanism's windows.

    Raises:
        OptionError: the error of `refuse_layout`; a kind of bias that causal attention, or windows that are no squares
            of images, do not have.
    """
    config = attn.config
    refuse_layout(attn)
    squares = len(context.grid) == 2 and isinstance(config.window_size, int)
    if not squares and config.position_bias not in ("none", "table"):
        attn.refuse("position_bias", config.position_bias, "for square windows of images; take table or none")
    if config.causal and config.position_bias not in ("none", *CAUSAL_INDEX):
        attn.refuse("position_bias", config.position_bias, f"not with causal; one of none, {', '.join(CAUSAL_INDEX)}")
    kind: BiasKind = config.position_bias if config.window_size else "none"
    return PositionBias(kind, attn.num_heads, attn.head_dim, windows_on(config, context.grid), squares)


def refuse_layout(attn: Attention) -> None:
    """Raises the OptionError for causal attention with another layout than 1d."""
    if attn.config.causal and attn.config.layout != "1d":
        attn.refuse("layout", attn.config.layout, "causal attention follows the raster order; set layout: 1d")
