"""Local attention (Child et al. 2019, arXiv:1904.10509): softmax within windows, with a relative position bias.

Windows are w x w tokens (or 1-D blocks of w tokens in raster order), not overlapping by default; with `overlap` e a
window's keys reach e tokens beyond it on every side: |E| = (w + 2e)^2. It is exact within the window and ignores all
other tokens. This is the baseline 'Local' of EVA (appendix E.1).
Cost: 2 N |E| C multiply-accumulates.
Papers: EVA Tables 1-3 'Local'.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_side
from ..costs import window_cost
from ..ops.joint_softmax.op import attended_in_window, joint_softmax, mix_reference
from ..ops.packed.op import Packing
from ..options import Options, attn_drop_option, fit_option, local_option, option, released_option
from ..parts.geometry import Grid, Layout, Windows
from ..parts.position import BiasKind
from ..window_options import position_bias, window_option, windows_on


def local(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, windows: Windows, attn_drop: float = 0.0
) -> Tensor:
    """Softmax attention within windows."""
    return joint_softmax(q, k, v, bias, windows=windows, attn_drop=attn_drop)


def local_reference(q, k, v, bias=None, *, windows, attn_drop=0.0):
    """`local`, query by query."""
    y = torch.zeros_like(q)
    for n in range(q.shape[2]):
        y[:, :, n] = mix_reference(attended_in_window(n, q, k, v, bias, windows=windows), attn_drop=attn_drop)
    return y


class Local(Attention):
    prefix_tokens = "exact"
    size_option = "window_size"
    takes_clips = True

    class Config(Options):
        window_size: tuple[int, ...] | int = option(
            7, "window side w in tokens, or one for each axis; block length where layout is 1d", low=1
        )
        released: bool = released_option()
        layout: Layout | None = window_option("layout")
        overlap: int = window_option("overlap")
        position_bias: BiasKind | None = window_option("position_bias")
        causal: bool = window_option("causal")
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(window_size=up_to_side, overlap=up_to_side)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.position_bias = position_bias(self, context)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return window_cost(context, config)

    def packing(self, grid: Grid) -> Packing | None:
        return Packing(windows_on(self.config, grid), self.position_bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        windows = windows_on(self.config, grid, key_mask)
        return local(q, k, v, self.position_bias(), windows=windows, attn_drop=self.attn_drop)
