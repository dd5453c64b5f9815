"""Local attention (Child et al. 2019, arXiv:1904.10509): softmax within windows, with a relative position bias.

Windows are w x w cells (or 1-D blocks of w tokens in raster order), not overlapping by default; with `overlap` e a
window's keys reach e cells beyond it on every side: |E| = (w + 2e)^2. Exact within the window, blind beyond. The
baseline 'Local' of EVA (appendix E.1).
Cost: 2 N |E| C multiply-accumulates.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Attention, Cost, LayerContext
from attention.costs import window_cost
from attention.ops.joint_softmax.op import joint_softmax, seen_exactly
from attention.options import option
from attention.parts.geometry import Grid
from attention.parts.position import BiasKind
from attention.window_options import exact_window, window_options


def local(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **windows: Any) -> Tensor:
    """Softmax attention within windows: q (B, h, N, d), k, v (B, h, P + N, d), bias (h, w, e) -> (B, h, N, d).

    The keywords are those of `joint_softmax`.
    """
    return joint_softmax(q, k, v, bias, **windows)


def local_reference(q, k, v, bias=None, *, attn_drop=0.0, **windows):
    """`local`, query by query."""
    y = torch.zeros_like(q)
    for n in range(q.shape[2]):
        logits, values = seen_exactly(n, q, k, v, bias, **windows)
        y[:, :, n] = (F.dropout(logits.softmax(-1), attn_drop)[:, :, None] @ values)[:, :, 0]
    return y


class Local(Attention):
    """Attention within windows, with a learned relative position bias. Papers: EVA Tables 1-3 'Local'."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        window_size: int = option(7, "window side w in cells; block length in tokens where layout is 1d", low=1)
        layout: Literal["2d", "1d"] = option("2d", "square windows of the grid, or blocks of the raster order")
        overlap: int = option(
            0, "cells e by which a window's keys reach beyond it; the papers' overlap is w // 2", low=0
        )
        position_bias: BiasKind = option("table", "relative position bias inside the window")
        causal: bool = option(False, "no token sees a later one of the raster order; needs layout 1d")
        attn_drop: float = option(0.0, "dropout rate of the attention weights", low=0, high=1)

    def __init__(self, site: LayerContext, config: Config):
        super().__init__(site, config)
        self.window, self.overlap, self.position_bias = exact_window(self, site)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return window_cost(context, config)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return local(q, k, v, self.position_bias(), attn_drop=self.attn_drop, **window_options(self, grid))
