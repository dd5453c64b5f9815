"""Check of the tokens and the grid that a layer is called with; an error names the remedy."""

from typing import Any

import torch
from torch import Tensor

from .parts.geometry import Grid


def check_inputs(layer: str, x: Tensor, grid: Any, num_prefix_tokens: int, channels: int) -> Grid:
    """Returns the grid as a tuple (H, W), if x is (B, P + H*W, C).

    Args:
        layer: start of the message, e.g. ``attention(eva)``.
    Raises:
        TypeError: the grid is not a pair of ints, as are tokens for cross-attention.
        ValueError: x is an image, and the message shows how to turn it into tokens; or x has another number of axes,
            tokens or channels.
    """
    if isinstance(grid, Tensor):
        raise TypeError(f"{layer}: got a tensor as the grid; there is no cross-attention: give x and its (H, W)")
    is_pair = isinstance(grid, tuple | list) and len(grid) == 2
    if not (is_pair and isinstance(grid[0], int | torch.SymInt) and isinstance(grid[1], int | torch.SymInt)):
        raise TypeError(f"{layer}: got the grid {grid!r}; give the rows and columns of the tokens, two ints (H, W)")
    (H, W), P, shape = grid, num_prefix_tokens, tuple(x.shape)
    if x.ndim == 4:
        channels_last = shape[3] == channels != shape[1]
        sides, names = (shape[1:3], "H, W, C") if channels_last else (shape[2:], "C, H, W")
        tokens = "x.flatten(1, 2)" if channels_last else "x.flatten(2).mT"
        prefix = f" after {P} prefix tokens" if P else ""
        remedy = f"give its tokens{prefix}, {tokens} for (B, {names}), and the grid {tuple(sides)}"
        raise ValueError(f"{layer}: got an image of shape {shape}; {remedy}")
    if x.ndim != 3:
        remedy = "; add the axis of images, x[None]" if x.ndim == 2 else ""
        raise ValueError(f"{layer}: got x of shape {shape}, but tokens are (B, N, C) with C = {channels}{remedy}")
    if shape[2] != channels:
        remedy = "give tokens of that width, or build the layer for this one"
        raise ValueError(f"{layer}: got tokens of {shape[2]} channels, but the layer has dim = {channels}; {remedy}")
    if shape[1] != P + H * W:
        problem = f"got {shape[1]} tokens, but {P} prefix tokens and a {H}x{W} grid make {P + H * W}"
        raise ValueError(f"{layer}: {problem}; give the (H, W) of these tokens")
    return H, W
