"""HiLo attention (Pan et al. 2022, arXiv:2205.13213): some heads attend within windows, the others to pooled tokens.

The first of h heads attend to the tokens of their window of w x w (Hi: high frequencies), and the last int(alpha h)
heads to the means of all windows (Lo: low frequencies, L channels in all). At w = 1 all heads are Lo, which is softmax
attention. Since int rounds down, at least one head is Hi for every alpha < 1, as in the first stage of a pyramid, and
attends to nothing beyond its window. Keys and values are pooled after their projection; since it is linear, the means
equal projections of pooled tokens, and prefix tokens and masks work as in window attention.
Cost: 2 N w^2 (C - L) + 2 N^2 L / w^2 multiply-accumulates. The released code saves 2 (N - N / w^2) L C of them, as it
projects pooled tokens, and projects the output of each branch by itself: `proj` with two blocks.

Its windows must divide the grid; here, means run over the tokens that a window has.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_side
from ..costs import window_macs
from ..ops.joint_softmax.op import attended_in_window, joint_softmax, mix_reference
from ..options import Options, attn_drop_option, fit_option, local_option, option
from ..parts.geometry import Grid, Windows, split_prefix
from ..parts.masking import of_grid
from .softmax import softmax


def hilo(q: Tensor, k: Tensor, v: Tensor, *, windows: Windows, num_high: int, attn_drop: float = 0.0) -> Tensor:
    """Attention of the first `num_high` heads within windows, and of the other heads to pooled windows."""
    high, low = ([x[:, part] for x in (q, k, v)] for part in (slice(num_high), slice(num_high, None)))
    y = [joint_softmax(*high, windows=windows, attn_drop=attn_drop)] if num_high else []
    if num_high < q.shape[1]:
        (k_prefix, k), (v_prefix, v) = (split_prefix(x, q.shape[2]) for x in low[1:])
        keys, values = torch.cat([k_prefix, windows.mean(k)], 2), torch.cat([v_prefix, windows.mean(v)], 2)
        mask = None if windows.key_mask is None else windows.mask(q.device)  # (B, 1, g, w)
        mask = None if mask is None else F.pad(mask[:, 0].any(-1), (k_prefix.shape[2], 0), value=True)
        y.append(softmax(low[0], keys, values, attn_drop, key_mask=mask))
    return torch.cat(y, 1)


def hilo_reference(q, k, v, *, windows, num_high, attn_drop=0.0):
    """`hilo`, query by query."""
    y, P, counts = torch.zeros_like(q), k.shape[2] - q.shape[2], windows.key_mask
    pools = [index[index >= 0] for index in windows.indices(q.device)]
    pools = [pool for pool in pools if counts is None or counts[0, pool].any()]
    pools = [[n] for n in range(P)] + [P + (pool if counts is None else pool[counts[0, pool]]) for pool in pools]
    k_bar, v_bar = (torch.stack([x[:, num_high:, pool].mean(2) for pool in pools], 2) for x in (k, v))
    for n in range(q.shape[2]):
        own = attended_in_window(n, *(x[:, :num_high] for x in (q, k, v)), windows=windows)
        pooled = (q[:, num_high:, n, None] @ k_bar.mT)[:, :, 0] / q.shape[-1] ** 0.5, v_bar
        y[:, :, n] = torch.cat([mix_reference(term, attn_drop=attn_drop) for term in (own, pooled)], 1)
    return y


class Hilo(Attention):
    prefix_tokens = "exact"
    size_option = "window_size"

    class Config(Options):
        window_size: int = option(2, "side w in tokens of windows and pools; 1: all heads attend to all tokens", low=1)
        alpha: float = option(
            0.9, "share of the heads that attend to pools, rounded down to whole heads", low=0, high=1
        )
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(window_size=up_to_side)

        def num_high(self, num_heads: int) -> int:
            """Number of heads that attend within windows."""
            return num_heads - int(num_heads * self.alpha) if self.window_size > 1 else 0

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        windows = Windows(context.grid, (config.window_size, config.window_size))
        high = config.num_high(context.num_heads) * context.head_dim
        return Cost(0, window_macs(windows, high) + 2 * context.num_tokens * windows.num_windows * (context.dim - high))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        side, num_high = self.config.window_size, self.config.num_high(self.num_heads)
        windows = Windows(grid, (side, side), key_mask=of_grid(key_mask, q.shape[2]))
        return hilo(q, k, v, windows=windows, num_high=num_high, attn_drop=self.attn_drop)
