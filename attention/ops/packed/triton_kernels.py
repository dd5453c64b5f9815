"""Triton kernels of windows and landmarks on the packed projection (B, N, 3, h, d), which `triton_packed` launches.

Forward: `summarise` reads q, k and v once for the groups, `attend` once for the windows. Backward: `landmark_gradient`
reads q, y and dy, `group_gradient` k and v, `transform_gradient` the means of the groups, and `token_gradient` reads q,
k, v and dy, and writes the gradients of q, k and v, each in one place. The groups are rows of a matrix, and tokens its
columns: a mask of members makes sums over groups, and what tokens get from their groups, products of matrices.

One program owns each gradient, or its share of a sum: all gradients are deterministic.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..triton_tokens import accumulate, cast, dot, dot_exactly, load, load_numbers, store


class Sizes(NamedTuple):
    """Compile-time constants of a kernel: head width, rows and columns of windows and of groups, rows of groups of a
    program, block lengths, True if windows divide the grid, precision of fp32, warps, stages of loads.
    """

    d: int
    block_d: int
    rows: int
    columns: int
    tile_rows: int
    tile_columns: int
    bands: int
    block_w: int
    block_c: int
    block_n: int
    even: bool
    precision: str
    num_warps: int
    num_stages: int


@triton.jit
def _split_program(h):
    """(batch, head) of a program, and its number among the splits of their work."""
    program = tl.program_id(0)
    return program // h, program % h, tl.program_id(1), tl.num_programs(1)


@triton.jit
def _bands_of(split, N, W, c, S: tl.constexpr):
    """Groups of a few rows of groups, their mask, and the first and last of their tokens."""
    across, first = W // S.tile_columns, split * S.bands
    group = first * across + tl.arange(0, S.block_c)
    real = group < tl.minimum((first + S.bands) * across, c)
    return group, real, first * S.tile_rows * W, tl.minimum((first + S.bands) * S.tile_rows * W, N)


@triton.jit
def _group_of(token, W, S: tl.constexpr):
    return token // W // S.tile_rows * (W // S.tile_columns) + token % W // S.tile_columns


@triton.jit
def _window_tokens(i, H, W, origin, S: tl.constexpr):
    """Raster indices of the positions in the i-th window, and a mask of those that lie in the grid."""
    across, position = tl.cdiv(W - origin[1], S.columns), tl.arange(0, S.block_w)
    y = i // across * S.rows + position // S.columns + origin[0]
    x = i % across * S.columns + position % S.columns + origin[1]
    valid = position < S.rows * S.columns
    if not S.even:
        valid = valid & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    return y * W + x, valid


@triton.jit
def _num_windows(H, W, origin, S: tl.constexpr):
    return tl.cdiv(H - origin[0], S.rows) * tl.cdiv(W - origin[1], S.columns)


@triton.jit
def _window_logits(queries, keys, bias, head, valid, scale, S: tl.constexpr):
    """Logits of a window's queries on its keys. bias: (h, w, block_w), -inf beyond the window's keys; or None."""
    logits, position = dot(queries, tl.trans(keys), S) * scale, tl.arange(0, S.block_w)  # (q, d) @ (d, k)
    if bias is not None:
        w: tl.constexpr = S.rows * S.columns
        row = bias + (head * w + position)[:, None] * S.block_w + position
        logits += tl.load(row, (position < w)[:, None], other=0.0)
    if bias is None or not S.even:
        logits = tl.where(valid[None, :], logits, float("-inf"))
    return logits


@triton.jit
def _landmark_logits(queries, landmarks, real, prior, scale, S: tl.constexpr):
    return tl.where(real[None, :], dot(queries, tl.trans(landmarks), S) * scale + prior, float("-inf"))


@triton.jit
def _normalised(means, weights, eps, S: tl.constexpr):
    """Linear map of means, normalised: values, and the factor 1 / standard deviation. weights: (W, b, ...)."""
    column = tl.arange(0, S.block_d)
    matrix = cast(tl.load(weights[0] + column[:, None] + column[None, :] * S.d), means.dtype)  # of (out, in)
    x = dot(means, matrix, S) + tl.load(weights[1] + column).to(tl.float32)[None, :]  # (c, d) @ (d, d)
    x -= tl.sum(x, 1)[:, None] / S.d
    rstd = tl.rsqrt(tl.sum(x * x, 1) / S.d + eps)
    return x * rstd[:, None], rstd


@triton.jit
def _transformed(means, weights, eps, S: tl.constexpr):
    column = tl.arange(0, S.block_d)
    hat, _ = _normalised(means, weights, eps, S)
    gain, shift = tl.load(weights[2] + column).to(tl.float32), tl.load(weights[3] + column).to(tl.float32)
    return hat * gain[None, :] + shift[None, :]


@triton.jit
def _log_features(keys, omega, scale, S: tl.constexpr):
    """Log features of keys at scaled samples omega: (c, n)."""
    full = keys.to(tl.float32)
    return dot_exactly(omega, tl.trans(keys), S) - 0.5 * scale * tl.sum(full * full, 1)[None, :]  # (c, d) @ (d, n)


@triton.jit
def summarise(
    q, k, v, of_q, of_k, noise, q_bar, k_bar, omega, k_tilde, beta, mass, h, H, W, c, mu_scale, eps, S: tl.constexpr
):
    """Kernel of the groups of some rows of groups: means, landmarks, samples, values and log masses."""
    batch, head, split, _ = _split_program(h)
    group, real, first, last = _bands_of(split, H * W, W, c, S)
    dtype = q[0].dtype.element_ty
    scale: tl.constexpr = S.d**-0.5

    q_sum = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    k_sum = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    for start in range(first, last, S.block_n):
        token = start + tl.arange(0, S.block_n)
        members = cast((group[:, None] == _group_of(token, W, S)[None, :]).to(tl.float32), dtype)
        q_sum += dot(members, load(q, batch, head, token, token < last, dtype, S), S)  # (c, n) @ (n, d)
        k_sum += dot(members, load(k, batch, head, token, token < last, dtype, S), S)  # (c, n) @ (n, d)
    size: tl.constexpr = S.tile_rows * S.tile_columns
    q_mean, k_mean = cast(q_sum / size, dtype), cast(k_sum / size, dtype)
    store(q_bar, batch, head, group, real, q_mean, S)
    store(k_bar, batch, head, group, real, k_mean, S)
    landmarks = _transformed(k_mean, of_k, eps, S)
    store(k_tilde, batch, head, group, real, landmarks, S)
    samples = (_transformed(q_mean, of_q, eps, S) + landmarks) * mu_scale
    if noise is not None:
        samples += load(noise, batch, head, group, real, tl.float32, S)
    store(omega, batch, head, group, real, samples, S)

    samples *= S.d**-0.25
    largest = tl.full([S.block_c], float("-inf"), tl.float32)
    state = (largest, tl.zeros_like(largest), tl.full([S.block_c, S.block_d], 0.0, tl.float32))
    for start in range(first, last, S.block_n):
        token = start + tl.arange(0, S.block_n)
        keys = load(k, batch, head, token, token < last, dtype, S)
        logits = _log_features(keys, samples, scale, S)
        members = (group[:, None] == _group_of(token, W, S)[None, :]) & (token < last)[None, :]
        values = load(v, batch, head, token, token < last, dtype, S)
        state = accumulate(state, tl.where(members, logits, float("-inf")), values, S)
    largest, total, values = state
    total = tl.where(real, total, 1.0)
    store(beta, batch, head, group, real, values / total[:, None], S)
    tl.store(mass + (batch.to(tl.int64) * h + head) * c + group, largest + tl.log(total), real)


@triton.jit
def attend(q, k, v, bias, k_tilde, beta, y, lse, h, H, W, c, origin, prior, S: tl.constexpr):
    """Kernel of the output y and the log-sum-exp lse of every `splits`-th window of one image and head."""
    batch, head, split, splits = _split_program(h)
    dtype = q[0].dtype.element_ty
    scale: tl.constexpr = S.d**-0.5
    landmark = tl.arange(0, S.block_c)
    if k_tilde is not None:
        of_landmarks = load(k_tilde, batch, head, landmark, landmark < c, dtype, S)
        of_groups = load(beta, batch, head, landmark, landmark < c, dtype, S)
    for i in range(split, _num_windows(H, W, origin, S), splits):
        token, valid = _window_tokens(i, H, W, origin, S)
        queries = load(q, batch, head, token, valid, dtype, S)
        keys = load(k, batch, head, token, valid, dtype, S)
        logits = _window_logits(queries, keys, bias, head, valid, scale, S)
        largest = tl.max(logits, 1)
        if k_tilde is not None:
            on_landmarks = _landmark_logits(queries, of_landmarks, landmark < c, prior, scale, S)
            largest = tl.maximum(largest, tl.max(on_landmarks, 1))
        weight = tl.exp(logits - largest[:, None])
        total = tl.sum(weight, 1)
        output = dot(cast(weight, dtype), load(v, batch, head, token, valid, dtype, S), S)  # (q, k) @ (k, d)
        if k_tilde is not None:
            weight = tl.exp(on_landmarks - largest[:, None])
            total += tl.sum(weight, 1)
            output += dot(cast(weight, dtype), of_groups, S)  # (q, c) @ (c, d)
        store(y, batch, head, token, valid, output / total[:, None], S)
        tl.store(lse + (batch.to(tl.int64) * h + head) * H * W + token, largest + tl.log(total), valid)


@triton.jit
def landmark_gradient(q, k_tilde, beta, y, dy, lse, delta, dk_tilde, dbeta, B, h, N, c, prior, S: tl.constexpr):
    """Kernel of delta = y . dy of all queries, and of the share of one split in dk_tilde and dbeta."""
    batch, head, split, splits = _split_program(h)
    dtype = q[0].dtype.element_ty
    scale: tl.constexpr = S.d**-0.5
    landmark = tl.arange(0, S.block_c)
    real = landmark < c
    keys = load(k_tilde, batch, head, landmark, real, dtype, S)
    values = load(beta, batch, head, landmark, real, dtype, S)
    d_keys = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    d_values = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    for start in range(split * S.block_n, N, splits * S.block_n):
        token = start + tl.arange(0, S.block_n)
        valid = token < N
        queries = load(q, batch, head, token, valid, dtype, S)
        gradient = load(dy, batch, head, token, valid, dtype, S)
        output = load(y, batch, head, token, valid, tl.float32, S)
        shift = tl.sum(output * gradient.to(tl.float32), 1)
        tl.store(delta + (batch.to(tl.int64) * h + head) * N + token, shift, valid)
        normaliser = load_numbers(lse, batch, head, token, valid, h, N, float("inf"))
        weight = tl.exp(_landmark_logits(keys, queries, valid, prior, scale, S) - normaliser[None, :])  # (c, n)
        d_values += dot(cast(weight, dtype), gradient, S)  # (c, n) @ (n, d)
        d_logits = weight * (dot(values, tl.trans(gradient), S) - shift[None, :])  # (c, d) @ (d, n)
        d_keys += dot(cast(d_logits, dtype), queries, S)  # (c, n) @ (n, d)
    store(dk_tilde, split * B + batch, head, landmark, real, d_keys * scale, S)
    store(dbeta, split * B + batch, head, landmark, real, d_values, S)


@triton.jit
def _sum_of_shares(x, B, batch, head, row, real, splits, S: tl.constexpr):
    total = load(x, batch, head, row, real, tl.float32, S)
    for split in range(1, splits):
        total += load(x, split * B + batch, head, row, real, tl.float32, S)
    return total


@triton.jit
def group_gradient(
    k, v, omega, beta, mass, shares, d_omega, dbeta, weights, d_logits, B, h, H, W, c, splits, S: tl.constexpr
):
    """Kernel of the groups of some rows of groups: the gradients of samples and values, and their tokens' weights and
    gradients of log features.
    """
    batch, head, split, _ = _split_program(h)
    group, real, first, last = _bands_of(split, H * W, W, c, S)
    dtype = k[0].dtype.element_ty
    scale: tl.constexpr = S.d**-0.5
    samples = load(omega, batch, head, group, real, tl.float32, S) * S.d**-0.25
    gradient = _sum_of_shares(shares, B, batch, head, group, real, splits, S)
    store(dbeta, batch, head, group, real, gradient, S)
    shift = tl.sum(load(beta, batch, head, group, real, tl.float32, S) * gradient, 1)
    normaliser = tl.load(mass + (batch.to(tl.int64) * h + head) * c + group, real, other=float("inf"))
    total = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    for start in range(first, last, S.block_n):
        token = start + tl.arange(0, S.block_n)
        keys = load(k, batch, head, token, token < last, dtype, S)
        members = group[:, None] == _group_of(token, W, S)[None, :]
        logits = tl.where(members, _log_features(keys, samples, scale, S), float("-inf"))
        weight = tl.exp(logits - normaliser[:, None])
        d_weight = dot_exactly(gradient, tl.trans(load(v, batch, head, token, token < last, dtype, S)), S)  # (c, n)
        d_logit = weight * (d_weight - shift[:, None])
        numbers = (batch.to(tl.int64) * h + head) * H * W + token
        tl.store(weights + numbers, tl.sum(weight, 0), token < last)
        tl.store(d_logits + numbers, tl.sum(d_logit, 0), token < last)
        total += dot(cast(d_logit, dtype), keys, S)  # (c, n) @ (n, d)
    store(d_omega, batch, head, group, real, total * S.d**-0.25, S)


@triton.jit
def _rows(start, rows, valid):
    return tl.load(start + rows, valid[:, None], other=0.0)


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
    program, column = tl.program_id(0), tl.arange(0, S.block_d)
    size: tl.constexpr = S.tile_rows * S.tile_columns
    d_matrix = tl.full([S.block_d, S.block_d], 0.0, tl.float32)
    d_bias, d_gain, d_shift = (tl.full([S.block_d], 0.0, tl.float32),) * 3
    for block in range(program, tl.cdiv(total, S.block_n), tl.num_programs(0)):
        row = block * S.block_n + tl.arange(0, S.block_n)
        real, rows = row < total, row.to(tl.int64)[:, None] * S.d + column[None, :]
        dy = _rows(d_omega, rows, real) * mu_scale
        if dk_tilde is not None:
            for split in range(splits):
                dy += _rows(dk_tilde + split * total * S.d, rows, real)
        x = _rows(means, rows, real)
        hat, rstd = _normalised(x, weights, eps, S)
        d_gain += tl.sum(dy * hat, 0)
        d_shift += tl.sum(dy, 0)
        through = dy * tl.load(weights[2] + column).to(tl.float32)[None, :]
        dx = through - tl.sum(through, 1)[:, None] / S.d - hat * (tl.sum(through * hat, 1) / S.d)[:, None]
        dx *= rstd[:, None]
        d_bias += tl.sum(dx, 0)
        half = cast(dx, x.dtype)
        d_matrix += dot(tl.trans(half), x, S)  # (d, c) @ (c, d)
        matrix = cast(tl.load(weights[0] + column[:, None] * S.d + column[None, :]), x.dtype)
        tl.store(of_means + rows, cast(dot(half, matrix, S) * (S.d**0.5 / size), x.dtype), real[:, None])
    share = shares + (program * 2 + tl.program_id(1)) * (S.d * S.d + 3 * S.d)
    tl.store(share + column[:, None] * S.d + column[None, :], d_matrix)
    rest = share + S.d * S.d + column
    tl.store(rest, d_bias)
    tl.store(rest + S.d, d_gain)
    tl.store(rest + 2 * S.d, d_shift)


@triton.jit
def token_gradient(
    qkv, bias, k_tilde, beta, omega, dbeta, dq_bar, dk_bar, weights, d_logits, y, dy, lse, delta, dqkv, dbias,
    B, h, H, W, c, origin, prior, splits, S: tl.constexpr,
):  # fmt: skip
    """Kernel of the gradients of q, k and v of every `programs`-th part of one head's images, a part being every
    `splits`-th window, and of this program's share in dbias.
    """
    head, program, programs = tl.program_id(0) % h, tl.program_id(0) // h, tl.num_programs(0) // h
    dtype = qkv.dtype.element_ty
    scale: tl.constexpr = S.d**-0.5
    position, landmark, column = tl.arange(0, S.block_w), tl.arange(0, S.block_c), tl.arange(0, S.block_d)
    if dbias is not None:
        d_bias = tl.full([S.block_w, S.block_w], 0.0, tl.float32)
    for part in tl.range(program, B * splits, programs, disable_licm=True):  # hoisted addresses would spill
        batch, N = (part // splits).to(tl.int64), H * W
        first, first_number, step = (batch * N * 3 * h + head) * S.d, (batch * h + head) * N, h * S.d
        of_q, of_k, of_v, of_dy = qkv + first, qkv + first + step, qkv + first + 2 * step, (batch * N * h + head) * S.d
        if k_tilde is not None:
            real, table = landmark < c, (batch * h + head) * c * S.d + landmark[:, None] * S.d + column[None, :]
            of_landmarks = _rows(k_tilde, table, real)
            of_groups = cast(_rows(beta, table, real), dtype)
            samples = cast(_rows(omega, table, real) * S.d**0.25, dtype)
            d_groups = _rows(dbeta, table, real)
            d_queries_mean = _rows(dq_bar, table, real)
            d_keys_mean = _rows(dk_bar, table, real)
        for i in tl.range(part % splits, _num_windows(H, W, origin, S), splits, disable_licm=True):
            token, valid = _window_tokens(i, H, W, origin, S)
            rows = token[:, None] * (3 * step) + column[None, :]
            queries = _rows(of_q, rows, valid)
            keys = _rows(of_k, rows, valid)
            gradient = _rows(dy + of_dy, token[:, None] * step + column[None, :], valid)
            normaliser = tl.load(lse + first_number + token, valid, other=float("inf"))[:, None]
            if k_tilde is None:
                output = _rows(y + of_dy, token[:, None] * step + column[None, :], valid).to(tl.float32)
                shift = tl.sum(output * gradient.to(tl.float32), 1)[:, None]
            else:
                shift = tl.load(delta + first_number + token, valid, other=0.0)[:, None]
                members = cast((_group_of(token, W, S)[:, None] == landmark[None, :]).to(tl.float32), dtype)
            weight = tl.exp(_window_logits(queries, keys, bias, head, valid, scale, S) - normaliser)
            d_values = dot(tl.trans(cast(weight, dtype)), gradient, S)  # (k, q) @ (q, d)
            if k_tilde is not None:
                within = tl.load(weights + first_number + token, valid, other=0.0)[:, None]
                d_values += within * dot(members, d_groups, S)  # (k, c) @ (c, d)
            tl.store(dqkv + first + 2 * step + rows, cast(d_values, dtype), valid[:, None])
            values = _rows(of_v, rows, valid)
            d_weight = weight * (dot(gradient, tl.trans(values), S) - shift)  # (q, d) @ (d, k)
            if dbias is not None:
                d_bias += d_weight
            half = cast(d_weight, dtype)
            d_keys = dot(tl.trans(half), queries, S)  # (k, q) @ (q, d)
            if k_tilde is not None:
                within = tl.load(d_logits + first_number + token, valid, other=0.0)[:, None]
                d_keys += dot(members, d_keys_mean, S)  # (k, c) @ (c, d)
                d_keys += within * (dot(members, samples, S) - keys.to(tl.float32))  # (k, c) @ (c, d)
            tl.store(dqkv + first + step + rows, cast(d_keys * scale, dtype), valid[:, None])
            d_queries = dot(half, keys, S)  # (q, k) @ (k, d)
            if k_tilde is not None:
                d_queries += dot(members, d_queries_mean, S)  # (q, c) @ (c, d)
                weight = tl.exp(_landmark_logits(queries, of_landmarks, real, prior, scale, S) - normaliser)
                d_weight = weight * (dot(gradient, tl.trans(of_groups), S) - shift)  # (q, d) @ (d, c)
                d_queries += dot(cast(d_weight, dtype), of_landmarks, S)  # (q, c) @ (c, d)
            tl.store(dqkv + first + rows, cast(d_queries * scale, dtype), valid[:, None])
    if dbias is not None:
        w: tl.constexpr = S.rows * S.columns
        row = dbias + (tl.program_id(0) * w + position)[:, None] * S.block_w + position[None, :]
        tl.store(row, d_bias, (position < w)[:, None])
