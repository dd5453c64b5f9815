"""Options that mechanisms with a window share: their geometry and what refuses it."""

from typing import Any

from attention.base import Attention, LayerContext
from attention.parts.geometry import Grid, Windows, raster
from attention.parts.position import CAUSAL_INDEX, PositionBias


def exact_window(attn: Attention, site: LayerContext) -> tuple[Grid, Grid, PositionBias]:
    """(window, overlap) along (y, x) in cells, and the position bias, of the options window_size, layout, overlap and
    position_bias of a mechanism; (0, 0) where window_size is 0.

    Raises:
        OptionError: a window or overlap beyond the grid; causal attention (option causal) outside its conditions.
    """
    config, (H, W) = attn.config, site.grid
    overlap, causal = getattr(config, "overlap", 0), getattr(config, "causal", False)
    for name, cells in (("window_size", config.window_size), ("overlap", overlap)):
        longest = max(raster(site.grid, config.layout))
        if cells > longest:
            attn.refuse(name, cells, f"larger than the {H}x{W} grid; at most {longest}")
    if causal and config.layout != "1d":
        attn.refuse("layout", config.layout, "causal attention follows the raster order; set layout: 1d")
    if causal and config.position_bias not in ("none", *CAUSAL_INDEX):
        attn.refuse("position_bias", config.position_bias, f"not with causal; one of none, {', '.join(CAUSAL_INDEX)}")
    if config.window_size == 0:
        sides = (0, 0), (0, 0)
    elif config.layout == "1d":
        sides = (1, config.window_size), (0, overlap)
    else:
        sides = (config.window_size, config.window_size), (overlap, overlap)
    kind = config.position_bias if config.window_size else "none"
    return *sides, PositionBias(kind, attn.num_heads, attn.head_dim, *sides, causal=causal)


def window_options(attn: Attention, grid: Grid) -> dict[str, Any]:
    """Geometry of a mechanism's exact windows on this grid, as keywords of `joint_softmax`."""
    return {
        "grid": raster(grid, attn.config.layout),
        "window": attn.window,
        "overlap": attn.overlap,
        "causal": getattr(attn.config, "causal", False),
    }


def windows_on(config: Any, grid: Grid) -> Windows:
    """The windows of a mechanism's options on this grid; without tokens where window_size is 0."""
    side, overlap = config.window_size, getattr(config, "overlap", 0)
    sides = (side, side), (overlap, overlap)
    if side == 0:
        sides = (0, 0), (0, 0)
    elif config.layout == "1d":
        sides = (1, side), (0, overlap)
    return Windows(raster(grid, config.layout), *sides, getattr(config, "causal", False))
