"""One softmax over each query's window and over keys that stand for all other tokens, with gradients by hand.

Windows of keys are copied once, into a buffer whose tail holds the other keys, so that one product makes all logits,
onto what is added to them (position bias, masks as -inf), and one product mixes all values. What autograd would keep of
that (copies, logits, masks) is not kept: the weights are, and windows in place of tokens where these take no more
memory; with the path "lean" neither.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.ops.dispatch import first_order, path
from attention.ops.memory import Part, cache_parts, like_tokens, take
from attention.parts.features import full_type, own_types, upcast
from attention.parts.geometry import Grid, count_windows, split_prefix, window_mask, window_view

MAX_KEPT = 1.1
"""Memory that kept windows of queries, keys and values may take, over that of their tokens."""


def covers(q, k, v, bias=None, keys=None, values=None, logits=None, *, window, overlap=(0, 0), attn_drop=0.0, **_):
    """Not: dropped weights, overlapping windows, no window, and logits that differ among images."""
    return attn_drop == 0 and overlap == (0, 0) != window and (keys is not None or values is None)


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
    """`attention.exact.joint_softmax`, of the type of q."""
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    if keys is None:
        keys, values = k_prefix[:, :, None], v_prefix[:, :, None]
    elif k_prefix.shape[2]:
        keys, values = (
            torch.cat([x[:, :, None].expand(-1, -1, others.shape[2], -1, -1).to(others.dtype), others], 3)
            for x, others in ((k_prefix, keys), (v_prefix, values))
        )
    offset = _offset(q, bias, logits, keys.shape[3], grid, window, causal)
    with own_types(q):
        keep = torch.is_grad_enabled() and path() != "lean"
        return JointSoftmax.apply(q, k, v, keys, values, offset, grid, window, keep)


def _offset(
    q: Tensor, bias: Tensor | None, logits: Tensor | None, num_others: int, grid: Grid, window: Grid, causal: bool
) -> Tensor | None:
    """What is added to the logits of window and others, (h, 1 or g, w, e + c); None for nothing."""
    mask, e = window_mask(grid, window, (0, 0), q.device), window[0] * window[1]
    if bias is None and logits is None and mask is None and not causal:
        return None
    exact = q.new_zeros(1, 1, e, e, dtype=full_type(q)) if bias is None else bias[:, None]
    if mask is not None:
        exact = exact.masked_fill(~mask[:, None], -torch.inf)
    if causal:
        exact = exact.masked_fill(torch.ones(e, e, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    others = exact.new_zeros(1, 1, num_others)
    if logits is not None:
        others = F.pad(logits.to(exact.dtype), (num_others - logits.shape[-1], 0))  # zeros: prefix tokens
    h, g = exact.shape[0], max(exact.shape[1], others.shape[0])
    return torch.cat([exact.expand(h, g, e, e), others.expand(h, g, e, -1)], -1).expand(q.shape[1], -1, -1, -1)


class JointSoftmax(torch.autograd.Function):
    """Of queries, keys and values (B, h, N, d), other keys and values (B, h, G, c, d) and an offset of all logits."""

    @staticmethod
    def forward(ctx, q, k, v, keys, values, offset, grid, window, keep):
        y, place, inputs = like_tokens(q), (grid, window), (q, k, v, keys, values)
        *cells, w, e = ctx.shape = _logits_shape(q, keys, *place)
        weights = q.new_empty(ctx.shape) if keep else None
        keep = keep and cells[2] * (w + 2 * e) <= MAX_KEPT * 3 * q.shape[2]
        windows = [q.new_empty(*cells, n, q.shape[3]) if keep else None for n in (w, e, e)]
        for part in _parts(q, ctx.shape):
            _attend(*take(part, *inputs, y, weights, *windows), _of_heads(offset, part), *place)
        ctx.save_for_backward(*(windows if keep else inputs), weights, offset)
        ctx.place, ctx.others = place, [(x.shape, x.dtype) for x in (keys, values)]
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        (*saved, weights, offset), place, needs = ctx.saved_tensors, ctx.place, ctx.needs_input_grad
        dq, dk, dv = (like_tokens(dy) if need else None for need in needs[:3])
        dkeys, dvalues = (
            dy.new_empty(shape, dtype=dtype) if need else None
            for need, (shape, dtype) in zip(needs[3:5], ctx.others, strict=True)
        )
        doffset = torch.zeros_like(offset) if needs[5] else None
        with own_types(dy):
            for part in _parts(dy, ctx.shape):
                tensors = take(part, dy, weights, dq, dk, dv, dkeys, dvalues)
                room = _room(tensors[0], ctx.shape[4], *place)
                windows = _windows(take(part, *saved), room, *place)
                _attend_backward(windows, room, *tensors, _of_heads(offset, part), _of_heads(doffset, part), *place)
        return dq, dk, dv, dkeys, dvalues, doffset, None, None, None


def _logits_shape(q: Tensor, keys: Tensor, grid: Grid, window: Grid) -> tuple[int, ...]:
    """(B, h, g, w, w + c)."""
    w = window[0] * window[1]
    return *q.shape[:2], count_windows(grid, window), w, w + keys.shape[3]


def _parts(q: Tensor, shape: tuple[int, ...]) -> Iterator[Part]:
    """Parts of the batch for logits of `shape`."""
    g, w, e = shape[2:]
    return cache_parts(q, g * (w * e + (w + e) * q.shape[3]) * q.element_size())  # logits, queries, keys


def _of_heads(x: Tensor | None, part: Part) -> Tensor | None:
    return x if x is None else x[part[1]]


def _room(x: Tensor, e: int, grid: Grid, window: Grid) -> Tensor:
    """Empty (B, h, g, e, d) for windows of tokens like x, (B, h, N, d), and others beside them."""
    return x.new_empty(*x.shape[:2], count_windows(grid, window), e, x.shape[3])


def _attend(q, k, v, keys, values, y, weights, windows_q, windows_k, windows_v, offset, grid, window):
    """Writes y and, unless None, weights and windows of queries, keys and values."""
    place, kept = (grid, window), windows_q is not None
    queries = cut(q, *place, q.dtype, windows_q)
    room = windows_k if kept else _room(q, window[0] * window[1] + keys.shape[3], *place)
    weights = _weights(queries, _fill(room, k, keys, *place), q, offset, weights)
    values = _fill(windows_v if kept else room, v, values, *place)
    uncut(torch.bmm(weights, values, out=torch.empty_like(queries) if kept else queries), y, *place)


def _windows(saved: Sequence[Tensor], room: Tensor, grid: Grid, window: Grid) -> Sequence[Callable[[], Tensor]]:
    """Functions that give queries, keys and values in windows: those that were kept, or cut now, keys and values into
    `room`.
    """
    if len(saved) == 3:
        return [functools.partial(kept.flatten, 0, 2) for kept in saved]
    q, k, v, keys, values = saved
    return (
        lambda: cut(q, grid, window, q.dtype),
        lambda: _fill(room, k, keys, grid, window),
        lambda: _fill(room, v, values, grid, window),
    )


def _attend_backward(windows, room, dy, weights, dq, dk, dv, dkeys, dvalues, offset, doffset, grid, window):
    """Writes the gradients that are not None; adds to doffset."""
    (queries, keys, values), place, scale = windows, (grid, window), dy.shape[-1] ** -0.5
    weights = _weights(queries(), keys(), dy, offset) if weights is None else weights.flatten(0, 2)
    of_windows, room = cut(dy, *place, dy.dtype), room.flatten(0, 2)
    if dv is not None or dvalues is not None:
        _apart(torch.bmm(weights.mT, of_windows, out=room), dv, dvalues, *place)
    logits = torch.bmm(of_windows, values().mT)
    torch.ops.aten._softmax_backward_data.out(logits, weights, -1, weights.dtype, grad_input=logits)  # row by row
    del weights
    if doffset is not None:
        of_images = logits.view(*dy.shape[:2], -1, *logits.shape[1:])
        doffset += of_images.sum(0, dtype=doffset.dtype).sum_to_size(doffset.shape)
    if dq is not None:
        uncut(torch.baddbmm(of_windows, logits, keys(), beta=0, alpha=scale, out=of_windows), dq, *place)
    if dk is not None or dkeys is not None:
        _apart(torch.baddbmm(room, logits.mT, queries(), beta=0, alpha=scale, out=room), dk, dkeys, *place)


def _weights(queries: Tensor, keys: Tensor, q: Tensor, offset: Tensor | None, weights: Tensor | None = None) -> Tensor:
    """Softmax of all logits of windows of queries (B h g, w, d) on keys (B h g, w + c, d), written to `weights` unless
    None: (B h g, w, w + c).
    """
    scale = q.shape[-1] ** -0.5
    logits = queries.new_empty(*queries.shape[:2], keys.shape[1])
    weights = logits if weights is None else weights.flatten(0, 2)  # a softmax in place takes longer
    of_images = logits.view(*q.shape[:2], -1, *logits.shape[1:])
    if logits.element_size() == 2 and logits.device.type == "cpu" and logits.shape[-1] % 32 > 8:
        # A CPU's softmax of half types takes what a row has beyond 32s one by one.
        torch.bmm(queries, keys.mT, out=logits)
        full = upcast(of_images).mul_(scale) if offset is None else torch.add(upcast(offset), of_images, alpha=scale)
        return weights.copy_(full.softmax(-1).flatten(0, 2))
    if offset is not None:
        of_images.copy_(offset.to(logits.dtype))
    torch.baddbmm(logits, queries, keys.mT, beta=float(offset is not None), alpha=scale, out=logits)
    return torch.softmax(logits, -1, out=weights)


def cut(x: Tensor, grid: Grid, window: Grid, dtype: torch.dtype, room: Tensor | None = None) -> Tensor:
    """Tokens (B, h, N, d) -> windows (B h g, w, d) of `dtype`, never a view of them; in `room` if it is given."""
    cells = window_view(x, grid, window)
    windows = torch.empty(cells.shape, dtype=dtype, device=x.device) if room is None else room.view(cells.shape)
    return windows.copy_(cells).view(-1, window[0] * window[1], x.shape[-1])


def uncut(windows: Tensor, x: Tensor, grid: Grid, window: Grid) -> Tensor:
    """Tokens x (B, h, N, d) with windows (B h g, w, d) written to them: the inverse of `cut`."""
    (B, h), (H, W), rows, columns = x.shape[:2], grid, -(-grid[0] // window[0]), -(-grid[1] // window[1])
    cells = windows.unflatten(1, window).unflatten(0, (B, h, rows, columns)).transpose(3, 4)
    if H % window[0] or W % window[1]:
        x.unflatten(2, grid).copy_(cells.flatten(4, 5).flatten(2, 3)[:, :, :H, :W])
    else:
        x.unflatten(2, (rows, window[0], columns, window[1])).copy_(cells)
    return x


def _fill(room: Tensor, x: Tensor, others: Tensor, grid: Grid, window: Grid) -> Tensor:
    """Windows of tokens (B, h, N, d) and the others (B, h, G, c, d) in `room` (B, h, g, w + c, d).

    Returns:
        A view of `room`, (B h g, w + c, d).
    """
    cells, w = window_view(x, grid, window), window[0] * window[1]
    room[:, :, :, :w].unflatten(3, window).unflatten(2, cells.shape[2:4]).copy_(cells)
    room[:, :, :, w:].copy_(others)
    return room.flatten(0, 2)


def _apart(buffer: Tensor, x: Tensor | None, others: Tensor | None, grid: Grid, window: Grid) -> None:
    """The adjoint of `_fill`: writes gradients of x and of the others, unless None."""
    w = window[0] * window[1]
    if x is not None:
        uncut(buffer[:, :w], x, grid, window)
    if others is not None:
        tail = buffer[:, w:].unflatten(0, (*others.shape[:2], -1))
        if others.shape[2] == 1:
            tail = tail.sum(2, keepdim=True, dtype=others.dtype)
        others.copy_(tail)
