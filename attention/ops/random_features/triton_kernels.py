"""Triton kernels of attention by random features, which `triton_features` launches.

Logits and weights of tokens and samples exist in registers alone. A program owns some tokens, whose gradients it
stores. Gradients of samples are sums over tokens, which a program sums in registers over its share of an image's; the
shares are added afterwards, so that all gradients are deterministic.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..triton_tokens import accumulate, cast, dot, load, load_numbers, store
from .proposals import MIN_ALPHA

FLOOR = tl.constexpr(MIN_ALPHA)


class Sizes(NamedTuple):
    """Compile-time constants of a kernel: head width, block lengths of channels, tokens and samples, precision of fp32,
    warps, stages of loads.
    """

    d: int
    block_d: int
    block_n: int
    block_s: int
    precision: str
    num_warps: int
    num_stages: int


@triton.jit
def _image(h):
    """(batch, head) of a program."""
    return tl.program_id(0) // h, tl.program_id(0) % h


@triton.jit
def _token_logits(tokens, samples, index, N, scale, of_keys: tl.constexpr, S: tl.constexpr):
    """Logits of tokens at samples, (s, n); those of keys are log features. -inf beyond the last token."""
    logits = dot(samples, tl.trans(tokens), S) * scale  # (s, d) @ (d, n)
    if of_keys:
        scaled = tokens.to(tl.float32) * scale
        logits -= 0.5 * tl.sum(scaled * scaled, 1)[None, :]
    return tl.where((index < N)[None, :], logits, float("-inf"))


@triton.jit
def forward_values(x, v, omega, u, mass, h, N, s, scale, S: tl.constexpr):
    """Kernel that computes, for a block of samples, the log of the sum over tokens, and the mean of values."""
    batch, head = _image(h)
    dtype = x[0].dtype.element_ty
    sample = tl.program_id(1) * S.block_s + tl.arange(0, S.block_s)
    samples = load(omega, batch, head, sample, sample < s, dtype, S)
    largest = tl.full([S.block_s], float("-inf"), tl.float32)
    state = (largest, tl.zeros_like(largest), tl.full([S.block_s, S.block_d], 0.0, tl.float32))
    for start in range(0, N, S.block_n):
        index = start + tl.arange(0, S.block_n)
        tokens = load(x, batch, head, index, index < N, dtype, S)
        logits = _token_logits(tokens, samples, index, N, scale, v is not None, S)
        if v is not None:
            state = accumulate(state, logits, load(v, batch, head, index, index < N, dtype, S), S)
        else:
            largest, total, y = state
            new = tl.maximum(largest, tl.max(logits, 1))
            total = total * tl.exp(largest - new) + tl.sum(tl.exp(logits - new[:, None]), 1)
            state = (new, total, y)
    largest, total, y = state
    if v is not None:
        store(u, batch, head, sample, sample < s, y / total[:, None], S)
    tl.store(mass + (batch.to(tl.int64) * h + head) * s + sample, largest + tl.log(total), sample < s)


@triton.jit
def backward_values(x, v, omega, mass, u, du, dmass, dx, dv, domega, h, N, s, scale, S: tl.constexpr):
    """Kernel that computes dx and dv of every `splits`-th block of tokens, and its share of domega."""
    batch, head = _image(h)
    dtype = x[0].dtype.element_ty
    split, splits, sample = tl.program_id(1), tl.num_programs(1), tl.arange(0, S.block_s)
    real = sample < s
    samples = load(omega, batch, head, sample, real, dtype, S)
    normaliser = load_numbers(mass, batch, head, sample, real, h, s, float("inf"))[:, None]
    shift = load_numbers(dmass, batch, head, sample, real, h, s, 0.0)
    if v is not None:
        gradient = load(du, batch, head, sample, real, tl.float32, S)
        shift -= tl.sum(gradient * load(u, batch, head, sample, real, tl.float32, S), 1)
        gradient = cast(gradient, dtype)
    d_samples = tl.full([S.block_s, S.block_d], 0.0, tl.float32)
    for start in range(split * S.block_n, N, splits * S.block_n):
        index = start + tl.arange(0, S.block_n)
        valid = index < N
        tokens = load(x, batch, head, index, valid, dtype, S)
        weight = tl.exp(_token_logits(tokens, samples, index, N, scale, v is not None, S) - normaliser)
        if v is not None:
            values = load(v, batch, head, index, valid, dtype, S)
            # (n, s) @ (s, d)
            store(dv, batch, head, index, valid, dot(tl.trans(cast(weight, dtype)), gradient, S), S)
            d_logits = weight * (dot(gradient, tl.trans(values), S) + shift[:, None])  # (s, d) @ (d, n)
        else:
            d_logits = weight * shift[:, None]
        rounded = cast(d_logits, dtype)
        if domega is not None:
            d_samples += dot(rounded, tokens, S)  # (s, n) @ (n, d)
        d_tokens = dot(tl.trans(rounded), samples, S) * scale  # (n, s) @ (s, d)
        if v is not None:
            d_tokens -= tokens.to(tl.float32) * (scale * scale * tl.sum(d_logits, 0))[:, None]
        store(dx, batch, head, index, valid, d_tokens, S)
    if domega is not None:
        store(domega, batch, head, split * s + sample, real, d_samples * scale, S)


@triton.jit
def _alpha(queries, landmarks, log_total, balance, real, s, scale, beta, S: tl.constexpr):
    """r_ns = softmax_n(q_n . q_bar_s), and alpha_ns = b_s + beta (r_ns - mean_s r_ns) before its floor: (n, s)."""
    r = tl.exp(dot(queries, tl.trans(landmarks), S) * scale - log_total[None, :])  # (n, d) @ (d, s)
    r = tl.where(real[None, :], r, 0.0)
    return r, balance[None, :] + beta * (r - tl.sum(r, 1)[:, None] / s)


@triton.jit
def _query_logits(queries, samples, mass, alpha, real, scale, S: tl.constexpr):
    """Logits of queries on samples, (n, s); -inf beyond the number of samples. alpha: None for 1."""
    logits = dot(queries, tl.trans(samples), S) * scale + mass[None, :]  # (n, d) @ (d, s)
    if alpha is not None:
        logits += tl.log(tl.maximum(alpha, FLOOR))
    return tl.where(real[None, :], logits, float("-inf"))


@triton.jit
def forward_mix(q, omega, mass, u, q_bar, log_total, balance, y, lse, h, N, s, scale, beta, S: tl.constexpr):
    """Kernel that computes the output and the log-sum-exp of a block of queries."""
    batch, head = _image(h)
    dtype = q[0].dtype.element_ty
    sample, index = tl.arange(0, S.block_s), tl.program_id(1) * S.block_n + tl.arange(0, S.block_n)
    real, valid = sample < s, index < N
    queries = load(q, batch, head, index, valid, dtype, S)
    alpha = None
    if q_bar is not None:
        landmarks = load(q_bar, batch, head, sample, real, dtype, S)
        totals = load_numbers(log_total, batch, head, sample, real, h, s, 0.0)
        shares = load_numbers(balance, batch, head, sample, real, h, s, 1.0)
        _, alpha = _alpha(queries, landmarks, totals, shares, real, s, scale, beta, S)
    samples = load(omega, batch, head, sample, real, dtype, S)
    masses = load_numbers(mass, batch, head, sample, real, h, s, 0.0)
    logits = _query_logits(queries, samples, masses, alpha, real, scale, S)
    largest = tl.max(logits, 1)
    normaliser = largest + tl.log(tl.sum(tl.exp(logits - largest[:, None]), 1))
    weight = cast(tl.exp(logits - normaliser[:, None]), dtype)
    values = load(u, batch, head, sample, real, dtype, S)
    store(y, batch, head, index, valid, dot(weight, values, S), S)  # (n, s) @ (s, d)
    tl.store(lse + (batch.to(tl.int64) * h + head) * N + index, normaliser, valid)


@triton.jit
def backward_mix(
    q, omega, mass, u, q_bar, log_total, balance, lse, dy,
    dq, domega, dmass, du, dq_bar, dtotal, dbalance, h, N, s, scale, beta, S: tl.constexpr,
):  # fmt: skip
    """Kernel that computes dq of every `splits`-th block of queries, and its share of all other gradients."""
    batch, head = _image(h)
    dtype = q[0].dtype.element_ty
    split, splits, sample = tl.program_id(1), tl.num_programs(1), tl.arange(0, S.block_s)
    real, row = sample < s, split * s + sample
    samples = load(omega, batch, head, sample, real, dtype, S)
    values = load(u, batch, head, sample, real, dtype, S)
    masses = load_numbers(mass, batch, head, sample, real, h, s, 0.0)
    d_mass = tl.full([S.block_s], 0.0, tl.float32)
    d_values = tl.full([S.block_s, S.block_d], 0.0, tl.float32)
    d_samples = tl.full([S.block_s, S.block_d], 0.0, tl.float32)
    if q_bar is not None:
        landmarks = load(q_bar, batch, head, sample, real, dtype, S)
        totals = load_numbers(log_total, batch, head, sample, real, h, s, 0.0)
        shares = load_numbers(balance, batch, head, sample, real, h, s, 1.0)
        d_landmarks = tl.full([S.block_s, S.block_d], 0.0, tl.float32)
        d_total, d_share = tl.zeros_like(d_mass), tl.zeros_like(d_mass)
    for start in range(split * S.block_n, N, splits * S.block_n):
        index = start + tl.arange(0, S.block_n)
        valid = index < N
        queries = load(q, batch, head, index, valid, dtype, S)
        gradient = load(dy, batch, head, index, valid, dtype, S)
        normaliser = load_numbers(lse, batch, head, index, valid, h, N, float("inf"))
        alpha = None
        if q_bar is not None:
            r, alpha = _alpha(queries, landmarks, totals, shares, real, s, scale, beta, S)
        weight = tl.exp(_query_logits(queries, samples, masses, alpha, real, scale, S) - normaliser[:, None])
        d_values += dot(tl.trans(cast(weight, dtype)), gradient, S)  # (s, n) @ (n, d)
        d_weight = dot(gradient, tl.trans(values), S)  # (n, d) @ (d, s)
        d_logits = weight * (d_weight - tl.sum(weight * d_weight, 1)[:, None])
        d_mass += tl.sum(d_logits, 0)
        rounded = cast(d_logits, dtype)
        if domega is not None:
            d_samples += dot(tl.trans(rounded), queries, S)  # (s, n) @ (n, d)
        d_queries = dot(rounded, samples, S)  # (n, s) @ (s, d)
        if q_bar is not None:
            d_alpha = tl.where(alpha > FLOOR, d_logits / alpha, 0.0)
            d_share += tl.sum(d_alpha, 0)
            d_r = r * (d_alpha - tl.sum(d_alpha, 1)[:, None] / s) * beta
            d_total -= tl.sum(d_r, 0)
            rounded = cast(d_r, dtype)
            d_landmarks += dot(tl.trans(rounded), queries, S)  # (s, n) @ (n, d)
            d_queries += dot(rounded, landmarks, S)  # (n, s) @ (s, d)
        store(dq, batch, head, index, valid, d_queries * scale, S)
    numbers = ((batch.to(tl.int64) * h + head) * splits + split) * s + sample
    tl.store(dmass + numbers, d_mass, real)
    store(du, batch, head, row, real, d_values, S)
    if domega is not None:
        store(domega, batch, head, row, real, d_samples * scale, S)
    if q_bar is not None:
        store(dq_bar, batch, head, row, real, d_landmarks * scale, S)
        tl.store(dtotal + numbers, d_total, real)
        tl.store(dbalance + numbers, d_share, real)
