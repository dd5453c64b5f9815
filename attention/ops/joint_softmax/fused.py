"""One softmax over each query's window and over summary tokens, with gradients by hand.

Windows of keys are copied once, into a buffer whose tail holds the keys of the summary tokens. One product computes all
logits on top of the position bias and the masks (-inf), and one product mixes all values. The backward pass keeps the
weights, and windows instead of tokens where they take at most a tenth more memory. It keeps none of the copies, logits
and masks that autograd would keep.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parts.features import autocast_off, compute_dtype, product, upcast
from ...parts.geometry import Windows, split_prefix
from .. import memory
from ..kernels import first_order
from ..memory import Chunk, cache_chunks, like_tokens, partition, reverse, take

MAX_KEPT = 1.1
"""Largest ratio of the memory of kept windows of queries, keys and values to the memory of their tokens."""


class Tokens(NamedTuple):
    """Queries, keys and values (B, h, N, d), keys and values of summary tokens (B, h, G, c, d); or their gradients,
    None where none is needed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor


def covers(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows, attn_drop=0.0):
    """True unless weights are dropped, windows overlap, are empty or of clips, or masks or logits with gradients differ
    among images.
    """
    shared = (keys is not None or values is None) and windows.key_mask is None
    constant = logits is None or logits.dim() < 5 or not logits.requires_grad
    plain = len(windows.grid) == 2 and not windows.is_empty and not any(windows.overlap)
    return attn_drop == 0 and plain and shared and constant


def joint_softmax(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows, attn_drop=0.0):
    """`op.joint_softmax`, with the result in the type of q."""
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    if keys is None or values is None:
        keys, values = k_prefix[:, :, None], v_prefix[:, :, None]
    elif k_prefix.shape[2]:
        keys, values = (
            torch.cat([x[:, :, None].expand(-1, -1, summaries.shape[2], -1, -1).to(summaries.dtype), summaries], 3)
            for x, summaries in ((k_prefix, keys), (v_prefix, values))
        )
    if logits is not None and logits.dim() == 5:
        bias = q.new_zeros(1, windows.num_queries, windows.num_keys) if bias is None else bias
        offset, num_prefix = _offset(q, bias, None, 0, windows), keys.shape[3] - logits.shape[-1]
        of_images = F.pad(logits, (num_prefix, 0)) if num_prefix else logits
    else:
        offset, of_images = _offset(q, bias, logits, keys.shape[3], windows), None
    with autocast_off(q):
        return JointSoftmax.apply(q, k, v, keys, values, offset, of_images, windows, torch.is_grad_enabled())


def _offset(
    q: Tensor, bias: Tensor | None, logits: Tensor | None, num_summaries: int, windows: Windows
) -> Tensor | None:
    """Sum of the terms added to the logits on windows and summary tokens, (h, 1 or g, w, e + c); None for no terms."""
    mask, e = windows.mask(q.device), windows.num_keys
    if bias is None and logits is None and mask is None and not windows.causal:
        return None
    on_window = q.new_zeros(1, 1, e, e, dtype=compute_dtype(q)) if bias is None else bias[:, None]
    if mask is not None:
        on_window = on_window.masked_fill(~mask[:, None], -torch.inf)
    if windows.causal:
        on_window = on_window.masked_fill(windows.later(q.device), -torch.inf)
    if logits is None:
        return (F.pad(on_window, (0, num_summaries)) if num_summaries else on_window).expand(q.shape[1], -1, -1, -1)
    on_summaries = F.pad(logits.to(on_window.dtype), (num_summaries - logits.shape[-1], 0))  # zeros for prefix tokens
    h, g = on_window.shape[0], max(on_window.shape[1], on_summaries.shape[0])
    offset = torch.cat([on_window.expand(h, g, e, e), on_summaries.expand(h, g, e, -1)], -1)
    return offset.expand(q.shape[1], -1, -1, -1)


class JointSoftmax(torch.autograd.Function):
    """Joint softmax of the tensors of `Tokens`, with terms added to the logits.

    `offset` is the same for all images. It covers the logits on windows and summary tokens, or those on windows alone
    if there is `of_images`. `of_images` (B, h, 1 or g, w, c) differs between images and has no gradient.
    """

    @staticmethod
    def forward(ctx, q, k, v, keys, values, offset, of_images, windows, keep):
        y, tokens = like_tokens(q), Tokens(q, k, v, keys, values)
        w, e = windows.num_queries, _row_length(q, keys, windows)
        ctx.shape, ctx.spare = (*q.shape[:2], windows.num_windows, w, e), e - windows.num_keys - keys.shape[3]
        if ctx.spare and of_images is not None:
            of_images = F.pad(of_images, (0, ctx.spare), value=-torch.inf)
        elif ctx.spare:
            offset = q.new_zeros(q.shape[1], 1, w, e - ctx.spare) if offset is None else offset
            offset = F.pad(offset, (0, ctx.spare), value=-torch.inf)
        weights = q.new_empty(ctx.shape) if keep else None
        keep = keep and windows.num_windows * (w + 2 * e) <= MAX_KEPT * 3 * q.shape[2]
        kept = [q.new_empty(*ctx.shape[:3], n, q.shape[3]) if keep else None for n in (w, e, e)]
        for chunk in _chunks(q, ctx.shape):
            outputs = take(chunk, y, weights, *kept)
            _attend(Tokens(*take(chunk, *tokens)), outputs, _of_chunk(offset, of_images, chunk), windows, e)
        ctx.save_for_backward(*(kept if keep else tokens), weights, offset)
        ctx.windows, ctx.summaries = windows, [(x.shape, x.dtype) for x in (keys, values)]
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        (*saved, weights, offset), needs = ctx.saved_tensors, ctx.needs_input_grad
        of_tokens = dy.new_empty(3, dy.shape[0], *dy.shape[2:0:-1], dy.shape[3]).transpose(2, 3)  # see `like_tokens`
        gradients = Tokens(
            *(x if need else None for x, need in zip(of_tokens, needs[:3], strict=True)),
            *(
                dy.new_empty(shape, dtype=dtype) if need else None
                for need, (shape, dtype) in zip(needs[3:5], ctx.summaries, strict=True)
            ),
        )
        of_heads = {}  # first head of a chunk -> its share of the offset's gradient
        with autocast_off(dy):
            for chunk in _chunks(dy, ctx.shape):
                buffer = _buffer(dy[chunk], ctx.shape[4], ctx.windows)
                partitioned = _partitioned(take(chunk, *saved), buffer, ctx.windows)
                given = dy[chunk], weights[chunk], take(chunk, *gradients)
                dlogits = _attend_backward(partitioned, buffer, *given, ctx.windows)
                if needs[5]:
                    over = (0, 2) if offset.shape[1] == 1 else 0
                    total = dlogits[..., : offset.shape[-1]].sum(over, dtype=offset.dtype)
                    total = total.view_as(_of_heads(offset, chunk))
                    first = chunk[1].start
                    of_heads[first] = of_heads[first].add_(total) if first in of_heads else total
                del dlogits
        doffset = None
        if needs[5]:
            first, *others = [*of_heads.values()] or [torch.zeros_like(offset)]
            doffset = torch.cat([first, *others]) if others else first
            doffset = doffset[..., : ctx.shape[4] - ctx.spare]
        return *gradients, doffset, None, None, None


def _chunks(q: Tensor, shape: tuple[int, ...]) -> Iterator[Chunk]:
    """Splits the batch into chunks for logits of `shape`."""
    g, w, e = shape[2:]
    return cache_chunks(q, g * (w * e + (w + e) * q.shape[3]) * q.element_size())  # logits, queries, keys


def _row_length(q: Tensor, keys: Tensor, windows: Windows) -> int:
    """Number e of logits of a query: on its window and on summary tokens (B, h, G, c, d).

    On GPUs, half-precision rows are padded with -inf to 16 bytes. A GPU multiplies matrices with other rows at half the
    rate (docs/speed.md).
    """
    e = windows.num_keys + keys.shape[3]
    by_words = q.element_size() == 2 and not (memory.on_cpu(q) or torch.compiler.is_compiling())
    spare = -e % 8 if by_words else 0
    return e + spare if 3 * spare <= e else e


def _of_heads(x: Tensor | None, chunk: Chunk) -> Tensor | None:
    return x if x is None else x[chunk[1]]


def _of_chunk(offset: Tensor | None, of_images: Tensor | None, chunk: Chunk) -> Tensor | None:
    """Offset of a chunk's logits, (h, 1 or g, w, e + c), or with `of_images` (B, h, 1 or g, w, e + c)."""
    offset = _of_heads(offset, chunk)
    if offset is None or of_images is None:
        return offset
    shape = len(of_images[chunk]), *offset.shape[:3], -1
    return torch.cat([offset.expand(shape), of_images[chunk].expand(shape)], -1)


def _buffer(x: Tensor, e: int, windows: Windows) -> Tensor:
    """Empty tensor (B, h, g, e, d) for windows of tokens like x (B, h, N, d), followed by summary tokens."""
    return x.new_empty(*x.shape[:2], windows.num_windows, e, x.shape[3])


def _attend(tokens: Tokens, outputs: Sequence[Any], offset: Tensor | None, windows: Windows, e: int) -> None:
    """Writes y and, unless they are None, weights and windows of queries, keys and values, in rows of e."""
    q, (y, weights, kept_q, kept_k, kept_v) = tokens.q, outputs
    queries = partition(q, windows, q.dtype, kept_q)
    buffer = _buffer(q, e, windows) if kept_k is None else kept_k
    weights = _weights(queries, _fill(buffer, tokens.k, tokens.keys, windows), q, offset, weights)
    values = _fill(buffer if kept_v is None else kept_v, tokens.v, tokens.values, windows)
    reverse(torch.bmm(weights, values, out=queries if kept_q is None else torch.empty_like(queries)), y, windows)


def _partitioned(saved: Sequence[Tensor], buffer: Tensor, windows: Windows) -> Sequence[Callable[[], Tensor]]:
    """Functions that return queries, keys and values in windows: kept windows, or tokens partitioned at the call, keys
    and values into `buffer`.
    """
    if len(saved) == 3:
        return [functools.partial(kept.flatten, 0, 2) for kept in saved]
    q, k, v, keys, values = saved
    return (
        lambda: partition(q, windows, q.dtype),
        lambda: _fill(buffer, k, keys, windows),
        lambda: _fill(buffer, v, values, windows),
    )


def _attend_backward(partitioned, buffer, dy, weights, gradients, windows):
    """Writes the gradients that are not None; returns the gradients of the logits, (B, h, g, w, e + c)."""
    dq, dk, dv, dkeys, dvalues = gradients
    (queries, keys, values), scale = partitioned, dy.shape[-1] ** -0.5
    weights = weights.flatten(0, 2)
    of_windows, buffer = partition(dy, windows, dy.dtype), buffer.flatten(0, 2)
    if dv is not None or dvalues is not None:
        _split(torch.bmm(weights.mT, of_windows, out=buffer), dv, dvalues, windows)
    logits = torch.bmm(of_windows, values().mT)
    torch.ops.aten._softmax_backward_data.out(logits, weights, -1, weights.dtype, grad_input=logits)  # row by row
    del weights
    if dq is not None:
        reverse(torch.baddbmm(of_windows, logits, keys(), beta=0, alpha=scale, out=of_windows), dq, windows)
    if dk is not None or dkeys is not None:
        _split(torch.baddbmm(buffer, logits.mT, queries(), beta=0, alpha=scale, out=buffer), dk, dkeys, windows)
    return logits.unflatten(0, (*dy.shape[:2], windows.num_windows))


def _weights(queries: Tensor, keys: Tensor, q: Tensor, offset: Tensor | None, weights: Tensor | None) -> Tensor:
    """Softmax of all logits of windows of queries (B h g, w, d) on keys (B h g, w + c, d), written to `weights` unless
    None: (B h g, w, w + c).
    """
    scale = q.shape[-1] ** -0.5
    images, heads, g = *q.shape[:2], len(queries) // max(len(q) * q.shape[1], 1)
    by_rows = q.element_size() == 2 and memory.on_cpu(q) and keys.shape[1] % 32 > 8
    if by_rows or q.dtype == torch.float16:  # softmax of half types on a CPU takes the rest of a row by 32 one by one
        logits = product(queries, keys.mT).unflatten(0, (images, heads, g))
        full = logits.mul_(scale) if offset is None else torch.add(upcast(offset), logits, alpha=scale)
        weights = torch.empty_like(full, dtype=q.dtype) if weights is None else weights
        return weights.copy_(full.softmax(-1)).flatten(0, 2)
    if offset is None:
        logits = torch.baddbmm(queries.new_empty(()), queries, keys.mT, beta=0, alpha=scale)
    else:
        logits = offset.to(q.dtype).expand(images, heads, g, -1, -1).clone(memory_format=torch.contiguous_format)
        logits = logits.flatten(0, 2)
        torch.baddbmm(logits, queries, keys.mT, alpha=scale, out=logits)  # FlopCounterMode does not count baddbmm_
    weights = logits if weights is None else weights.flatten(0, 2)  # a softmax in place is slower
    return torch.softmax(logits, -1, out=weights)


def _fill(buffer: Tensor, x: Tensor, summaries: Tensor, windows: Windows) -> Tensor:
    """Writes windows of tokens (B, h, N, d), the summary tokens (B, h, G, c, d) and zeros to `buffer` (B, h, g, e, d).

    Returns:
        A view of `buffer`, (B h g, e, d).
    """
    tokens, w, c = windows.view(x), windows.num_queries, summaries.shape[3]
    memory.copy(buffer[:, :, :, :w].unflatten(3, windows.size).unflatten(2, tokens.shape[2:4]), tokens)
    if c:
        memory.copy(buffer[:, :, :, w : w + c], summaries)
    if buffer.shape[3] > w + c:
        buffer[:, :, :, w + c :].zero_()
    return buffer.flatten(0, 2)


def _split(buffer: Tensor, x: Tensor | None, summaries: Tensor | None, windows: Windows) -> None:
    """The adjoint of `_fill`: writes the gradients of x and of the summary tokens, unless they are None."""
    w = windows.num_queries
    if x is not None:
        reverse(buffer[:, :w], x, windows)
    if summaries is not None:
        tail = buffer[:, w : w + summaries.shape[3]].unflatten(0, (*summaries.shape[:2], windows.num_windows))
        if summaries.shape[2] == 1:
            torch.sum(tail, 2, keepdim=True, dtype=summaries.dtype, out=summaries)
        else:
            summaries.copy_(tail)
