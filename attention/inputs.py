"""Check of the tokens and the grid that a layer is called with; an error names the remedy."""

import math
from typing import Any

import torch
from torch import Tensor

from .parts.geometry import Grid


def check_inputs(layer: str, x: Tensor, grid: Any, num_prefix_tokens: int, channels: int, axes: int = 2) -> Grid:
    """Returns the grid as a tuple (H, W), if x is (B, P + H*W, C); for three axes (T, H, W), if x is (B, P + T*H*W, C).

    Args:
        layer: start of the message, e.g. ``attention(eva)``.
    Raises:
        TypeError: the grid has not so many ints.
        ValueError: x is an image, and the message shows how to turn it into tokens; or x has another number of axes,
            tokens or channels.
    """
    is_grid = isinstance(grid, tuple | list) and len(grid) == axes
    if not (is_grid and all(isinstance(side, int | torch.SymInt) for side in grid)):
        got = f"a tensor {tuple(grid.shape)}: there is no cross-attention" if isinstance(grid, Tensor) else repr(grid)
        frames, names = ("", "two ints (H, W)") if axes == 2 else ("frames, ", "three ints (T, H, W)")
        raise TypeError(f"{layer}: got the grid {got}; give the {frames}rows and columns of the tokens, {names}")
    grid, P, shape = tuple(grid), num_prefix_tokens, tuple(x.shape)
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
    if shape[1] != (number := P + math.prod(grid)):
        problem = f"got {shape[1]} tokens, but {P} prefix tokens and a {'x'.join(map(str, grid))} grid make {number}"
        raise ValueError(f"{layer}: {problem}; give the {'(H, W)' if axes == 2 else '(T, H, W)'} of these tokens")
    return grid
