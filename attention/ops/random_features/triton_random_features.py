"""Attention by random features that all queries share (Performer, LARA), fused into Triton kernels. Experimental.

    y_n = sum_s a_ns u_s,   a_n = softmax_s[q'_n . omega_s + m_s (+ log alpha_ns)]

Values u_s and log-masses of samples are those of a group of all tokens (`triton_groups`); here queries attend to the
samples. LARA's alpha_ns = max(b_s + beta (r_ns - mean_s r_ns), MIN_ALPHA) has a softmax over the queries,
r_ns = softmax_n[q'_n . q_bar_s]: its statistics come first, and in the backward pass sums of its gradients.

Tokens are read in raster order, and nothing of their number times the samples is kept: q, k, v, what all queries share,
and a few numbers of every query are. Every gradient is summed by the program that owns it, so that it is deterministic;
sums over queries are split into as many splits as keep a GPU busy. Products and y are fp32, as features need them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.ops.group_values.triton_groups import attend_to_tokens, sample_values, scalars, sizes
from attention.ops.memory import like_tokens
from attention.ops.random_features import eager as random_features
from attention.ops.random_features.proposals import MIN_ALPHA
from attention.ops.triton_tokens import (
    PROGRAMS,
    accumulate,
    dense,
    dot,
    launch,
    load,
    load_numbers,
    softmax_gradient,
    store,
    supported,
    view,
)
from attention.parts.features import upcast

FLOOR = tl.constexpr(MIN_ALPHA)


@triton.jit
def _block(length, block: tl.constexpr, h):
    """Indices of this program's block, its head and its image."""
    program, blocks = tl.program_id(0), tl.cdiv(length, block)
    return program % blocks * block + tl.arange(0, block), program // blocks % h, program // blocks // h


@triton.jit
def _ratio(queries, centres, log_total, batch, head, sample, h, s, S: tl.constexpr):
    """r of queries at centres q_bar; 0 beyond these."""
    normaliser = load_numbers(log_total, batch, head, sample, sample < s, h, s, float("inf"))
    return tl.exp(dot(queries, tl.trans(centres), S) - normaliser)  # (n, d) @ (d, c)


@triton.jit
def _logits(
    queries, samples, centres, log_weight, of_alpha, batch, head, query, sample, h, N, s, beta, S: tl.constexpr
):
    """Logits of queries on samples, -inf beyond these; r and alpha, 0 and 1 where all weigh the same."""
    log_weights = load_numbers(log_weight, batch, head, sample, sample < s, h, s, float("-inf"))
    logits = dot(queries, tl.trans(samples), S) + log_weights  # (n, d) @ (d, c)
    r, alpha = tl.full(logits.shape, 0.0, tl.float32), tl.full(logits.shape, 1.0, tl.float32)
    if of_alpha is not None:
        balance, log_total, mean = of_alpha
        r = _ratio(queries, centres, log_total, batch, head, sample, h, s, S)
        shift = load_numbers(mean, batch, head, query, query < N, h, N, 0.0)[:, None]
        own = load_numbers(balance, batch, head, sample, sample < s, h, s, 0.0)
        alpha = tl.maximum(own + beta * (r - shift), FLOOR)
        logits += tl.log(alpha)
    return logits, r, alpha


@triton.jit
def _alpha_gradient(d_logits, alpha):
    return tl.where(alpha > FLOOR, d_logits / alpha, 0.0)


@triton.jit
def _mean_ratio(q, q_bar, log_total, mean, h, N, s, scale, S: tl.constexpr):
    """A block of queries: the mean of r over samples."""
    query, head, batch = _block(N, S.block_n, h)
    queries = load(q, batch, head, query, query < N, tl.float32, S) * scale
    total = tl.full([S.block_n], 0.0, tl.float32)
    for start in range(0, s, S.block_c):
        sample = start + tl.arange(0, S.block_c)
        centres = load(q_bar, batch, head, sample, sample < s, tl.float32, S)
        total += tl.sum(_ratio(queries, centres, log_total, batch, head, sample, h, s, S), 1)
    tl.store(mean + (batch.to(tl.int64) * h + head) * N + query, total / s, query < N)


@triton.jit
def _mix(q, omega, log_weight, q_bar, of_alpha, u, y, lse, h, N, s, scale, beta, S: tl.constexpr):
    """A block of queries: their output y and log-sum-exp lse."""
    query, head, batch = _block(N, S.block_n, h)
    queries = load(q, batch, head, query, query < N, tl.float32, S) * scale
    largest = tl.full([S.block_n], float("-inf"), tl.float32)
    state = (largest, tl.zeros_like(largest), tl.full([S.block_n, S.block_d], 0.0, tl.float32))
    for start in range(0, s, S.block_c):
        sample = start + tl.arange(0, S.block_c)
        samples = load(omega, batch, head, sample, sample < s, tl.float32, S)
        centres = samples if q_bar is None else load(q_bar, batch, head, sample, sample < s, tl.float32, S)
        logits, _, _ = _logits(
            queries, samples, centres, log_weight, of_alpha, batch, head, query, sample, h, N, s, beta, S
        )
        state = accumulate(state, logits, load(u, batch, head, sample, sample < s, tl.float32, S), S)
    largest, total, output = state
    store(y, batch, head, query, query < N, output / total[:, None], S)
    tl.store(lse + (batch.to(tl.int64) * h + head) * N + query, largest + tl.log(total), query < N)


@triton.jit
def _query_sums(q, omega, log_weight, q_bar, of_alpha, u, dy, lse, delta, dmean, h, N, s, scale, beta, S: tl.constexpr):
    """A block of queries: delta = y . dy without y, and the mean over samples of the gradients of alpha."""
    query, head, batch = _block(N, S.block_n, h)
    queries = load(q, batch, head, query, query < N, tl.float32, S) * scale
    gradient = load(dy, batch, head, query, query < N, tl.float32, S)
    normaliser = load_numbers(lse, batch, head, query, query < N, h, N, float("inf"))
    total = tl.full([S.block_n], 0.0, tl.float32)
    shift, d_alpha, over_alpha = total, total, total
    for start in range(0, s, S.block_c):
        sample = start + tl.arange(0, S.block_c)
        samples = load(omega, batch, head, sample, sample < s, tl.float32, S)
        centres = samples if q_bar is None else load(q_bar, batch, head, sample, sample < s, tl.float32, S)
        values = load(u, batch, head, sample, sample < s, tl.float32, S)
        logits, _, alpha = _logits(
            queries, samples, centres, log_weight, of_alpha, batch, head, query, sample, h, N, s, beta, S
        )
        weight, weighted = softmax_gradient(logits, gradient, values, normaliser[:, None], 0.0, S)
        total += tl.sum(weight, 1)
        shift += tl.sum(weighted, 1)
        if of_alpha is not None:
            d_alpha += tl.sum(_alpha_gradient(weighted, alpha), 1)
            over_alpha += tl.sum(_alpha_gradient(weight, alpha), 1)
    shift /= tl.where(query < N, total, 1.0)  # exact where one sample has all the weight
    number = (batch.to(tl.int64) * h + head) * N + query
    tl.store(delta + number, shift, query < N)
    if of_alpha is not None:
        tl.store(dmean + number, (d_alpha - shift * over_alpha) / s, query < N)


@triton.jit
def _sample_sums(
    q,
    omega,
    log_weight,
    q_bar,
    of_alpha,
    u,
    dy,
    lse,
    delta,
    dmean,
    domega,
    dlog_weight,
    du,
    dq_bar,
    dbalance,
    dlog_total,
    h,
    N,
    s,
    scale,
    beta,
    S: tl.constexpr,
):
    """A block of samples and every `splits`-th block of queries: their share of all gradients of samples.

    That of the log-sum-exps of r is not yet in dq_bar.
    """
    sample, head, batch = _block(s, S.block_c, h)
    split, splits, real = tl.program_id(1), tl.num_programs(1), sample < s
    samples = load(omega, batch, head, sample, real, tl.float32, S)
    centres = samples if q_bar is None else load(q_bar, batch, head, sample, real, tl.float32, S)
    values = load(u, batch, head, sample, real, tl.float32, S)
    d_samples = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    d_centres = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    d_values = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    d_log_weight = tl.full([S.block_c], 0.0, tl.float32)
    d_balance = tl.full([S.block_c], 0.0, tl.float32)
    d_log_total = tl.full([S.block_c], 0.0, tl.float32)
    for start in range(split * S.block_n, N, splits * S.block_n):
        query = start + tl.arange(0, S.block_n)
        queries = load(q, batch, head, query, query < N, tl.float32, S) * scale
        gradient = load(dy, batch, head, query, query < N, tl.float32, S)
        normaliser = load_numbers(lse, batch, head, query, query < N, h, N, float("inf"))
        shift = load_numbers(delta, batch, head, query, query < N, h, N, 0.0)
        logits, r, alpha = _logits(
            queries, samples, centres, log_weight, of_alpha, batch, head, query, sample, h, N, s, beta, S
        )
        weight, d_logits = softmax_gradient(logits, gradient, values, normaliser[:, None], shift[:, None], S)
        d_values += dot(tl.trans(weight), gradient, S)  # (c, n) @ (n, d)
        d_log_weight += tl.sum(d_logits, 0)
        if domega is not None:
            d_samples += dot(tl.trans(d_logits), queries, S)  # (c, n) @ (n, d)
        if of_alpha is not None:
            d_alpha = _alpha_gradient(d_logits, alpha)
            d_mean = load_numbers(dmean, batch, head, query, query < N, h, N, 0.0)
            d_log_ratio = r * beta * (d_alpha - d_mean[:, None])
            d_centres += dot(tl.trans(d_log_ratio), queries, S)  # (c, n) @ (n, d)
            d_balance += tl.sum(d_alpha, 0)
            d_log_total -= tl.sum(d_log_ratio, 0)
    row = split * s + sample
    number = (batch.to(tl.int64) * h + head) * splits * s + row
    store(du, batch, head, row, real, d_values, S)
    tl.store(dlog_weight + number, d_log_weight, real)
    if domega is not None:
        store(domega, batch, head, row, real, d_samples, S)
    if of_alpha is not None:
        store(dq_bar, batch, head, row, real, d_centres, S)
        tl.store(dbalance + number, d_balance, real)
        tl.store(dlog_total + number, d_log_total, real)


@triton.jit
def _query_gradient(
    q,
    omega,
    log_weight,
    q_bar,
    of_alpha,
    u,
    dy,
    lse,
    delta,
    dmean,
    dlog_total,
    dq,
    h,
    N,
    s,
    scale,
    beta,
    S: tl.constexpr,
):
    """A block of queries: dq."""
    query, head, batch = _block(N, S.block_n, h)
    queries = load(q, batch, head, query, query < N, tl.float32, S) * scale
    gradient = load(dy, batch, head, query, query < N, tl.float32, S)
    normaliser = load_numbers(lse, batch, head, query, query < N, h, N, float("inf"))
    shift = load_numbers(delta, batch, head, query, query < N, h, N, 0.0)
    d_queries = tl.full([S.block_n, S.block_d], 0.0, tl.float32)
    for start in range(0, s, S.block_c):
        sample = start + tl.arange(0, S.block_c)
        samples = load(omega, batch, head, sample, sample < s, tl.float32, S)
        centres = samples if q_bar is None else load(q_bar, batch, head, sample, sample < s, tl.float32, S)
        values = load(u, batch, head, sample, sample < s, tl.float32, S)
        logits, r, alpha = _logits(
            queries, samples, centres, log_weight, of_alpha, batch, head, query, sample, h, N, s, beta, S
        )
        _, d_logits = softmax_gradient(logits, gradient, values, normaliser[:, None], shift[:, None], S)
        d_queries += dot(d_logits, samples, S)  # (n, c) @ (c, d)
        if of_alpha is not None:
            d_mean = load_numbers(dmean, batch, head, query, query < N, h, N, 0.0)
            d_log_total = load_numbers(dlog_total, batch, head, sample, sample < s, h, s, 0.0)
            d_ratio = beta * (_alpha_gradient(d_logits, alpha) - d_mean[:, None]) + d_log_total
            d_queries += dot(r * d_ratio, centres, S)  # (n, c) @ (c, d)
    store(dq, batch, head, query, query < N, d_queries * scale, S)


@torch.library.custom_op("attention::query_ratios", mutates_args=())
def _query_ratios(q: Tensor, q_bar: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of r, without gradients: its log-sum-exps (B, h, s), its mean over samples (B, h, N), and the mean
    q' under it (B, h, s, d).
    """
    (h, N, s, scale), S = scalars(q, q_bar), sizes(q, q_bar)
    mean_query, log_total = attend_to_tokens(q, q, q_bar, norm=0.0)
    mean = log_total.new_empty(q.shape[:3])
    programs = q.shape[0] * h * triton.cdiv(N, S.block_n)
    launch(_mean_ratio, (programs,), view(q), view(q_bar), log_total, mean, h, N, s, scale, S)
    return log_total, mean, mean_query * scale


@_query_ratios.register_fake
def _(q, q_bar):
    return tuple(q_bar.new_empty(shape, dtype=torch.float32) for shape in (q_bar.shape[:3], q.shape[:3], q_bar.shape))


@torch.library.custom_op("attention::mix_samples", mutates_args=())
def _mix_samples(
    q: Tensor,
    omega: Tensor,
    log_weight: Tensor,
    u: Tensor,
    q_bar: Tensor | None,
    balance: Tensor | None,
    log_total: Tensor | None,
    mean: Tensor | None,
    mean_query: Tensor | None,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Output (B, h, N, d) in float32 and log-sum-exp (B, h, N); mean_query is for the backward pass."""
    S, y, lse = sizes(q, omega), *_empty_outputs(q)
    programs = q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], S.block_n)
    arguments = _of_samples(omega, log_weight, u, q_bar, balance, log_total, mean)
    launch(_mix, (programs,), view(q), *arguments, view(y), lse, *scalars(q, omega), beta, S)
    return y, lse


@_mix_samples.register_fake
def _(q, omega, log_weight, u, q_bar, balance, log_total, mean, mean_query, beta):
    return _empty_outputs(q)


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return like_tokens(q, torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)


def _of_samples(omega, log_weight, u, q_bar, balance, log_total, mean) -> tuple:
    """What all kernels take of samples."""
    of_alpha = None if q_bar is None else (balance, log_total, mean)
    return view(omega), log_weight, view(q_bar), of_alpha, view(u)


@torch.library.custom_op("attention::mix_samples_backward", mutates_args=())
def _mix_samples_backward(
    dy: Tensor,
    lse: Tensor,
    q: Tensor,
    omega: Tensor,
    log_weight: Tensor,
    u: Tensor,
    q_bar: Tensor | None,
    balance: Tensor | None,
    log_total: Tensor | None,
    mean: Tensor | None,
    mean_query: Tensor | None,
    beta: float,
    frozen: bool,
) -> list[Tensor]:
    """Gradients of q, unless frozen of omega, of log_weight and u, and of q_bar and balance where there are any."""
    (B, h, N, d), s, S, numbers = q.shape, omega.shape[2], sizes(q, omega), (*scalars(q, omega), beta)
    arguments = view(q), *_of_samples(omega, log_weight, u, q_bar, balance, log_total, mean), view(dy)
    programs, blocks = B * h * triton.cdiv(N, S.block_n), B * h * triton.cdiv(s, S.block_c)
    splits = min(triton.cdiv(N, S.block_n), triton.cdiv(PROGRAMS, blocks))

    def shares(*widths: int) -> Tensor:
        return lse.new_empty(B, h, splits * s, *widths)

    def total(share: Tensor | None) -> Tensor | None:
        return None if share is None else share.unflatten(2, (splits, s)).sum(2)

    dq, delta, dmean = like_tokens(q), torch.empty_like(lse), None if q_bar is None else torch.empty_like(lse)
    launch(_query_sums, (programs,), *arguments, lse, delta, dmean, *numbers, S)
    of_queries = lse, delta, dmean
    domega, dlog_weight, du = None if frozen else shares(d), shares(), shares(d)
    dq_bar, dbalance, dlog_total = (None,) * 3 if q_bar is None else (shares(d), shares(), shares())
    outputs = view(domega), dlog_weight, view(du), view(dq_bar), dbalance, dlog_total
    launch(_sample_sums, (blocks, splits), *arguments, *of_queries, *outputs, *numbers, S)
    outputs = domega, dlog_weight, du, dq_bar, dbalance, dlog_total
    domega, dlog_weight, du, dq_bar, dbalance, dlog_total = map(total, outputs)
    launch(_query_gradient, (programs,), *arguments, *of_queries, dlog_total, view(dq), *numbers, S)
    if q_bar is not None:
        dq_bar = dq_bar.addcmul_(dlog_total[..., None], mean_query)
    return [x for x in (dq, domega, dlog_weight, du, dq_bar, dbalance) if x is not None]


@_mix_samples_backward.register_fake
def _(dy, lse, q, omega, log_weight, u, q_bar, balance, log_total, mean, mean_query, beta, frozen):
    of_samples = None if frozen else omega, log_weight, u, q_bar, balance
    return [like_tokens(q), *(lse.new_empty(x.shape) for x in of_samples if x is not None)]


def _save(ctx, inputs, output):
    *tensors, ctx.beta = inputs
    ctx.save_for_backward(output[1], *tensors)


def _backward(ctx, dy, _):
    lse, *tensors = ctx.saved_tensors
    (q, omega, *others), frozen = tensors[:6], not ctx.needs_input_grad[1]
    gradients = iter(_mix_samples_backward(dense(dy), lse, *tensors, ctx.beta, frozen))
    given = q, None if frozen else omega, *others
    return *(None if x is None else next(gradients) for x in given), *(None,) * 4


_mix_samples.register_autograd(_backward, setup_context=_save)


def covers_performer(q, k, v, omega, **options) -> bool:
    """What the fast path covers, of what is `supported`."""
    return supported(q, k, v) and random_features.covers_performer(q, k, v, omega, **options)


def performer(q, k, v, omega, *, features="positive"):
    """`attention.mechanisms.performer.performer`."""
    return _attend(q, k, v, upcast(omega).expand(q.shape[0], -1, -1, -1))


def covers_lara(q, k, v, *arguments, **options) -> bool:
    """What the fast path covers, of what is `supported`."""
    return supported(q, k, v) and random_features.covers_lara(q, k, v, *arguments, **options)


def lara(q, k, v, q_bar, k_bar, noise, uniform=None, *, proposal="pool_mixed", weighting="decoupled", beta=2.0):
    """`attention.mechanisms.lara.lara`."""
    return _attend(q, k, v, *random_features.lara_samples(q_bar, k_bar, noise, proposal, weighting, beta))


def _attend(q, k, v, omega, prior=None, q_bar=None, balance=None, beta=0.0):
    """As `random_features.RandomFeatures`; (B, h, N, d) in float32, in memory (B, N, h, d)."""
    q, k, v, omega, q_bar = map(dense, (q, k, v, omega, q_bar))
    u, mass = sample_values(k, v, omega, None)
    log_weight = mass if prior is None else mass + prior
    ratios = (None,) * 3 if q_bar is None else _query_ratios(q.detach(), q_bar.detach())
    balance = None if balance is None else balance.contiguous()
    return _mix_samples(q, omega, log_weight.contiguous(), u, q_bar, balance, *ratios, beta)[0]
