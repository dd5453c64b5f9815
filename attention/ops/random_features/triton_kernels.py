"""Triton kernels of attention by random features, which `triton_features` launches.

Logits and weights of tokens and samples exist in registers alone. A program owns some tokens, whose gradients it
stores. Gradients of samples are sums over tokens, which a program sums in registers over its share of an image's; the
shares are added afterwards, so that all gradients are deterministic.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..triton_tokens import cast, dot, load, store
from .proposals import MIN_ALPHA

FLOOR = tl.constexpr(MIN_ALPHA)


class Sizes(NamedTuple):
    """Compile-time constants of a kernel: head width; channels, tokens and samples of a block; stages of loads."""

    d: int
    block_d: int
    block_n: int
    block_s: int
    num_stages: int


@triton.jit
def _token_logits(tokens, samples, index, N, scale, of_keys: tl.constexpr):
    """Logits of tokens at samples, (s, n); those of keys are log features. -inf beyond the last token."""
    logits = dot(samples, tl.trans(tokens)) * scale  # (s, d) @ (d, n)
    if of_keys:
        scaled = tokens.to(tl.float32) * scale
        logits -= 0.5 * tl.sum(scaled * scaled, 1)[None, :]
    return tl.where((index < N)[None, :], logits, float("-inf"))


@triton.jit
def forward_values(x, v, omega, u, mass, h, N, s, scale, S: tl.constexpr):
    """Kernel that computes, for a block of samples, the log of the sum over tokens, and the mean of values."""
    dtype = x[0].dtype.element_ty
    image = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1) * S.block_s + tl.arange(0, S.block_s)
    samples = load(omega, h, sample, sample < s, dtype, S)
    largest = tl.full([S.block_s], float("-inf"), tl.float32)
    total, y = tl.zeros_like(largest), tl.full([S.block_s, S.block_d], 0.0, tl.float32)
    for start in range(0, N, S.block_n):
        index = start + tl.arange(0, S.block_n)
        tokens = load(x, h, index, index < N, dtype, S)
        logits = _token_logits(tokens, samples, index, N, scale, v is not None)
        new = tl.maximum(largest, tl.max(logits, 1))
        weight, decay = tl.exp(logits - new[:, None]), tl.exp(largest - new)
        if v is not None:
            values = load(v, h, index, index < N, dtype, S)
            y = y * decay[:, None] + dot(cast(weight, dtype), values)  # (s, n) @ (n, d)
        largest, total = new, total * decay + tl.sum(weight, 1)
    if v is not None:
        store(u, h, sample, sample < s, y / total[:, None], S)
    tl.store(mass + image * s + sample, largest + tl.log(total), sample < s)


@triton.jit
def backward_values(x, v, omega, mass, u, du, dmass, dx, dv, domega, h, N, s, scale, S: tl.constexpr):
    """Kernel that computes dx and dv of every `splits`-th block of tokens, and its share of domega."""
    dtype = x[0].dtype.element_ty
    image = tl.program_id(0).to(tl.int64)
    split, splits, sample = tl.program_id(1), tl.num_programs(1), tl.arange(0, S.block_s)
    real = sample < s
    samples = load(omega, h, sample, real, dtype, S)
    normaliser = tl.load(mass + image * s + sample, real, other=float("inf"))[:, None]
    shift = tl.load(dmass + image * s + sample, real, other=0.0)
    if v is not None:
        gradient = load(du, h, sample, real, tl.float32, S)
        shift -= tl.sum(gradient * load(u, h, sample, real, tl.float32, S), 1)
        gradient = cast(gradient, dtype)
    d_samples = tl.full([S.block_s, S.block_d], 0.0, tl.float32)
    for start in range(split * S.block_n, N, splits * S.block_n):
        index = start + tl.arange(0, S.block_n)
        valid = index < N
        tokens = load(x, h, index, valid, dtype, S)
        weight = tl.exp(_token_logits(tokens, samples, index, N, scale, v is not None) - normaliser)
        if v is not None:
            values = load(v, h, index, valid, dtype, S)
            # (n, s) @ (s, d)
            store(dv, h, index, valid, dot(tl.trans(cast(weight, dtype)), gradient), S)
            d_logits = weight * (dot(gradient, tl.trans(values)) + shift[:, None])  # (s, d) @ (d, n)
        else:
            d_logits = weight * shift[:, None]
        rounded = cast(d_logits, dtype)
        if domega is not None:
            d_samples += dot(rounded, tokens)  # (s, n) @ (n, d)
        d_tokens = dot(tl.trans(rounded), samples) * scale  # (n, s) @ (s, d)
        if v is not None:
            d_tokens -= tokens.to(tl.float32) * (scale * scale * tl.sum(d_logits, 0))[:, None]
        store(dx, h, index, valid, d_tokens, S)
    if domega is not None:
        store(domega, h, split * s + sample, real, d_samples * scale, S)


@triton.jit
def _alpha(queries, landmarks, log_total, balance, real, s, scale, beta):
    """r_ns = softmax_n(q_n . q_bar_s), and alpha_ns = b_s + beta (r_ns - mean_s r_ns) before its floor: (n, s)."""
    r = tl.exp(dot(queries, tl.trans(landmarks)) * scale - log_total[None, :])  # (n, d) @ (d, s)
    r = tl.where(real[None, :], r, 0.0)
    return r, balance[None, :] + beta * (r - tl.sum(r, 1)[:, None] / s)


@triton.jit
def _query_logits(queries, samples, mass, alpha, real, scale):
    """Logits of queries on samples, (n, s); -inf beyond the number of samples. alpha: None for 1."""
    logits = dot(queries, tl.trans(samples)) * scale + mass[None, :]  # (n, d) @ (d, s)
    if alpha is not None:
        logits += tl.log(tl.maximum(alpha, FLOOR))
    return tl.where(real[None, :], logits, float("-inf"))


@triton.jit
def forward_mix(q, omega, mass, u, q_bar, log_total, balance, y, lse, h, N, s, scale, beta, S: tl.constexpr):
    """Kernel that computes the output and the log-sum-exp of a block of queries."""
    dtype = q[0].dtype.element_ty
    image = tl.program_id(0).to(tl.int64)
    sample, index = tl.arange(0, S.block_s), tl.program_id(1) * S.block_n + tl.arange(0, S.block_n)
    real, valid = sample < s, index < N
    queries = load(q, h, index, valid, dtype, S)
    alpha = None
    if q_bar is not None:
        landmarks = load(q_bar, h, sample, real, dtype, S)
        totals = tl.load(log_total + image * s + sample, real, other=0.0)
        shares = tl.load(balance + image * s + sample, real, other=1.0)
        _, alpha = _alpha(queries, landmarks, totals, shares, real, s, scale, beta)
    samples = load(omega, h, sample, real, dtype, S)
    masses = tl.load(mass + image * s + sample, real, other=0.0)
    logits = _query_logits(queries, samples, masses, alpha, real, scale)
    largest = tl.max(logits, 1)
    normaliser = largest + tl.log(tl.sum(tl.exp(logits - largest[:, None]), 1))
    weight = cast(tl.exp(logits - normaliser[:, None]), dtype)
    values = load(u, h, sample, real, dtype, S)
    store(y, h, index, valid, dot(weight, values), S)  # (n, s) @ (s, d)
    tl.store(lse + image * N + index, normaliser, valid)


@triton.jit
def backward_mix(
    q, omega, mass, u, q_bar, log_total, balance, lse, dy,
    dq, domega, dmass, du, dq_bar, dtotal, dbalance, h, N, s, scale, beta, S: tl.constexpr,
):  # fmt: skip
    """Kernel that computes dq of every `splits`-th block of queries, and its share of all other gradients."""
    dtype = q[0].dtype.element_ty
    image = tl.program_id(0).to(tl.int64)
    split, splits, sample = tl.program_id(1), tl.num_programs(1), tl.arange(0, S.block_s)
    real, row = sample < s, split * s + sample
    samples = load(omega, h, sample, real, dtype, S)
    values = load(u, h, sample, real, dtype, S)
    masses = tl.load(mass + image * s + sample, real, other=0.0)
    d_mass = tl.full([S.block_s], 0.0, tl.float32)
    d_values = tl.full([S.block_s, S.block_d], 0.0, tl.float32)
    d_samples = tl.full([S.block_s, S.block_d], 0.0, tl.float32)
    if q_bar is not None:
        landmarks = load(q_bar, h, sample, real, dtype, S)
        totals = tl.load(log_total + image * s + sample, real, other=0.0)
        shares = tl.load(balance + image * s + sample, real, other=1.0)
        d_landmarks = tl.full([S.block_s, S.block_d], 0.0, tl.float32)
        d_total, d_share = tl.zeros_like(d_mass), tl.zeros_like(d_mass)
    for start in range(split * S.block_n, N, splits * S.block_n):
        index = start + tl.arange(0, S.block_n)
        valid = index < N
        queries = load(q, h, index, valid, dtype, S)
        gradient = load(dy, h, index, valid, dtype, S)
        normaliser = tl.load(lse + image * N + index, valid, other=float("inf"))
        alpha = None
        if q_bar is not None:
            r, alpha = _alpha(queries, landmarks, totals, shares, real, s, scale, beta)
        weight = tl.exp(_query_logits(queries, samples, masses, alpha, real, scale) - normaliser[:, None])
        d_values += dot(tl.trans(cast(weight, dtype)), gradient)  # (s, n) @ (n, d)
        d_weight = dot(gradient, tl.trans(values))  # (n, d) @ (d, s)
        d_logits = weight * (d_weight - tl.sum(weight * d_weight, 1)[:, None])
        d_mass += tl.sum(d_logits, 0)
        rounded = cast(d_logits, dtype)
        if domega is not None:
            d_samples += dot(tl.trans(rounded), queries)  # (s, n) @ (n, d)
        d_queries = dot(rounded, samples)  # (n, s) @ (s, d)
        if q_bar is not None:
            d_alpha = tl.where(alpha > FLOOR, d_logits / alpha, 0.0)
            d_share += tl.sum(d_alpha, 0)
            d_r = r * (d_alpha - tl.sum(d_alpha, 1)[:, None] / s) * beta
            d_total -= tl.sum(d_r, 0)
            rounded = cast(d_r, dtype)
            d_landmarks += dot(tl.trans(rounded), queries)  # (s, n) @ (n, d)
            d_queries += dot(rounded, landmarks)  # (n, s) @ (s, d)
        store(dq, h, index, valid, d_queries * scale, S)
    numbers = (image * splits + split) * s + sample
    tl.store(dmass + numbers, d_mass, real)
    store(du, h, row, real, d_values, S)
    if domega is not None:
        store(domega, h, row, real, d_samples * scale, S)
    if q_bar is not None:
        store(dq_bar, h, row, real, d_landmarks * scale, S)
        tl.store(dtotal + numbers, d_total, real)
        tl.store(dbalance + numbers, d_share, real)
