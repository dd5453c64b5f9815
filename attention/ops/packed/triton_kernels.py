"""Triton kernels of windows and landmarks on the packed projection (B, P + N, 3, h, d), launched by `triton_packed`.

Landmarks of an image are the m that are given, then its groups. All tables of groups have a row for each landmark.

Forward: `summarise` reads q, k and v once for the groups, `attend` once for the windows. Backward: `landmark_gradient`
reads q, y and dy, `group_gradient` k and v, `transform_gradient` the means of the groups, and `token_gradient` reads q,
k, v and dy, and writes the gradients of q, k and v, each in one place. The groups are rows of a matrix, and tokens its
columns: a mask of members makes sums over groups, and what tokens get from their groups, products of matrices.

One program owns each gradient, or its share of a sum: all gradients are deterministic.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..triton_tokens import cast, dot, dot_exactly

LOG2E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))


class Sizes(NamedTuple):
    """Compile-time constants of a kernel: heads and their width; prefix tokens; rows and columns of the grid and of
    windows; row and column where the first window begins; number of windows; rows and columns of groups, landmarks that
    are given, all landmarks, and rows of groups in a program; block lengths; stages of loads.
    """

    h: int
    d: int
    P: int
    H: int
    W: int
    rows: int
    columns: int
    top: int
    left: int
    windows: int
    tile_rows: int
    tile_columns: int
    m: int
    c: int
    bands: int
    block_w: int
    block_c: int
    block_all: int
    block_n: int
    num_stages: int


@triton.jit
def _of_image(program, S: tl.constexpr):
    """Where the grid's tokens of a program's image and head begin in (B, P + N, 3, h, d), (B, N, h, d), (B, h, N), and
    its landmarks in (B, h, c).
    """
    batch, head = (program // S.h).to(tl.int64), program % S.h
    N: tl.constexpr = S.H * S.W
    first = batch * (S.P + N) + S.P
    return (first * 3 * S.h + head) * S.d, (batch * N * S.h + head) * S.d, program * N, program * S.c


@triton.jit
def _load(start, index, valid, width: tl.constexpr, S: tl.constexpr):
    """Rows `index`, `width` numbers apart, of d numbers each."""
    return tl.load(start + (index[:, None] * width + tl.arange(0, S.d)[None, :]), valid[:, None], other=0.0)


@triton.jit
def _store(start, index, valid, value, width: tl.constexpr, S: tl.constexpr):
    pointers = start + (index[:, None] * width + tl.arange(0, S.d)[None, :])
    tl.store(pointers, cast(value, start.dtype.element_ty), valid[:, None])


@triton.jit
def _bands_of(split, S: tl.constexpr):
    """Landmarks of the groups of a few rows of groups, their mask, and the first and last of their tokens."""
    across: tl.constexpr = S.W // S.tile_columns
    group = S.m + split * (S.bands * across) + tl.arange(0, S.block_c)
    real = group < tl.minimum(S.m + (split + 1) * (S.bands * across), S.c)
    length: tl.constexpr = S.bands * S.tile_rows * S.W
    return group, real, split * length, tl.minimum((split + 1) * length, S.H * S.W)


@triton.jit
def _group_of(token, S: tl.constexpr):
    """The landmark of a token's group."""
    return S.m + token // S.W // S.tile_rows * (S.W // S.tile_columns) + token % S.W // S.tile_columns


@triton.jit
def _window_tokens(i, S: tl.constexpr):
    """Raster indices of the positions in the i-th window, and a mask of those that lie in the grid."""
    across: tl.constexpr = (S.W - S.left + S.columns - 1) // S.columns
    position = tl.arange(0, S.block_w)
    y = i // across * S.rows + S.top + position // S.columns
    x = i % across * S.columns + S.left + position % S.columns
    valid = position < S.rows * S.columns
    if S.windows * S.rows * S.columns != S.H * S.W:  # they do not divide the grid
        valid = valid & (y >= 0) & (y < S.H) & (x >= 0) & (x < S.W)
    return y * S.W + x, valid


@triton.jit
def _window_of(token, S: tl.constexpr):
    across: tl.constexpr = (S.W - S.left + S.columns - 1) // S.columns
    return (token // S.W - S.top) // S.rows * across + (token % S.W - S.left) // S.columns


@triton.jit
def _window_logits(queries, keys, bias, head, valid, S: tl.constexpr):
    """Logits of a window's queries on its keys. bias: (h, w, block_w), -inf beyond the window's keys; or None."""
    logits = dot(queries, tl.trans(keys)) * (S.d**-0.5 * LOG2E)  # (q, d) @ (d, k)
    if bias is not None:
        w: tl.constexpr = S.rows * S.columns
        position = tl.arange(0, S.block_w)
        row = bias + (head * w + position[:, None]) * S.block_w + position[None, :]
        logits += tl.load(row, (position < w)[:, None], other=0.0)
    if bias is None or S.windows * S.rows * S.columns != S.H * S.W:
        logits = tl.where(valid[None, :], logits, -INFINITY)
    return logits


@triton.jit
def _landmark_logits(queries, landmarks, real, prior, window, landmark, S: tl.constexpr):
    """Logits of queries on landmarks, or of landmarks on queries, with the term `prior` (windows, c), if any; `window`
    and `landmark` are two blocks of indices, of which each belongs to one side.
    """
    logits = dot(queries, tl.trans(landmarks)) * (S.d**-0.5 * LOG2E)
    if prior is not None:
        valid = (window < S.windows) & (landmark < S.c)
        logits += tl.load(prior + window * S.c + landmark, valid, other=0.0)
    return tl.where(real[None, :], logits, -INFINITY)


@triton.jit
def _matrix(weights, dtype: tl.constexpr, inward: tl.constexpr, S: tl.constexpr):
    """The matrix (out, in) of a linear map, or with `inward` (in, out)."""
    row, column = tl.arange(0, S.d)[:, None], tl.arange(0, S.d)[None, :]
    return cast(tl.load(weights[0] + (row + column * S.d if inward else row * S.d + column)), dtype)


@triton.jit
def _vector(x, S: tl.constexpr):
    return tl.load(x + tl.arange(0, S.d)).to(tl.float32)[None, :]


@triton.jit
def _normalised(means, matrix, bias, eps, S: tl.constexpr):
    """Linear map of means, normalised, and the factor 1 / standard deviation."""
    x = dot(means, matrix) + bias  # (c, d) @ (d, d)
    x -= tl.sum(x, 1)[:, None] / S.d
    rstd = tl.rsqrt(tl.sum(x * x, 1) / S.d + eps)
    return x * rstd[:, None], rstd


@triton.jit
def _transformed(means, weights, eps, S: tl.constexpr):
    hat, _ = _normalised(means, _matrix(weights, means.dtype, True, S), _vector(weights[1], S), eps, S)
    return hat * _vector(weights[2], S) + _vector(weights[3], S)


@triton.jit
def _log_features(keys, samples, S: tl.constexpr):
    """Log features of keys at samples: (c, n). samples: times d^-1/4, in units of log 2."""
    full = keys.to(tl.float32)
    half_squares = tl.sum(full * full, 1) * (0.5 * S.d**-0.5 * LOG2E)
    return dot_exactly(samples, tl.trans(keys)) - half_squares[None, :]  # (c, d) @ (d, n)


@triton.jit
def summarise(qkv, of_q, of_k, noise, q_bar, k_bar, omega, k_tilde, beta, mass, mu_scale, eps, S: tl.constexpr):
    """Kernel of the groups of some rows of groups: means, landmarks, samples, values and log masses."""
    tokens, _, _, groups = _of_image(tl.program_id(0), S)
    group, real, first, last = _bands_of(tl.program_id(1), S)
    dtype = qkv.dtype.element_ty
    step: tl.constexpr = 3 * S.h * S.d
    of_k_tokens, of_v_tokens, table = qkv + tokens + S.h * S.d, qkv + tokens + 2 * S.h * S.d, groups * S.d

    q_sum = tl.full([S.block_c, S.d], 0.0, tl.float32)
    k_sum = tl.full([S.block_c, S.d], 0.0, tl.float32)
    for start in range(first, last, S.block_n):
        token = start + tl.arange(0, S.block_n)
        members = cast((group[:, None] == _group_of(token, S)[None, :]).to(tl.float32), dtype)
        q_sum += dot(members, _load(qkv + tokens, token, token < last, step, S))  # (c, n) @ (n, d)
        k_sum += dot(members, _load(of_k_tokens, token, token < last, step, S))  # (c, n) @ (n, d)
    size: tl.constexpr = S.tile_rows * S.tile_columns
    q_mean, k_mean = cast(q_sum / size, dtype), cast(k_sum / size, dtype)
    _store(q_bar + table, group, real, q_mean, S.d, S)
    _store(k_bar + table, group, real, k_mean, S.d, S)
    landmarks = _transformed(k_mean, of_k, eps, S)
    _store(k_tilde + table, group, real, landmarks, S.d, S)
    samples = (_transformed(q_mean, of_q, eps, S) + landmarks) * mu_scale
    if noise is not None:
        of_groups = noise + tl.program_id(0).to(tl.int64) * ((S.c - S.m) * S.d)
        samples += _load(of_groups, group - S.m, real, S.d, S).to(tl.float32)
    _store(omega + table, group, real, samples, S.d, S)

    samples *= S.d**-0.25 * LOG2E
    largest = tl.full([S.block_c], -INFINITY, tl.float32)
    total = tl.full([S.block_c], 0.0, tl.float32)
    values = tl.full([S.block_c, S.d], 0.0, tl.float32)
    for start in range(first, last, S.block_n):
        token = start + tl.arange(0, S.block_n)
        keys = _load(of_k_tokens, token, token < last, step, S)
        members = (group[:, None] == _group_of(token, S)[None, :]) & (token < last)[None, :]
        logits = tl.where(members, _log_features(keys, samples, S), -INFINITY)
        new = tl.maximum(largest, tl.max(logits, 1))
        shift = tl.where(new == -INFINITY, 0.0, new)  # no token of the group yet
        weight, decay = tl.exp2(logits - shift[:, None]), tl.exp2(largest - shift)
        total = total * decay + tl.sum(weight, 1)
        of_tokens = _load(of_v_tokens, token, token < last, step, S)
        values = values * decay[:, None] + dot(cast(weight, dtype), of_tokens)  # (c, n) @ (n, d)
        largest = new
    total = tl.where(real, total, 1.0)
    _store(beta + table, group, real, values / total[:, None], S.d, S)
    tl.store(mass + groups + group, largest + tl.log2(total), real)


@triton.jit
def attend(qkv, bias, k_tilde, beta, prior, y, lse, S: tl.constexpr):
    """Kernel of the output y and the log-sum-exp lse of every `splits`-th window of one image and head."""
    tokens, outputs, numbers, groups = _of_image(tl.program_id(0), S)
    dtype = qkv.dtype.element_ty
    step: tl.constexpr = 3 * S.h * S.d
    of_k, of_v = qkv + tokens + S.h * S.d, qkv + tokens + 2 * S.h * S.d
    landmark = tl.arange(0, S.block_c)
    if k_tilde is not None:
        of_landmarks = _load(k_tilde + groups * S.d, landmark, landmark < S.c, S.d, S)
        of_groups = cast(_load(beta + groups * S.d, landmark, landmark < S.c, S.d, S), dtype)
    for i in range(tl.program_id(1), S.windows, tl.num_programs(1)):
        token, valid = _window_tokens(i, S)
        queries = _load(qkv + tokens, token, valid, step, S)
        keys = _load(of_k, token, valid, step, S)
        logits = _window_logits(queries, keys, bias, tl.program_id(0) % S.h, valid, S)
        largest = tl.max(logits, 1)
        if k_tilde is not None:
            on_landmarks = _landmark_logits(queries, of_landmarks, landmark < S.c, prior, i, landmark[None, :], S)
            largest = tl.maximum(largest, tl.max(on_landmarks, 1))
        weight = tl.exp2(logits - largest[:, None])
        total = tl.sum(weight, 1)
        output = dot(cast(weight, dtype), _load(of_v, token, valid, step, S))  # (q, k) @ (k, d)
        if k_tilde is not None:
            weight = tl.exp2(on_landmarks - largest[:, None])
            total += tl.sum(weight, 1)
            output += dot(cast(weight, dtype), of_groups)  # (q, c) @ (c, d)
        _store(y + outputs, token, valid, output / total[:, None], S.h * S.d, S)
        tl.store(lse + numbers + token, largest + tl.log2(total), valid)


@triton.jit
def landmark_gradient(qkv, k_tilde, beta, prior, y, dy, lse, delta, dk_tilde, dbeta, B, S: tl.constexpr):
    """Kernel of delta = y . dy of all queries, and of the share of one split in dk_tilde and dbeta."""
    tokens, outputs, numbers, groups = _of_image(tl.program_id(0), S)
    split, N = tl.program_id(1), S.H * S.W
    dtype = qkv.dtype.element_ty
    landmark = tl.arange(0, S.block_c)
    real = landmark < S.c
    keys = _load(k_tilde + groups * S.d, landmark, real, S.d, S)
    values = cast(_load(beta + groups * S.d, landmark, real, S.d, S), dtype)
    d_keys = tl.full([S.block_c, S.d], 0.0, tl.float32)
    d_values = tl.full([S.block_c, S.d], 0.0, tl.float32)
    for start in range(split * S.block_n, N, tl.num_programs(1) * S.block_n):
        token = start + tl.arange(0, S.block_n)
        valid = token < N
        queries = _load(qkv + tokens, token, valid, 3 * S.h * S.d, S)
        gradient = _load(dy + outputs, token, valid, S.h * S.d, S)
        output = _load(y + outputs, token, valid, S.h * S.d, S)
        shift = tl.sum(output.to(tl.float32) * gradient.to(tl.float32), 1)
        tl.store(delta + numbers + token, shift, valid)
        normaliser = tl.load(lse + numbers + token, valid, other=INFINITY)
        window = _window_of(token, S)[None, :]
        logits = _landmark_logits(keys, queries, valid, prior, window, landmark[:, None], S)
        weight = tl.exp2(logits - normaliser[None, :])  # (c, n)
        d_values += dot(cast(weight, dtype), gradient)  # (c, n) @ (n, d)
        d_logits = weight * (dot(values, tl.trans(gradient)) - shift[None, :])  # (c, d) @ (d, n)
        d_keys += dot(cast(d_logits, dtype), queries)  # (c, n) @ (n, d)
    share = (split * B * S.h + tl.program_id(0)) * S.c * S.d
    _store(dk_tilde + share, landmark, real, d_keys * S.d**-0.5, S.d, S)
    _store(dbeta + share, landmark, real, d_values, S.d, S)


@triton.jit
def group_gradient(
    qkv, omega, beta, mass, shares, d_omega, dbeta, weights, d_logits, members, B, splits, S: tl.constexpr
):
    """Kernel of the groups of some rows of groups: the gradients of samples and values, and their tokens' weights and
    gradients of log features. One image and head writes the matrix of members (N, block_all).
    """
    tokens, _, numbers, groups = _of_image(tl.program_id(0), S)
    group, real, first, last = _bands_of(tl.program_id(1), S)
    dtype = qkv.dtype.element_ty
    step: tl.constexpr = 3 * S.h * S.d
    of_k, of_v, table = qkv + tokens + S.h * S.d, qkv + tokens + 2 * S.h * S.d, groups * S.d
    samples = _load(omega + table, group, real, S.d, S) * (S.d**-0.25 * LOG2E)
    gradient = _load(shares + table, group, real, S.d, S)
    for split in range(1, splits):
        gradient += _load(shares + split * (B * S.h * S.c * S.d) + table, group, real, S.d, S)
    _store(dbeta + table, group, real, gradient, S.d, S)
    shift = tl.sum(_load(beta + table, group, real, S.d, S) * gradient, 1)
    normaliser = tl.load(mass + groups + group, real, other=INFINITY)
    total = tl.full([S.block_c, S.d], 0.0, tl.float32)
    for start in range(first, last, S.block_n):
        token = start + tl.arange(0, S.block_n)
        keys = _load(of_k, token, token < last, step, S)
        own = _group_of(token, S)
        if tl.program_id(0) == 0:
            every = tl.arange(0, S.block_all)
            of_every = cast((own[:, None] == every[None, :]).to(tl.float32), dtype)
            tl.store(members + token[:, None] * S.block_all + every[None, :], of_every, (token < last)[:, None])
        logits = _log_features(keys, samples, S) - normaliser[:, None]
        weight = tl.exp2(tl.where(group[:, None] == own[None, :], logits, -INFINITY))
        values = _load(of_v, token, token < last, step, S)
        d_logit = weight * (dot_exactly(gradient, tl.trans(values)) - shift[:, None])  # (c, d) @ (d, n)
        tl.store(weights + numbers + token, tl.sum(weight, 0), token < last)
        tl.store(d_logits + numbers + token, tl.sum(d_logit, 0), token < last)
        total += dot(cast(d_logit, dtype), keys)  # (c, n) @ (n, d)
    _store(d_omega + table, group, real, total * S.d**-0.25, S.d, S)


@triton.jit
def transform_gradient(
    of_q, of_k, q_bar, k_bar, d_omega, dk_tilde, dq_bar, dk_bar, shares, total, splits, mu_scale, eps, S: tl.constexpr
):
    """Kernel of every `programs`-th block of groups of all images and heads: the gradients of tokens through their
    means, less the scale of logits, and this program's share of those of one landmark transform (W, b, gain, shift).
    """
    if tl.program_id(1) == 0:
        _transform_gradient(of_q, q_bar, d_omega, None, dq_bar, shares, total, splits, mu_scale, eps, S)
    else:
        _transform_gradient(of_k, k_bar, d_omega, dk_tilde, dk_bar, shares, total, splits, mu_scale, eps, S)


@triton.jit
def _transform_gradient(
    weights, means, d_omega, dk_tilde, of_means, shares, total, splits, mu_scale, eps, S: tl.constexpr
):
    program, column = tl.program_id(0), tl.arange(0, S.d)
    size: tl.constexpr = S.tile_rows * S.tile_columns
    d_matrix = tl.full([S.d, S.d], 0.0, tl.float32)
    d_bias, d_gain, d_shift = (tl.full([S.d], 0.0, tl.float32),) * 3
    dtype = means.dtype.element_ty
    inward, outward = _matrix(weights, dtype, True, S), _matrix(weights, dtype, False, S)
    bias, gain = _vector(weights[1], S), _vector(weights[2], S)
    for block in range(program, tl.cdiv(total, S.block_n), tl.num_programs(0)):
        row = block * S.block_n + tl.arange(0, S.block_n)
        real = (row < total) & (row % S.c >= S.m)
        dy = _load(d_omega, row, real, S.d, S) * mu_scale
        if dk_tilde is not None:
            for split in range(splits):
                dy += _load(dk_tilde + split * total * S.d, row, real, S.d, S)
        x = _load(means, row, real, S.d, S)
        hat, rstd = _normalised(x, inward, bias, eps, S)
        d_gain += tl.sum(dy * hat, 0)
        d_shift += tl.sum(dy, 0)
        through = dy * gain
        dx = through - tl.sum(through, 1)[:, None] / S.d - hat * (tl.sum(through * hat, 1) / S.d)[:, None]
        dx *= rstd[:, None]
        d_bias += tl.sum(dx, 0)
        half = cast(dx, x.dtype)
        d_matrix += dot(tl.trans(half), x)  # (d, c) @ (c, d)
        _store(of_means, row, real, dot(half, outward) * (S.d**0.5 / size), S.d, S)  # (c, d) @ (d, d)
    share = shares + (program * 2 + tl.program_id(1)) * (S.d * S.d + 3 * S.d)
    tl.store(share + column[:, None] * S.d + column[None, :], d_matrix)
    rest = share + S.d * S.d + column
    tl.store(rest, d_bias)
    tl.store(rest + S.d, d_gain)
    tl.store(rest + 2 * S.d, d_shift)


@triton.jit
def token_gradient(
    qkv, bias, k_tilde, beta, prior, omega, dbeta, dq_bar, dk_bar, weights, d_logits, members, y, dy, lse, delta, dqkv,
    dbias, B, splits, S: tl.constexpr,
):  # fmt: skip
    """Kernel of the gradients of q, k and v of every `programs`-th part of one head's images, a part being every
    `splits`-th window, and of this program's share in dbias.
    """
    head, program, programs = tl.program_id(0) % S.h, tl.program_id(0) // S.h, tl.num_programs(0) // S.h
    dtype = qkv.dtype.element_ty
    step: tl.constexpr = 3 * S.h * S.d
    width: tl.constexpr = S.h * S.d
    position, landmark = tl.arange(0, S.block_w), tl.arange(0, S.block_c)
    real, group = landmark < S.c, (landmark >= S.m) & (landmark < S.c)
    if dbias is not None:
        d_bias = tl.full([S.block_w, S.block_w], 0.0, tl.float32)
    for part in tl.range(program, B * splits, programs, disable_licm=True):  # hoisted addresses would spill
        tokens, outputs, numbers, groups = _of_image(part // splits * S.h + head, S)
        if k_tilde is not None:
            of_landmarks = _load(k_tilde + groups * S.d, landmark, real, S.d, S)
            of_groups = cast(_load(beta + groups * S.d, landmark, real, S.d, S), dtype)
        if omega is not None:
            samples = cast(_load(omega + groups * S.d, landmark, group, S.d, S) * S.d**0.25, dtype)
            d_groups = _load(dbeta + groups * S.d, landmark, group, S.d, S)
            d_queries_mean = _load(dq_bar + groups * S.d, landmark, group, S.d, S)
            d_keys_mean = _load(dk_bar + groups * S.d, landmark, group, S.d, S)
        for i in tl.range(part % splits, S.windows, splits, disable_licm=True):
            token, valid = _window_tokens(i, S)
            queries = _load(qkv + tokens, token, valid, step, S)
            keys = _load(qkv + tokens + width, token, valid, step, S)
            values = _load(qkv + tokens + 2 * width, token, valid, step, S)
            gradient = _load(dy + outputs, token, valid, width, S)
            normaliser = tl.load(lse + numbers + token, valid, other=INFINITY)[:, None]
            if k_tilde is None:
                output = _load(y + outputs, token, valid, width, S).to(tl.float32)
                shift = tl.sum(output * gradient.to(tl.float32), 1)[:, None]
            else:
                shift = tl.load(delta + numbers + token, valid, other=0.0)[:, None]
            if omega is not None:
                rows = members + (token[:, None] * S.block_c + landmark[None, :])
                of_members = tl.load(rows, valid[:, None], other=0.0)
            weight = tl.exp2(_window_logits(queries, keys, bias, head, valid, S) - normaliser)
            d_values = dot(tl.trans(cast(weight, dtype)), gradient)  # (k, q) @ (q, d)
            if omega is not None:
                within = tl.load(weights + numbers + token, valid, other=0.0)[:, None]
                d_values += within * dot(of_members, d_groups)  # (k, c) @ (c, d)
            _store(dqkv + tokens + 2 * width, token, valid, d_values, step, S)
            d_weight = weight * (dot(gradient, tl.trans(values)) - shift)  # (q, d) @ (d, k)
            if dbias is not None:
                d_bias += d_weight
            half = cast(d_weight, dtype)
            d_keys = dot(tl.trans(half), queries)  # (k, q) @ (q, d)
            if omega is not None:
                within = tl.load(d_logits + numbers + token, valid, other=0.0)[:, None]
                d_keys += dot(of_members, d_keys_mean)  # (k, c) @ (c, d)
                d_keys += within * (dot(of_members, samples) - keys.to(tl.float32))  # (k, c) @ (c, d)
            _store(dqkv + tokens + width, token, valid, d_keys * S.d**-0.5, step, S)
            d_queries = dot(half, keys)  # (q, k) @ (k, d)
            if omega is not None:
                d_queries += dot(of_members, d_queries_mean)  # (q, c) @ (c, d)
            if k_tilde is not None:
                logits = _landmark_logits(queries, of_landmarks, real, prior, i, landmark[None, :], S)
                weight = tl.exp2(logits - normaliser)
                d_weight = weight * (dot(gradient, tl.trans(of_groups)) - shift)  # (q, d) @ (d, c)
                d_queries += dot(cast(d_weight, dtype), of_landmarks)  # (q, c) @ (c, d)
            _store(dqkv + tokens, token, valid, d_queries * S.d**-0.5, step, S)
    if dbias is not None:
        w: tl.constexpr = S.rows * S.columns
        row = dbias + (tl.program_id(0) * w + position)[:, None] * S.block_w + position[None, :]
        tl.store(row, d_bias / LOG2E, (position < w)[:, None])
