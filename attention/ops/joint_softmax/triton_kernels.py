"""Triton kernels of the joint softmax of windows and landmarks, which `triton_joint` launches.

Queries, keys and values are read in place from the projection's output. A program finds its window's tokens by index
arithmetic, adds the position bias, and keeps a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et
al. 2022, arXiv:2205.14135) over the window's keys and then the landmarks.

One program owns each gradient and sums it in registers, so that all gradients are deterministic. The gradients of
landmarks are summed landmark by landmark over all queries. If a window is one block, all other gradients are computed
window by window; otherwise dq by blocks of queries, dk and dv by blocks of keys, and dbias by pairs of positions over
all images and windows. Sums over images are split into enough parts to keep a GPU busy. These kernels are short of
registers: gradients are summed in the order that frees the weights first, and anything that a loop can compute is
computed inside the loop.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..triton_tokens import (
    accumulate,
    cast,
    dot,
    dot_exactly,
    load,
    load_numbers,
    logits_gradient,
    softmax_gradient,
    store,
)


class Sizes(NamedTuple):
    """Compile-time constants of a kernel: head width, rows and columns of a window, block lengths, precision of fp32,
    warps, stages of loads.
    """

    d: int
    block_d: int
    rows: int
    columns: int
    block_w: int
    block_c: int
    precision: str
    num_warps: int
    num_stages: int


@triton.jit
def _window_program(blocks, h, H, W, S: tl.constexpr):
    """(block, head, window (y, x), batch) of a program; programs of near tokens are neighbours."""
    program, down, across = tl.program_id(0), tl.cdiv(H, S.rows), tl.cdiv(W, S.columns)
    block, head, window = program % blocks, program // blocks % h, program // blocks // h
    batch, window_y, window_x = window // (down * across), window // across % down, window % across
    return block, head, (window_y, window_x), batch


@triton.jit
def _tokens_of(position, window, H, W, S: tl.constexpr):
    """Raster indices of positions in window (y, x), and a mask of those that lie in the grid."""
    y, x = window[0] * S.rows + position // S.columns, window[1] * S.columns + position % S.columns
    return y * W + x, (position < S.rows * S.columns) & (y < H) & (x < W)


@triton.jit
def _window_logits(a, b, bias, head, query, key, attended, scale, S: tl.constexpr):
    """Logits a @ b.T of queries on the window's keys, or of keys on queries; -inf for keys that are not attended to."""
    logits = dot(a, tl.trans(b), S) * scale  # (q, d) @ (d, k), or (k, d) @ (d, q)
    if bias is not None:
        w: tl.constexpr = S.rows * S.columns
        pointers = bias + head.to(tl.int64) * w * w + query * w + key  # bias (h, w, w)
        logits += tl.load(pointers, attended & (query < w), other=0.0).to(tl.float32)
    return tl.where(attended, logits, float("-inf"))


@triton.jit
def _landmark_logits(a, b, prior, window, landmark, c, W, scale, S: tl.constexpr):
    """Logits a @ b.T of queries on landmarks, or of landmarks on queries; -inf beyond the number of landmarks.

    prior: pointer and window stride of a term added to the logits. window: the window of the queries, (y, x).
    """
    # (q, d) @ (d, c), or (c, d) @ (d, q)
    logits, attended = dot(a, tl.trans(b), S) * scale, landmark < c
    if prior is not None:
        number = window[0] * tl.cdiv(W, S.columns) + window[1]
        logits += tl.load(prior[0] + number * prior[1] + landmark, attended, other=0.0)
    return tl.where(attended, logits, float("-inf"))


@triton.jit
def forward(q, k, v, bias, k_tilde, beta, prior, y, lse, h, H, W, c, scale, S: tl.constexpr):
    """Kernel that computes the output y and log-sum-exp lse of a block of one window's queries."""
    w: tl.constexpr = S.rows * S.columns
    blocks: tl.constexpr = (w + S.block_w - 1) // S.block_w
    block, head, window, batch = _window_program(blocks, h, H, W, S)
    dtype = q[0].dtype.element_ty

    query = block * S.block_w + tl.arange(0, S.block_w)
    index, valid = _tokens_of(query, window, H, W, S)
    queries = load(q, batch, head, index, valid, dtype, S)
    largest = tl.full([S.block_w], float("-inf"), tl.float32)
    state = (largest, tl.zeros_like(largest), tl.full([S.block_w, S.block_d], 0.0, tl.float32))
    for start in range(0, w, S.block_w):
        position = start + tl.arange(0, S.block_w)
        token, attended = _tokens_of(position, window, H, W, S)
        keys = load(k, batch, head, token, attended, dtype, S)
        logits = _window_logits(queries, keys, bias, head, query[:, None], position, attended[None], scale, S)
        state = accumulate(state, logits, load(v, batch, head, token, attended, dtype, S), S)
    if k_tilde is not None:
        for start in range(0, c, S.block_c):
            landmark = start + tl.arange(0, S.block_c)
            keys = load(k_tilde, batch, head, landmark, landmark < c, dtype, S)
            logits = _landmark_logits(queries, keys, prior, window, landmark, c, W, scale, S)
            values = load(beta, batch, head, landmark, landmark < c, dtype, S)
            state = accumulate(state, logits, values, S)
    largest, total, output = state
    store(y, batch, head, index, valid, output / total[:, None], S)
    tl.store(lse + (batch.to(tl.int64) * h + head) * H * W + index, largest + tl.log(total), valid)


@triton.jit
def query_gradient(
    q, k, v, bias, k_tilde, beta, prior, y, dy, lse, delta, dq, dk, dv, dbias, B, h, H, W, c, scale, S: tl.constexpr
):
    """Kernel that computes, for every `splits`-th block of one head's queries, dq and delta = y . dy, which the other
    kernels need.

    If a window is one block, it also computes dk and dv, and this program's share of dbias.
    """
    w: tl.constexpr = S.rows * S.columns
    blocks: tl.constexpr = (w + S.block_w - 1) // S.block_w
    head, split, splits = tl.program_id(0) % h, tl.program_id(0) // h, tl.num_programs(0) // h
    down, across = tl.cdiv(H, S.rows), tl.cdiv(W, S.columns)
    dtype = q[0].dtype.element_ty

    d_bias = tl.full([S.block_w, S.block_w], 0.0, tl.float32)
    for i in tl.range(split, B * down * across * blocks, splits, disable_licm=True):
        batch, window = i // blocks // (down * across), (i // blocks // across % down, i // blocks % across)
        query = i % blocks * S.block_w + tl.arange(0, S.block_w)
        index, valid = _tokens_of(query, window, H, W, S)
        queries = load(q, batch, head, index, valid, dtype, S)
        gradient = load(dy, batch, head, index, valid, dtype, S)
        output = load(y, batch, head, index, valid, tl.float32, S)
        normaliser = load_numbers(lse, batch, head, index, valid, h, H * W, float("inf"))
        shift = tl.sum(output * gradient.to(tl.float32), 1)
        tl.store(delta + (batch.to(tl.int64) * h + head) * H * W + index, shift, valid)
        d_queries = tl.full([S.block_w, S.block_d], 0.0, tl.float32)
        for start in range(0, w, S.block_w):
            position = start + tl.arange(0, S.block_w)
            token, attended = _tokens_of(position, window, H, W, S)
            keys = load(k, batch, head, token, attended, dtype, S)
            values = load(v, batch, head, token, attended, dtype, S)
            logits = _window_logits(queries, keys, bias, head, query[:, None], position, attended[None], scale, S)
            weight = tl.exp(logits - normaliser[:, None])
            if dk is not None:
                # (k, q) @ (q, d)
                store(dv, batch, head, token, attended, dot(tl.trans(cast(weight, dtype)), gradient, S), S)
            d_logits = logits_gradient(weight, gradient, values, shift[:, None], S)
            if dbias is not None:
                d_bias += d_logits
            if dk is not None:
                d_keys = dot(tl.trans(cast(d_logits, dtype)), queries, S)  # (k, q) @ (q, d)
                store(dk, batch, head, token, attended, d_keys * scale, S)
            d_queries += dot(cast(d_logits, dtype), keys, S)  # (q, k) @ (k, d)
        if k_tilde is not None:
            for start in range(0, c, S.block_c):
                landmark = start + tl.arange(0, S.block_c)
                keys = load(k_tilde, batch, head, landmark, landmark < c, dtype, S)
                values = load(beta, batch, head, landmark, landmark < c, dtype, S)
                logits = _landmark_logits(queries, keys, prior, window, landmark, c, W, scale, S)
                _, d_logits = softmax_gradient(logits, gradient, values, normaliser[:, None], shift[:, None], S)
                d_queries += dot(cast(d_logits, dtype), keys, S)  # (q, c) @ (c, d)
        store(dq, batch, head, index, valid, d_queries * scale, S)
    if dbias is not None:
        query, key = tl.arange(0, S.block_w)[:, None], tl.arange(0, S.block_w)
        pointers = dbias + (split.to(tl.int64) * h + head) * w * w + query * w + key
        tl.store(pointers, d_bias, (query < w) & (key < w))


@triton.jit
def key_gradient(q, k, v, bias, dy, lse, delta, dk, dv, h, H, W, scale, S: tl.constexpr):
    """Kernel that sums dk and dv of a block of one window's keys over the window's queries."""
    w: tl.constexpr = S.rows * S.columns
    blocks: tl.constexpr = (w + S.block_w - 1) // S.block_w
    block, head, window, batch = _window_program(blocks, h, H, W, S)
    dtype = q[0].dtype.element_ty

    position = block * S.block_w + tl.arange(0, S.block_w)
    token, attended = _tokens_of(position, window, H, W, S)
    keys = load(k, batch, head, token, attended, dtype, S)
    values = load(v, batch, head, token, attended, dtype, S)
    d_keys = tl.full([S.block_w, S.block_d], 0.0, tl.float32)
    d_values = tl.full([S.block_w, S.block_d], 0.0, tl.float32)
    for start in range(0, w, S.block_w):
        query = start + tl.arange(0, S.block_w)
        index, valid = _tokens_of(query, window, H, W, S)
        queries = load(q, batch, head, index, valid, dtype, S)
        gradient = load(dy, batch, head, index, valid, dtype, S)
        normaliser = load_numbers(lse, batch, head, index, valid, h, H * W, float("inf"))
        shift = load_numbers(delta, batch, head, index, valid, h, H * W, 0.0)
        logits = _window_logits(keys, queries, bias, head, query, position[:, None], attended[:, None], scale, S)
        weight = tl.exp(logits - normaliser)
        d_values += dot(cast(weight, dtype), gradient, S)  # (k, q) @ (q, d)
        d_logits = logits_gradient(weight, values, gradient, shift, S)
        d_keys += dot(cast(d_logits, dtype), queries, S)  # (k, q) @ (q, d)
    store(dk, batch, head, token, attended, d_keys * scale, S)
    store(dv, batch, head, token, attended, d_values, S)


@triton.jit
def landmark_gradient(q, k_tilde, beta, prior, dy, lse, delta, dk_tilde, dbeta, h, H, W, c, scale, S: tl.constexpr):
    """Kernel that computes the share of every `splits`-th block of queries in dk_tilde and dbeta of some landmarks."""
    program, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    blocks, N = tl.cdiv(c, S.block_c), H * W
    dtype = q[0].dtype.element_ty
    block, head, batch = program % blocks, program // blocks % h, program // blocks // h

    landmark = block * S.block_c + tl.arange(0, S.block_c)
    real = landmark < c
    keys = load(k_tilde, batch, head, landmark, real, dtype, S)
    values = load(beta, batch, head, landmark, real, dtype, S)
    d_keys = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    d_values = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    for start in range(split * S.block_w, N, splits * S.block_w):
        index = start + tl.arange(0, S.block_w)
        valid = index < N
        queries = load(q, batch, head, index, valid, dtype, S)
        gradient = load(dy, batch, head, index, valid, dtype, S)
        normaliser = load_numbers(lse, batch, head, index, valid, h, N, float("inf"))
        shift = load_numbers(delta, batch, head, index, valid, h, N, 0.0)
        there = tl.minimum(index, N - 1)  # a prior has no entries beyond the last window
        window = there // W // S.rows, there % W // S.columns
        logits = _landmark_logits(keys, queries, prior, window, landmark[:, None], c, W, scale, S)
        weight = tl.exp(logits - normaliser)
        d_values += dot(cast(weight, dtype), gradient, S)  # (c, q) @ (q, d)
        d_logits = logits_gradient(weight, values, gradient, shift, S)
        d_keys += dot_exactly(d_logits, queries, S)  # (c, q) @ (q, d)
    row = split * c + landmark
    store(dk_tilde, batch, head, row, real, d_keys * scale, S)
    store(dbeta, batch, head, row, real, d_values, S)


@triton.jit
def bias_gradient(q, k, v, bias, dy, lse, delta, dbias, B, h, H, W, scale, S: tl.constexpr):
    """Kernel that computes the share of every `splits`-th window of all images in dbias of some position pairs."""
    w: tl.constexpr = S.rows * S.columns
    blocks: tl.constexpr = (w + S.block_w - 1) // S.block_w
    program, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    down, across, head = tl.cdiv(H, S.rows), tl.cdiv(W, S.columns), program % h
    dtype = q[0].dtype.element_ty

    query = program // h % blocks * S.block_w + tl.arange(0, S.block_w)
    position = program // h // blocks * S.block_w + tl.arange(0, S.block_w)
    total = tl.full([S.block_w, S.block_w], 0.0, tl.float32)
    for i in tl.range(split, B * down * across, splits, num_stages=1, disable_licm=True):
        batch, window = i // (down * across), (i // across % down, i % across)
        index, valid = _tokens_of(query, window, H, W, S)
        queries = load(q, batch, head, index, valid, dtype, S)
        gradient = load(dy, batch, head, index, valid, dtype, S)
        normaliser = load_numbers(lse, batch, head, index, valid, h, H * W, float("inf"))
        shift = load_numbers(delta, batch, head, index, valid, h, H * W, 0.0)
        token, attended = _tokens_of(position, window, H, W, S)
        keys = load(k, batch, head, token, attended, dtype, S)
        values = load(v, batch, head, token, attended, dtype, S)
        logits = _window_logits(queries, keys, bias, head, query[:, None], position, attended[None], scale, S)
        total += softmax_gradient(logits, gradient, values, normaliser[:, None], shift[:, None], S)[1]
    pointers = dbias + (split.to(tl.int64) * h + head) * w * w + query[:, None] * w + position
    tl.store(pointers, total, (query < w)[:, None] & (position < w))
