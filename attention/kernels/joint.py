"""One softmax over each query's window and over keys that stand for all other tokens, with gradients by hand.

Windows of keys are copied once, into a buffer whose tail holds the other keys, so that one product makes all logits,
onto what is added to them (position bias, masks as -inf), and one product mixes all values. What autograd would keep of
that (copies, logits, masks) is not kept: the weights are, or with the path "lean" not even these.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Grid, split_prefix
from attention.features import full_type, own_types
from attention.kernels import first_order, path
from attention.kernels.memory import Part, cache_parts, like_tokens, take
from attention.windows import count_windows, window_mask, window_view


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
        return JointSoftmax.apply(q, k, v, keys, values, offset, grid, window, path() == "lean")


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
    def forward(ctx, q, k, v, keys, values, offset, grid, window, lean):
        y, place = like_tokens(q), (grid, window)
        weights = None if lean else q.new_empty(_logits_shape(q, keys, *place))
        for part in _parts(q, keys, *place):
            _attend(*take(part, q, k, v, keys, values, y, weights), _of_heads(offset, part), *place)
        ctx.save_for_backward(q, k, v, keys, values, weights, offset)
        ctx.place = place
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        (*inputs, weights, offset), place, needs = ctx.saved_tensors, ctx.place, ctx.needs_input_grad
        dq, dk, dv = (like_tokens(x) if need else None for x, need in zip(inputs[:3], needs[:3], strict=True))
        dkeys, dvalues = (torch.empty_like(x) if need else None for x, need in zip(inputs[3:], needs[3:5], strict=True))
        doffset = torch.zeros_like(offset) if needs[5] else None
        with own_types(inputs[0]):
            for part in _parts(inputs[0], inputs[3], *place):
                tensors = take(part, dy, *inputs, weights, dq, dk, dv, dkeys, dvalues)
                _attend_backward(*tensors, _of_heads(offset, part), _of_heads(doffset, part), *place)
        return dq, dk, dv, dkeys, dvalues, doffset, None, None, None


def _logits_shape(q: Tensor, keys: Tensor, grid: Grid, window: Grid) -> tuple[int, ...]:
    """(B, h, g, w, w + c)."""
    w = window[0] * window[1]
    return *q.shape[:2], count_windows(grid, window), w, w + keys.shape[3]


def _parts(q: Tensor, keys: Tensor, grid: Grid, window: Grid) -> Iterator[Part]:
    _, _, g, w, e = _logits_shape(q, keys, grid, window)
    return cache_parts(q, g * (w * e + (w + e) * q.shape[3]) * q.element_size())  # logits, queries, keys


def _of_heads(x: Tensor | None, part: Part) -> Tensor | None:
    return x if x is None else x[part[1]]


def _attend(q, k, v, keys, values, y, weights, offset, grid, window):
    """Writes y, and weights unless None."""
    queries, buffer = cut(q, grid, window, q.dtype), _buffer(q, keys, grid, window)
    weights = _weights(queries, _fill(buffer, k, keys, grid, window), q, offset, weights)
    uncut(torch.bmm(weights, _fill(buffer, v, values, grid, window), out=queries), y, grid, window)


def _attend_backward(dy, q, k, v, keys, values, weights, dq, dk, dv, dkeys, dvalues, offset, doffset, grid, window):
    """Writes the gradients that are not None; adds to doffset."""
    place, scale, buffer = (grid, window), q.shape[-1] ** -0.5, _buffer(q, keys, grid, window)
    if weights is None:
        weights = _weights(cut(q, *place, q.dtype), _fill(buffer, k, keys, *place), q, offset)
    else:
        weights = weights.flatten(0, 2)
    dy = cut(dy, *place, q.dtype)
    if dv is not None or dvalues is not None:
        _apart(torch.bmm(weights.mT, dy, out=buffer), dv, dvalues, *place)
    logits = torch.bmm(dy, _fill(buffer, v, values, *place).mT)
    torch.ops.aten._softmax_backward_data.out(logits, weights, -1, weights.dtype, grad_input=logits)  # row by row
    del weights
    if doffset is not None:
        of_images = logits.view(q.shape[0], q.shape[1], -1, *logits.shape[1:])
        doffset += of_images.sum(0, dtype=doffset.dtype).sum_to_size(doffset.shape)
    if dq is not None:
        uncut(torch.baddbmm(dy, logits, _fill(buffer, k, keys, *place), beta=0, alpha=scale, out=dy), dq, *place)
    if dk is not None or dkeys is not None:
        queries = cut(q, *place, q.dtype)
        _apart(torch.baddbmm(buffer, logits.mT, queries, beta=0, alpha=scale, out=buffer), dk, dkeys, *place)


def _weights(queries: Tensor, keys: Tensor, q: Tensor, offset: Tensor | None, weights: Tensor | None = None) -> Tensor:
    """Softmax of all logits of windows of queries (B h g, w, d) on keys (B h g, w + c, d), written to `weights` unless
    None: (B h g, w, w + c).
    """
    logits = queries.new_empty(*queries.shape[:2], keys.shape[1]) if weights is None else weights.flatten(0, 2)
    if offset is not None:
        logits.view(q.shape[0], q.shape[1], -1, *logits.shape[1:]).copy_(offset.to(logits.dtype))
    torch.baddbmm(logits, queries, keys.mT, beta=float(offset is not None), alpha=q.shape[-1] ** -0.5, out=logits)
    return torch.softmax(logits, -1, out=logits)


def cut(x: Tensor, grid: Grid, window: Grid, dtype: torch.dtype) -> Tensor:
    """Tokens (B, h, N, d) -> windows (B h g, w, d) of `dtype`, never a view of them."""
    cells = window_view(x, grid, window)
    windows = torch.empty(cells.shape, dtype=dtype, device=x.device)
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


def _buffer(q: Tensor, keys: Tensor, grid: Grid, window: Grid) -> Tensor:
    """Room for every window's own tokens and the others beside them, (B h g, w + c, d)."""
    B, h, g, _, e = _logits_shape(q, keys, grid, window)
    return q.new_empty(B * h * g, e, q.shape[3])


def _fill(buffer: Tensor, x: Tensor, others: Tensor, grid: Grid, window: Grid) -> Tensor:
    """`buffer` with windows of tokens (B, h, N, d) and the others (B, h, G, c, d)."""
    cells, w, room = window_view(x, grid, window), window[0] * window[1], buffer.unflatten(0, (*x.shape[:2], -1))
    room[:, :, :, :w].unflatten(3, window).unflatten(2, cells.shape[2:4]).copy_(cells)
    room[:, :, :, w:].copy_(others)
    return buffer


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
