"""The exact part of attention: each query's own window, under one softmax with whatever stands for the other tokens.

Prefix tokens belong to every query's exact set: keys and values may begin with those of P prefix tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.ops.dispatch import with_fast_path
from attention.ops.joint_softmax import eager as joint
from attention.parts.features import upcast
from attention.parts.geometry import Grid, from_windows, split_prefix, to_windows, window_mask


def exact_logits(
    q: Tensor, k: Tensor, bias: Tensor | None, grid: Grid, window: Grid, overlap: Grid, causal: bool = False
) -> Tensor:
    """Logits q . k / sqrt(d) + bias of each window on its exact set: (B, h, g, w, e), fp32, -inf where nothing is seen.

    Queries and keys are those of the grid, (B, h, N, d). `causal`: no later token is seen; windows are blocks then.
    """
    logits = to_windows(q * q.shape[-1] ** -0.5, grid, window) @ to_windows(k, grid, window, overlap).mT
    logits = upcast(logits) if bias is None else upcast(logits) + bias[:, None]
    mask = window_mask(grid, window, overlap, q.device)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(overlap[1] + 1)
        logits = logits.masked_fill(later, -torch.inf)
    return logits


def shared_logits(queries: Tensor, keys: Tensor) -> Tensor:
    """Logits of windows of queries (B, h, g, w, d) on keys that all see, (B, h, c, d): (B, h, g, w, c), fp32."""
    return other_logits(queries, keys[:, :, None])


def other_logits(queries: Tensor, keys: Tensor) -> Tensor:
    """Logits of windows of queries (B, h, g, w, d) on keys (B, h, G, c, d), G = 1 or g: (B, h, g, w, c), fp32."""
    of_set = (queries * keys.shape[-1] ** -0.5).reshape(*queries.shape[:2], keys.shape[2], -1, keys.shape[-1])
    return upcast(of_set @ keys.mT).reshape(*queries.shape[:4], -1)


@with_fast_path(joint.joint_softmax, joint.covers)
def joint_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    grid: Grid,
    window: Grid,
    overlap: Grid = (0, 0),
    causal: bool = False,
    attn_drop: float = 0.0,
) -> Tensor:
    """Values under one softmax over each query's exact set and what stands for the tokens outside it.

    Args:
        q: (B, h, N, d). k, v: (B, h, P + N, d). bias: position bias of the exact set, (h, w, e).
        keys, values: of the others, (B, h, G, c, d), G = 1 or g windows.
        logits: with keys, what is added to the logits q . key / sqrt(d), broadcast to (g, w, c); without, the logits
            themselves, (B, h, g, w, c).
        window: its rows and columns; (0, 0) for one window of all queries that sees no token of the grid.
        overlap: cells by which a window's keys reach beyond it. causal: no query sees a later token of the grid.
        attn_drop: dropout rate of the weights.
    Returns:
        (B, h, N, d).
    """
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    queries = to_windows(q, grid, window)
    parts = prefix_part(queries, k_prefix, v_prefix)
    if window != (0, 0):
        exact = exact_logits(q, k, bias, grid, window, overlap, causal)
        parts.append((exact, to_windows(v, grid, window, overlap)))
    if values is not None:
        on_keys = 0 if keys is None else other_logits(queries, keys)
        parts.append((on_keys if logits is None else on_keys + logits, values.to(v.dtype)))
    return from_windows(mix(parts, attn_drop), grid, window)


def prefix_part(queries: Tensor, k_prefix: Tensor, v_prefix: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What `mix` takes for prefix tokens, keys and values (B, h, P, d); nothing where there are none."""
    return [(shared_logits(queries, k_prefix), v_prefix[:, :, None])] if k_prefix.shape[2] else []


def mix(parts: list[tuple[Tensor, Tensor]], attn_drop: float = 0.0) -> Tensor:
    """Values of all parts under one softmax.

    Args:
        parts: logits (B, h, g, w, c) of w queries in each of g windows, and values (B, h, G, c, d), G = 1 or g windows.
        attn_drop: dropout rate of the weights.
    Returns:
        (B, h, g, w, d), of the type of the values.
    """
    parts = [part for part in parts if part[0].shape[-1]]
    logits = [logits for logits, _ in parts]
    weights = F.dropout(torch.cat(logits, -1).softmax(-1), attn_drop).to(parts[0][1].dtype)
    y = 0
    for weight, (_, values) in zip(weights.split([part.shape[-1] for part in logits], -1), parts, strict=True):
        of_set = weight.reshape(*weight.shape[:2], values.shape[2], -1, weight.shape[-1])  # (B, h, G, n, c)
        y = y + (of_set @ values).reshape(*weight.shape[:4], -1)
    return y


def seen_exactly(n, q, k, v, bias=None, *, grid, window, overlap=(0, 0), causal=False):
    """Logits (B, h, e) of query n on prefix tokens and its exact set, and their values (B, h, e, d): for the twins."""
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    cells, places, row = exact_set(n, grid, window, overlap, causal)
    q_n = q[:, :, n, None] / q.shape[-1] ** 0.5
    on_prefix, exact = ((q_n @ keys.mT)[:, :, 0] for keys in (k_prefix, k[:, :, cells]))
    if bias is not None:
        exact = exact + bias[:, row, places]
    return torch.cat([on_prefix, exact], -1), torch.cat([v_prefix, v[:, :, cells]], 2)


def exact_set(
    n: int, grid: Grid, window: Grid, overlap: Grid, causal: bool = False
) -> tuple[list[int], list[int], int]:
    """Token n's exact set: raster indices of its keys, their places in the (extended) window, and n's place in the
    window.
    """
    if window == (0, 0):
        return [], [], 0
    (y, x), (rows, columns) = divmod(n, grid[1]), window
    top, left = y - y % rows - overlap[0], x - x % columns - overlap[1]
    height, width = rows + 2 * overlap[0], columns + 2 * overlap[1]
    cells = [(top + i, left + j, i * width + j) for i in range(height) for j in range(width)]
    inside = [(a * grid[1] + b, place) for a, b, place in cells if 0 <= a < grid[0] and 0 <= b < grid[1]]
    inside = [(m, place) for m, place in inside if m <= n or not causal]
    return [m for m, _ in inside], [place for _, place in inside], y % rows * columns + x % columns
