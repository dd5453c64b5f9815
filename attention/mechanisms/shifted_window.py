"""Shifted windows (Liu et al. 2021, arXiv:2103.14030): softmax within windows that odd layers shift by half a window.

Windows of w x w tokens begin at the grid's corner in even layers and floor(w / 2) rows and columns further in odd ones,
except along an axis that one window covers (Swin Transformer, section 3.2). Layers are counted without those of other
mechanisms. The shift is a roll of the padded grid; pairs of tokens that only the roll makes neighbours are masked, like
padding. In the released code padding is a key, and timm rolls before it pads.
Cost: 2 N w^2 C multiply-accumulates.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..costs import window_macs
from ..ops.joint_softmax.op import attended_tokens, joint_softmax, mix, mix_reference, prefix_term, window_logits
from ..ops.packed.op import Packing
from ..options import Options, attn_drop_option, local_option, option
from ..parts.geometry import Grid, Windows, split_prefix
from ..parts.masking import of_grid
from ..parts.position import PositionBias
from ..parts.tables import kept_table


def shifted_window(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, windows: Windows, shift: Grid, attn_drop: float = 0
) -> Tensor:
    """Softmax within windows that begin at the token `shift`."""
    if shift == (0, 0):
        return joint_softmax(q, k, v, bias, windows=windows, attn_drop=attn_drop)
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    q, k, v = (roll(x, windows, shift) for x in (q, k, v))
    mask, apart = windows.key_mask, _apart(windows._replace(key_mask=None), shift, q.device)
    mask = None if mask is None else roll(mask[:, None, :, None], windows, shift)[:, 0, :, 0]
    (H, W), windows = windows.grid, windows._replace(grid=windows.padded_grid, key_mask=mask)
    logits = window_logits(q, k, bias, windows).masked_fill(apart, -torch.inf)
    terms = [(logits, windows.partition(v)), *prefix_term(windows.partition(q), k_prefix, v_prefix)]
    y = windows.reverse(mix(terms, attn_drop)).unflatten(2, windows.grid)
    return y.roll(shift, (2, 3))[:, :, :H, :W].flatten(2, 3)


def roll(x: Tensor, windows: Windows, shift: Grid) -> Tensor:
    """Pads tokens (B, h, N, d) to (B, h, N', d), and rolls them up and to the left."""
    below, beside = (after - before for after, before in zip(windows.padded_grid, windows.grid, strict=True))
    x = F.pad(x.unflatten(2, windows.grid), (0, 0, 0, beside, 0, below))
    return x.roll([-s for s in shift], (2, 3)).flatten(2, 3)


@kept_table
def _apart(windows: Windows, shift: Grid, device: torch.device) -> Tensor:
    """Mask of the pairs in a window of the rolled grid from different windows, padding being one: (g, w, w) bool."""
    rows, columns = (
        (torch.arange(side, device=device) - s).div(w, rounding_mode="floor") + 2
        for side, s, w in zip(windows.grid, shift, windows.size, strict=True)
    )
    own = roll((rows[:, None] * (windows.grid[1] + 2) + columns).view(1, 1, -1, 1), windows, shift)
    own = windows._replace(grid=windows.padded_grid).partition(own)[0, 0, ..., 0]
    return own[:, :, None] != own[:, None]


def shifted_window_reference(q, k, v, bias=None, *, windows, shift, attn_drop=0):
    """`shifted_window`, query by query."""
    y, N, (rows, columns) = torch.zeros_like(q), q.shape[2], windows.size
    moved = [(n // windows.grid[1] - shift[0], n % windows.grid[1] - shift[1]) for n in range(N)]
    own, position = [(a // rows, b // columns) for a, b in moved], [a % rows * columns + b % columns for a, b in moved]
    for n in range(N):
        keys = [m for m in range(N) if own[m] == own[n] and (windows.key_mask is None or windows.key_mask[0, m])]
        own_bias = None if bias is None else bias[:, position[n], [position[m] for m in keys]]
        y[:, :, n] = mix_reference(attended_tokens(n, q, k, v, keys, own_bias), attn_drop=attn_drop)
    return y


class ShiftedWindow(Attention):
    prefix_tokens = "exact"
    size_option = "window_size"

    class Config(Options):
        window_size: int = option(
            7, "window side w in tokens; along a shorter side of the layer's grid, that side", low=1
        )
        shift: bool = option(True, "shift the windows of odd layers by half a window")
        position_bias: Literal["table", "none"] = option("table", "relative position bias inside the window")
        local: bool = local_option()
        attn_drop: float = attn_drop_option()

        def windows(self, grid: Grid) -> Windows:
            return Windows(grid, (min(self.window_size, grid[0]), min(self.window_size, grid[1])))

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        windows = config.windows(context.grid)
        number = context.layer if context.num_same_before is None else context.num_same_before
        self.size, self.shifts = windows.size, config.shift and number % 2 == 1
        self.position_bias = PositionBias(config.position_bias, self.num_heads, self.head_dim, windows)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        (rows, columns), biased = config.windows(context.grid).size, config.position_bias == "table"
        table = context.num_heads * (2 * rows - 1) * (2 * columns - 1) * biased
        return Cost(table, window_macs(config.windows(context.grid), context.dim))

    def shift(self, grid: Grid) -> Grid:
        """Rows and columns by which the windows on this grid are shifted."""
        dy, dx = (w // 2 if self.shifts and w < side else 0 for w, side in zip(self.size, grid, strict=True))
        return dy, dx

    def packing(self, grid: Grid) -> Packing | None:
        first, second = (shift - w if shift else 0 for shift, w in zip(self.shift(grid), self.size, strict=True))
        return Packing(Windows(grid, self.size), self.position_bias, (first, second))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        windows, shift = Windows(grid, self.size, key_mask=of_grid(key_mask, q.shape[2])), self.shift(grid)
        return shifted_window(q, k, v, self.position_bias(), windows=windows, shift=shift, attn_drop=self.attn_drop)
