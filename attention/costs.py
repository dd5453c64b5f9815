"""What parts that mechanisms share cost: terms of their `Attention.cost`."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from attention.base import Attention, Cost, LayerContext
from attention.parts.chunks import chunk_size, num_chunked
from attention.parts.geometry import Windows
from attention.parts.position import BiasKind, PositionBias
from attention.window_options import windows_on


def projections(context: LayerContext, count: int) -> Cost:
    """`count` C x C projections of every token, as those of `qkv`."""
    C = context.dim
    return Cost(count * C * (C + context.qkv_bias), count * context.num_tokens * C * C)


def total(*costs: Cost) -> Cost:
    """Their sum."""
    return Cost(sum(cost.parameters for cost in costs), sum(cost.macs for cost in costs))


def local_cost(mechanism: type[Attention], context: LayerContext, config: Any) -> Cost:
    """The convolution of values that `Attention` adds where the option `local` is true."""
    if not config.local:
        return Cost(0, 0)
    width, taps = context.head_dim if mechanism.local_by_head else context.dim, mechanism.local_size**2
    return Cost(width * (taps + 1), taps * context.num_tokens * context.dim)


def linear_attention_macs(
    context: LayerContext, num_features: int, causal: bool = False, normalised: bool = True
) -> int:
    """Of f features per head: sums over keys and their mean for every query, N f C each; normalisers, N f h.

    causal: the same of tokens padded to chunks of c, and N c (f h + C) within chunks; normalisers are one channel more.
    """
    N, h, f = context.num_tokens, context.num_heads, num_features
    if not causal:
        return N * f * (2 * context.dim + h * normalised)
    width = context.dim + h * normalised
    return num_chunked(N) * (2 * f * width + chunk_size(N) * (f * h + width))


def mix_features_macs(context: LayerContext, num_features: int, causal: bool = False) -> int:
    """Of f features kept as logarithms, per head: as `linear_attention_macs`, without normalisers.

    causal: within a chunk the products of queries with keys up to their own alone, half of all.
    """
    N, C, f = context.num_tokens, context.dim, num_features
    if not causal:
        return 2 * N * f * C
    return num_chunked(N) * 2 * f * C + num_chunked(N) * (chunk_size(N) + 1) * (f * context.num_heads + C) // 2


def num_padded(windows: Windows) -> int:
    """Queries of all windows with their padding, g w; N where windows attend to no token of the grid."""
    return math.prod(windows.grid) if windows.size == (0, 0) else windows.count * windows.num_queries


def window_macs(windows: Windows, dim: int) -> int:
    """Logits and values of w queries on e keys in each of g windows, 2 g w e C."""
    return 2 * num_padded(windows) * windows.num_keys * dim


def window_cost(context: LayerContext, config: Any) -> Cost:
    """Attention within the windows of a mechanism's options, with its position bias."""
    windows = windows_on(config, context.grid)
    kind: BiasKind = config.position_bias if config.window_size else "none"
    with torch.device("meta"):
        table = PositionBias(kind, context.num_heads, context.head_dim, windows).table
    return Cost(0 if table is None else table.numel(), window_macs(windows, context.dim))


def landmark_cost(context: LayerContext, width: int, count: int, num_groups: int, norm: bool = True) -> Cost:
    """`count` maps of the means of groups to landmarks: Linear of this width, LayerNorm with `norm`."""
    return Cost(count * (width**2 + width + 2 * width * norm), count * num_groups * context.dim * width)


def group_cost(context: LayerContext, config: Any, groups: Sequence[int], queries: int) -> Cost:
    """Landmarks, logits and values of groups for this many queries, by the options of `eva`.

    groups: G sets of c groups of t tokens, whose features are products of matrices; t = 0 where they are not.
    """
    (G, c, t), C, s, kind = groups, context.dim, config.num_samples, config.landmark_transform
    transforms = 0 if kind == "identity" else 1 + (config.mu in ("qk", "q"))
    landmarks = landmark_cost(context, context.head_dim, transforms, G * c, norm=kind == "ln_linear")
    trained = c * C if config.mu == "trainable" else 0
    macs = (1 + s) * queries * c * C + 2 * G * c * t * s * C  # logits on groups, values; beta
    macs += (queries + G) * c * s * C if s > 1 else 0  # samples at queries and at their means
    return Cost(landmarks.parameters + trained, landmarks.macs + macs)
