"""Attention under one softmax over a window and the summary tokens that represent the tokens outside it.

Prefix tokens belong to every window: keys and values may begin with the keys and values of P prefix tokens.
"""

import functools
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parts.features import product
from ...parts.geometry import Windows, split_prefix
from ..kernels import with_fast_path
from ..packed import op as packed
from . import fused


@with_fast_path(fused.joint_softmax, fused.covers, triton=packed.TRITON)
def joint_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    windows: Windows,
    attn_drop: float = 0.0,
) -> Tensor:
    """Values under one softmax over each query's window and the summary tokens of the tokens outside it.

    Args:
        keys, values: keys and values of the summary tokens, (B, h, G, c, d), G = 1 or g windows.
        logits: with keys, a term added to the logits q . key / sqrt(d), broadcast to (g, w, c), or with masked tokens
            to (B, h, g, w, c); without keys, the logits themselves, (B, h, g, w, c).
    """
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    queries = windows.partition(q)
    terms = prefix_term(queries, k_prefix, v_prefix)
    if not windows.is_empty:
        terms.append((window_logits(q, k, bias, windows), windows.partition_keys(v)))
    if values is not None:
        if keys is not None:
            on_keys = summary_logits(queries, keys)
            logits = on_keys if logits is None else on_keys + logits
        assert logits is not None, "values come with keys or logits"
        terms.append((logits, values.to(v.dtype)))
    return windows.reverse(mix(terms, attn_drop))


def joint_softmax_reference(q, k, v, bias=None, keys=None, values=None, logits=None, *, windows, attn_drop=0.0):
    """`joint_softmax`, query by query."""
    y = torch.zeros_like(q)
    for n in range(q.shape[2]):
        terms = [attended_in_window(n, q, k, v, bias, windows=windows)]
        if values is not None:
            window = 0 if windows.is_empty else windows.index_of(n)
            own = window if values.shape[2] > 1 else 0
            if keys is None:
                position = n if windows.is_empty else windows.attended(n)[2]
                on_summaries = logits[:, :, window, position]
            else:
                on_summaries = (q[:, :, n, None] @ keys[:, :, own].mT)[:, :, 0] / q.shape[-1] ** 0.5
                if logits is not None:
                    logit = logits.expand(windows.num_windows, windows.num_queries, -1)
                    on_summaries = on_summaries + logit[window, windows.attended(n)[2]]
            terms.append((on_summaries, values[:, :, own]))
        y[:, :, n] = mix_reference(*terms, attn_drop=attn_drop)
    return y


def attended_in_window(n, q, k, v, bias=None, *, windows):
    """Logits (B, h, e) of query n on prefix tokens and its window, and their values (B, h, e, d), for the twins."""
    tokens, positions, row = windows.attended(n)
    return attended_tokens(n, q, k, v, tokens, None if bias is None else bias[:, row, positions])


def attended_tokens(n, q, k, v, tokens, bias=None):
    """Logits and values of query n on prefix tokens and these tokens of the grid, with their bias (h, tokens)."""
    P = k.shape[2] - q.shape[2]
    attended = [*range(P), *(P + m for m in tokens)]
    logits = (q[:, :, n, None] @ k[:, :, attended].mT)[:, :, 0] / q.shape[-1] ** 0.5
    return logits if bias is None else logits + F.pad(bias, (P, 0)), v[:, :, attended]


def mix_reference(*terms, attn_drop=0.0):
    """Value (B, h, d) of one query under one softmax over terms: logits (B, h, e) and values (B, h, e, d)."""
    logits, values = torch.cat([logits for logits, _ in terms], -1), torch.cat([values for _, values in terms], 2)
    return (F.dropout(logits.softmax(-1), attn_drop)[:, :, None] @ values)[:, :, 0]


def window_logits(q: Tensor, k: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
    """Logits q . k / sqrt(d) + bias within each window: (B, h, g, w, e), fp32, -inf for keys that are not attended to.
    With a key mask, which may leave a masked query without keys, the least finite number replaces -inf.

    Queries and keys hold the tokens of the grid, (B, h, N, d).
    """
    logits = product(windows.partition(q * q.shape[-1] ** -0.5), windows.partition_keys(k).mT)
    logits = logits if bias is None else logits + bias[:, None]
    mask = windows.mask(q.device)
    if mask is not None:
        least = -torch.inf if windows.key_mask is None else torch.finfo(logits.dtype).min
        logits = logits.masked_fill(~mask[..., None, :], least)
    if windows.causal:
        logits = logits.masked_fill(windows.later(q.device), -torch.inf)
    return logits


def gathered_logits(
    queries: Tensor, keys: Tensor, attended: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """Logits of groups of queries (B, h, g, w, d) on keys gathered for each, (B, h, g, e, d): (B, h, g, w, e), fp32.

    attended: bool, broadcast to (B, 1, g, w, e), true for keys of the group that a query attends to; others get -inf.
    None for all. key_mask: bool, broadcast to (B, 1, g, 1, e), true for keys that count; others get the least finite
    number, because a masked query may have no other keys.
    """
    logits = product(queries * queries.shape[-1] ** -0.5, keys.mT)
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask, torch.finfo(logits.dtype).min)
    return logits if attended is None else logits.masked_fill(~attended, -torch.inf)


def shared_logits(queries: Tensor, keys: Tensor) -> Tensor:
    """Logits of windows of queries (B, h, g, w, d) on keys that all attend to, (B, h, c, d): (B, h, g, w, c), fp32."""
    return summary_logits(queries, keys[:, :, None])


def summary_logits(queries: Tensor, keys: Tensor) -> Tensor:
    """Logits of windows of queries (B, h, g, w, d) on keys (B, h, G, c, d), G = 1 or g: (B, h, g, w, c), fp32."""
    (B, h, g, w, d), (G, c) = queries.shape, keys.shape[2:4]
    of_set = (queries * d**-0.5).reshape(B, h, G, g * w // G, d)
    return product(of_set, keys.mT).reshape(B, h, g, w, c)


def prefix_term(queries: Tensor, k_prefix: Tensor, v_prefix: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Terms of `mix` for prefix tokens with keys and values (B, h, P, d); an empty list if there are none."""
    return [(shared_logits(queries, k_prefix), v_prefix[:, :, None])] if k_prefix.shape[2] else []


def mix(terms: list[tuple[Tensor, Tensor]], attn_drop: float = 0.0) -> Tensor:
    """Values (B, h, g, w, d) of all terms under one softmax, in the type of the values.

    terms: logits (B, h, g, w, c) of w queries in each of g windows, and values (B, h, G, c, d), G = 1 or g windows.
    """
    terms = [term for term in terms if term[0].shape[-1]]
    logits = [logits for logits, _ in terms]
    weights = F.dropout(torch.cat(logits, -1).softmax(-1), attn_drop).to(terms[0][1].dtype)
    lengths = [x.shape[-1] for x in logits]  # slices, as compiled gradients of gathered values are wrong after `split`
    of_terms = (weights[..., end - n : end] for n, end in zip(lengths, accumulate(lengths), strict=True))
    return functools.reduce(torch.add, map(mixed, of_terms, [values for _, values in terms]))


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Values (B, h, G, c, d), G = 1 or g windows, under weights (B, h, g, w, c): (B, h, g, w, d)."""
    (B, h, g, w, _), (G, c, d) = weights.shape, values.shape[2:]
    of_set = weights.reshape(B, h, G, g * w // G, c)
    return (of_set @ values).reshape(B, h, g, w, d)
