"""Values of groups of tokens by random features (EVA, eq. 16, appendix C), fused into Triton kernels. Experimental.

A group's value is a softmax over its members: attention of samples to tokens, under a mask of members, or without one
(Performer, LARA). Tokens are read in raster order, and nothing of their number times the samples is kept: values and
log-masses are saved, weights are computed again. Every gradient is summed by the program that owns it, so that it is
deterministic. Products are those of fp32, as features need them. Groups that are equal tiles need no mask: see
`triton_tiles`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.ops.group_values.triton_tiles import covers_tile_values, empty_outputs, tile_values
from attention.ops.memory import like_tokens
from attention.ops.triton_tokens import (
    PROGRAMS,
    accumulate,
    block_length,
    dense,
    dot,
    launch,
    load,
    load_numbers,
    precision,
    softmax_gradient,
    store,
    supported,
    view,
)
from attention.parts.groups import Groups


class Sizes(NamedTuple):
    """What a kernel is compiled for: head width, samples per group, block lengths, precision of fp32."""

    d: int
    block_d: int
    samples: int
    block_n: int
    block_c: int
    precision: str


@triton.jit
def _logits(a, b, half, member, sample, token, c, N, S: tl.constexpr):
    """Log features a @ b.T - half of samples and tokens, broadcast; -inf for those of other groups."""
    seen = (sample < c) & (token < N)
    if member is not None:
        seen = tl.load(member + sample // S.samples * N + token, seen, other=0) != 0
    return tl.where(seen, dot(a, tl.trans(b), S) - half, float("-inf"))  # (c, d) @ (d, n), or (n, d) @ (d, c)


@triton.jit
def _forward(k, v, omega, member, beta, log_mass, h, N, c, scale, norm, S: tl.constexpr):
    """A block of samples of one image and head: their values and log-masses. norm: 1/2, of features, or 0."""
    program, blocks = tl.program_id(0), tl.cdiv(c, S.block_c)
    head, batch = program // blocks % h, program // blocks // h
    sample = program % blocks * S.block_c + tl.arange(0, S.block_c)
    real = sample < c
    samples = load(omega, batch, head, sample, real, tl.float32, S)
    largest = tl.full([S.block_c], float("-inf"), tl.float32)
    state = (largest, tl.zeros_like(largest), tl.full([S.block_c, S.block_d], 0.0, tl.float32))
    for start in range(0, N, S.block_n):
        token = start + tl.arange(0, S.block_n)
        keys = load(k, batch, head, token, token < N, tl.float32, S) * scale
        values = load(v, batch, head, token, token < N, tl.float32, S)
        half = tl.sum(keys * keys, 1) * norm
        state = accumulate(state, _logits(samples, keys, half, member, sample[:, None], token, c, N, S), values, S)
    largest, total, output = state
    total = tl.where(real, total, 1.0)
    store(beta, batch, head, sample, real, output / total[:, None], S)
    tl.store(log_mass + (batch.to(tl.int64) * h + head) * c + sample, largest + tl.log(total), real)


@triton.jit
def _token_gradient(k, v, omega, member, dbeta, log_mass, delta, dk, dv, h, N, c, scale, S: tl.constexpr):
    """A block of tokens of one image and head: dk and dv."""
    program, blocks = tl.program_id(0), tl.cdiv(N, S.block_n)
    head, batch = program // blocks % h, program // blocks // h
    token = program % blocks * S.block_n + tl.arange(0, S.block_n)
    keys = load(k, batch, head, token, token < N, tl.float32, S) * scale
    values = load(v, batch, head, token, token < N, tl.float32, S)
    half = tl.sum(keys * keys, 1)[:, None] / 2
    d_keys = tl.full([S.block_n, S.block_d], 0.0, tl.float32)
    d_values = tl.full([S.block_n, S.block_d], 0.0, tl.float32)
    for start in range(0, c, S.block_c):
        sample = start + tl.arange(0, S.block_c)
        samples = load(omega, batch, head, sample, sample < c, tl.float32, S)
        gradient = load(dbeta, batch, head, sample, sample < c, tl.float32, S)
        normaliser = load_numbers(log_mass, batch, head, sample, sample < c, h, c, float("inf"))
        shift = load_numbers(delta, batch, head, sample, sample < c, h, c, 0.0)
        logits = _logits(keys, samples, half, member, sample, token[:, None], c, N, S)
        weight, d_logits = softmax_gradient(logits, values, gradient, normaliser, shift, S)
        d_keys += dot(d_logits, samples, S) - tl.sum(d_logits, 1)[:, None] * keys  # (n, c) @ (c, d)
        d_values += dot(weight, gradient, S)  # (n, c) @ (c, d)
    store(dk, batch, head, token, token < N, d_keys * scale, S)
    store(dv, batch, head, token, token < N, d_values, S)


@triton.jit
def _sample_gradient(k, v, omega, member, dbeta, log_mass, delta, domega, h, N, c, scale, S: tl.constexpr):
    """A block of samples and every `splits`-th block of tokens: their share of domega."""
    program, blocks = tl.program_id(0), tl.cdiv(c, S.block_c)
    split, splits = tl.program_id(1), tl.num_programs(1)
    head, batch = program // blocks % h, program // blocks // h
    sample = program % blocks * S.block_c + tl.arange(0, S.block_c)
    real = sample < c
    samples = load(omega, batch, head, sample, real, tl.float32, S)
    gradient = load(dbeta, batch, head, sample, real, tl.float32, S)
    normaliser = load_numbers(log_mass, batch, head, sample, real, h, c, float("inf"))[:, None]
    shift = load_numbers(delta, batch, head, sample, real, h, c, 0.0)[:, None]
    total = tl.full([S.block_c, S.block_d], 0.0, tl.float32)
    for start in range(split * S.block_n, N, splits * S.block_n):
        token = start + tl.arange(0, S.block_n)
        keys = load(k, batch, head, token, token < N, tl.float32, S) * scale
        values = load(v, batch, head, token, token < N, tl.float32, S)
        half = tl.sum(keys * keys, 1) / 2
        logits = _logits(samples, keys, half, member, sample[:, None], token, c, N, S)
        total += dot(softmax_gradient(logits, gradient, values, normaliser, shift, S)[1], keys, S)  # (c, n) @ (n, d)
    store(domega, batch, head, split * c + sample, real, total, S)


def sizes(k: Tensor, omega: Tensor, member: Tensor | None = None) -> Sizes:
    N, d, c = *k.shape[2:], omega.shape[2]
    most = 32 if d <= 64 else 16  # what shared memory holds
    samples = c if member is None else c // len(member)
    return Sizes(d, block_length(d, 128), samples, block_length(N, most), block_length(c, most), precision())


def scalars(k: Tensor, omega: Tensor) -> tuple[int, int, int, float]:
    """Heads, tokens, samples, and the scale of keys."""
    return k.shape[1], k.shape[2], omega.shape[2], k.shape[3] ** -0.25


@torch.library.custom_op("attention::group_values", mutates_args=())
def sample_values(k: Tensor, v: Tensor, omega: Tensor, member: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values (B, h, c, d) and log-masses (B, h, c) of c samples (B, h, c, d); member: (groups, N) uint8."""
    return attend_to_tokens(k, v, omega, member)


@sample_values.register_fake
def _(k, v, omega, member):
    return empty_outputs(omega)


def attend_to_tokens(
    k: Tensor, v: Tensor, omega: Tensor, member: Tensor | None = None, norm: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Of v under the softmax of k' . omega - norm |k'|^2 over tokens: means (B, h, c, d) and log-sums (B, h, c)."""
    S, beta, log_mass = sizes(k, omega, member), *empty_outputs(omega)
    programs = k.shape[0] * k.shape[1] * triton.cdiv(omega.shape[2], S.block_c)
    arguments = *map(view, (k, v, omega)), member, view(beta), log_mass
    launch(_forward, (programs,), *arguments, *scalars(k, omega), norm, S)
    return beta, log_mass


@torch.library.custom_op("attention::group_values_backward", mutates_args=())
def _group_values_backward(
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    member: Tensor | None,
    dbeta: Tensor,
    log_mass: Tensor,
    delta: Tensor,
    frozen: bool,
) -> list[Tensor]:
    """Gradients of k, v and, unless frozen, omega; delta: beta . dbeta less the gradient of the log-mass, (B, h, c)."""
    (B, h, N, d), c, S = k.shape, omega.shape[2], sizes(k, omega, member)
    dk, dv = like_tokens(k), like_tokens(v)
    arguments, numbers = (*map(view, (k, v, omega)), member, view(dbeta), log_mass, delta), scalars(k, omega)
    programs = B * h * triton.cdiv(N, S.block_n)
    launch(_token_gradient, (programs,), *arguments, view(dk), view(dv), *numbers, S)
    if frozen:
        return [dk, dv]
    blocks = B * h * triton.cdiv(c, S.block_c)
    splits = min(triton.cdiv(N, S.block_n), triton.cdiv(PROGRAMS, blocks))
    shares = log_mass.new_empty(B, h, splits * c, d)
    launch(_sample_gradient, (blocks, splits), *arguments, view(shares), *numbers, S)
    return [dk, dv, shares.unflatten(2, (splits, c)).sum(2).to(omega.dtype)]


@_group_values_backward.register_fake
def _(k, v, omega, member, dbeta, log_mass, delta, frozen):
    return [like_tokens(k), like_tokens(v), *([] if frozen else [omega.new_empty(omega.shape)])]


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx, dbeta, dlog_mass):
    *inputs, beta, log_mass = ctx.saved_tensors
    delta, frozen = (beta * dbeta).sum(-1) - dlog_mass, not ctx.needs_input_grad[2]
    dk, dv, *domega = _group_values_backward(*inputs, dense(dbeta), log_mass, delta.contiguous(), frozen)
    return dk, dv, *(domega or [None]), None


sample_values.register_autograd(_backward, setup_context=_save)


def covers_group_values(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> bool:
    """Not: groups of every window's own or of every image's, and what is not `supported`."""
    return groups.valid.shape[:-2] == (1,) and supported(k, v)


def group_values(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """`attention.ops.group_values.op.group_values` where all queries share the groups, none of which is empty."""
    k, v, samples = map(dense, (k, v, omega[:, :, 0].flatten(2, 3)))
    if covers_tile_values(omega, groups):
        beta, log_mass = tile_values(k, v, samples, groups.tiles.grid[1], list(groups.tiles.size))
    else:
        index, valid = groups.index[0], groups.valid[0].to(torch.uint8)
        member = valid.new_zeros(len(index), k.shape[2]).scatter_reduce(1, index, valid, "amax")
        beta, log_mass = sample_values(k, v, samples, member)
    return beta[:, :, None], log_mass.unflatten(2, omega.shape[3:5])[:, :, None]
