"""Causal attention by features of a kernel: sums over keys that end with the query's own token.

The sequence is split into chunks, so that time and memory are linear in the number of tokens: the sums of a query are
running sums over the chunks before it, plus sums over the earlier keys of its own chunk.

Features kept as logarithms need more care. If they were divided by a maximum over all keys, one later key could round
the features of a whole prefix to zero. So each query n has the normaliser of its own prefix,

    L_ns = log sum_{m <= n} exp(log_k_ms),   weights exp(log_k_ms - L_ns), which sum to one over m <= n.

L does not fall: for any token e between them, m <= e <= n, a weight is exp(log_k_ms - L_es) exp(L_es - L_ns), a factor
of the key and one of the query, neither above one. The tokens e are the ends of chunks and, within a chunk, the ends of
spans of 1, 2, 4, ... keys, to which the queries of the next span attend.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parts.chunks import chunk_size, chunks, pad
from ...parts.features import full_precision


def causal_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """sum_{m <= n} (phi_q_n . phi_k_m) v_m: features (B, h, N, f), v (B, h, N, d) -> (B, h, N, d).

    Cost: N (c (f + d) + 2 f d) multiply-accumulates, with N padded to chunks of c.
    """
    N, size = v.shape[2], chunk_size(v.shape[2])
    phi_q, phi_k, values = (chunks(pad(x, size), size) for x in (phi_q, phi_k, v))
    y = (phi_q @ phi_k.mT).tril() @ values + phi_q @ states_before(phi_k.mT @ values)
    return y.flatten(2, 3)[:, :, :N]


def running_mass(log_k: Tensor) -> Tensor:
    """L_ns, the logarithm of sum_{m <= n} exp(log_k_ms): (B, h, N, s) -> (B, h, 1 + N, s).

    The first entry is the mass of no key, the least finite number.
    """
    first = torch.full_like(log_k[:, :, :1], torch.finfo(log_k.dtype).min)
    return torch.cat([first, log_k], 2).logcumsumexp(2)


@full_precision
def running_mix(weights: Tensor, log_k: Tensor, mass: Tensor, v: Tensor) -> Tensor:
    """sum_s weights_ns sum_{m <= n} exp(log_k_ms - L_ns) v_m, v (B, h, N, d) -> (B, h, N, d).

    Args:
        weights, log_k: (B, h, N, s). mass: `running_mass` of log_k.
    """
    return over_prefix(
        lambda weights, on_query, on_key, v: weights * on_query @ on_key.mT @ v,
        lambda weights, on_query, state: weights * on_query @ state,
        *(weights, log_k, mass, v),
    )


@full_precision
def running_logits(q: Tensor, k: Tensor, log_k: Tensor, mass: Tensor) -> Tensor:
    """q_n . sum_{m <= n} exp(log_k_ms - L_ns) k_m, queries and keys (B, h, N, d) -> (B, h, N, s).

    Args:
        log_k: (B, h, N, s). mass: `running_mass` of log_k.
    """
    return over_prefix(
        lambda q, on_query, on_key, k: q @ k.mT @ on_key * on_query,
        lambda q, on_query, state: q @ state.mT * on_query,
        *(q, log_k, mass, k),
    )


def over_prefix(
    by_keys: Callable[..., Tensor],
    by_state: Callable[..., Tensor],
    x: Tensor,
    log_k: Tensor,
    mass: Tensor,
    tokens: Tensor,
) -> Tensor:
    """For every query, sums over the keys up to it: its own key, earlier spans of its chunk, and earlier chunks.

    Args:
        by_keys: function of (x, exp(L_es - L_ns), exp(log_k_ms - L_es), tokens) that returns the sum over these keys.
        by_state: function of (x, exp(L_es - L_ns), state) that returns the sum over all keys up to e, where state is
            sum_m exp(log_k_ms - L_es) tokens_m, (s, d).
        x: one row per query, (B, h, N, f). tokens: one row per key, (B, h, N, d).
    """
    N, size = x.shape[2], chunk_size(x.shape[2])
    x, tokens, log_k = pad(x, size), pad(tokens, size), pad(log_k, size, torch.finfo(log_k.dtype).min)
    mass = torch.cat([mass, mass[:, :, -1:].expand(-1, -1, log_k.shape[2] - N, -1)], 2)
    ends, mass = mass.detach(), mass[:, :, 1:]  # L_es cancels
    own = (z[:, :, :, None] for z in (x, (log_k - mass).exp(), torch.ones_like(log_k), tokens))
    y = by_keys(*own).squeeze(3)
    span = 1
    while span < size:
        pairs = (z.unflatten(2, (z.shape[2] // span // 2, 2, span)) for z in (x, mass, log_k, tokens))
        (_, x2), (_, mass2), (log_k1, _), (tokens1, _) = (z.unbind(3) for z in pairs)
        end = ends[:, :, span :: 2 * span, None]
        later = by_keys(x2, (end - mass2).exp(), (log_k1 - end).exp(), tokens1)
        y = y + F.pad(later, (0, 0, span, 0)).flatten(2, 3)
        span *= 2
    ends = ends[:, :, ::size]
    sums = (chunks(log_k, size) - ends[:, :, 1:, None]).exp().mT @ chunks(tokens, size)
    decay = (ends[:, :, :-1] - ends[:, :, 1:]).exp()[..., None]
    on_query = (ends[:, :, :-1, None] - chunks(mass, size)).exp()
    y = y + by_state(chunks(x, size), on_query, states_before(sums, decay)).flatten(2, 3)
    return y[:, :, :N]


def states_before(sums: Tensor, decay: Tensor | None = None) -> Tensor:
    """For each chunk, the sum of all chunks before it, (B, h, g, f, d).

    Adds chunk by chunk, because `cumsum` is not deterministic on a GPU and has no decay.

    Args:
        sums: sums of each chunk, (B, h, g, f, d). decay: factor of each chunk for the sums before it, (B, h, g, f, 1).
    """
    state, states = torch.zeros_like(sums[:, :, 0]), []
    for chunk, own in enumerate(sums.unbind(2)):
        states.append(state)
        state = own + (state if decay is None else decay[:, :, chunk] * state)
    return torch.stack(states, 2)
