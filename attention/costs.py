"""Costs of the parts that mechanisms share: the terms of their `Attention.cost`."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from .base import Cost, LayerContext
from .parts.chunks import chunk_size, num_chunked
from .parts.geometry import Grid, Windows
from .parts.position import BiasKind, PositionBias
from .window_options import windows_on


def linear_attention_macs(
    context: LayerContext, num_features: int, causal: bool = False, normalised: bool = True
) -> int:
    """MACs of linear attention with f features per head: N f C for the sums over keys, N f C for the weighted means of
    the queries, N f h for the normalisers.

    causal: N is padded to chunks of c tokens, products within chunks add N c (f h + C), and the normaliser is one more
    channel of the values.
    """
    N, h, f = context.num_tokens, context.num_heads, num_features
    if not causal:
        return N * f * (2 * context.dim + h * normalised)
    width = context.dim + h * normalised
    return num_chunked(N) * (2 * f * width + chunk_size(N) * (f * h + width))


def fourier_macs(grid: Grid, count: int) -> int:
    """MACs of `count` Fourier transforms of N real numbers over the rows and columns of a grid, 5/4 N log2 N each.

    A fast transform of N complex numbers takes 5 N log2 N real operations (Cooley and Tukey 1965; the convention of
    FFTW, Frigo and Johnson 2005), one of real numbers half of them, and two operations are one multiply-accumulate.
    """
    N = math.prod(grid)
    return round(5 * N * count * math.log2(N) / 4)


def mix_features_macs(context: LayerContext, num_features: int, causal: bool = False) -> int:
    """MACs of attention with f features per head kept as logarithms: `linear_attention_macs` without normalisers.

    causal: within a chunk, only the products of queries with keys up to their own are computed, about half of all.
    """
    N, C, f = context.num_tokens, context.dim, num_features
    if not causal:
        return 2 * N * f * C
    return num_chunked(N) * 2 * f * C + num_chunked(N) * (chunk_size(N) + 1) * (f * context.num_heads + C) // 2


def num_padded(windows: Windows) -> int:
    """Number of queries of all windows, padding included, g w; N if windows attend to no token of the grid."""
    return math.prod(windows.grid) if windows.is_empty else windows.num_windows * windows.num_queries


def window_macs(windows: Windows, dim: int) -> int:
    """MACs of the logits and values of w queries on e keys in each of g windows, 2 g w e C."""
    return 2 * num_padded(windows) * windows.num_keys * dim


def window_cost(context: LayerContext, config: Any) -> Cost:
    """Cost of attention within the windows of a mechanism's options, position bias included."""
    windows = windows_on(config, context.grid)
    kind: BiasKind = config.position_bias if config.window_size else "none"
    with torch.device("meta"):
        table = PositionBias(kind, context.num_heads, context.head_dim, windows).table
    return Cost(0 if table is None else table.numel(), window_macs(windows, context.dim))


def landmark_cost(context: LayerContext, width: int, count: int, num_groups: int, norm: bool = True) -> Cost:
    """Cost of `count` maps from group means to landmarks: a Linear of this width and, with `norm`, a LayerNorm."""
    return Cost(count * (width**2 + width + 2 * width * norm), count * num_groups * context.dim * width)


def group_cost(context: LayerContext, config: Any, groups: Sequence[int], queries: int) -> Cost:
    """Cost of the landmarks, logits and values of groups for this many queries, by the options of `eva`.

    groups: G sets of c groups of t tokens; t = 0 if the features of the members are not matrix products.
    """
    (G, c, t), C, s, kind = groups, context.dim, config.num_samples, config.landmark_transform
    transforms = 0 if kind == "identity" else 1 + (config.mu in ("qk", "q"))
    landmarks = landmark_cost(context, context.head_dim, transforms, G * c, norm=kind == "ln_linear")
    trained = c * C if config.mu == "trainable" else 0
    macs = (1 + s) * queries * c * C + 2 * G * c * t * s * C  # logits on groups and values; beta
    macs += (queries + G) * c * s * C if s > 1 else 0  # samples at queries and at the proposals' means
    return Cost(landmarks.parameters + trained, landmarks.macs + macs)
