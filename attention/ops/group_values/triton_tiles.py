"""Values of groups of tokens (EVA, eq. 16, appendix C) that are equal tiles of the grid, with one sample each, fused
into Triton kernels. Experimental.

No token is in two tiles, so that one program computes everything that belongs to its groups, including the gradients of
their tokens and samples: it finds the tokens of its tiles by index arithmetic and reads no others. A group has one
sample, whose product with the keys is too small for a matrix product; it is computed element by element, in fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...parts.groups import Groups
from ..kernels import NAMESPACE, first_order, kernel
from ..memory import like_tokens
from ..triton_tokens import block_length, dense, launch, load, load_numbers, store, supported, view

LARGEST = 256
"""Largest number of tokens of a tile, which registers must hold."""
PER_PROGRAM, PER_WARP = 2048, 512
"""Numbers in a program's block of keys, unless one tile has more, and in a warp's share of the block; small enough to
keep registers from spilling.
"""


class Sizes(NamedTuple):
    """Compile-time constants of a kernel: head width, rows and columns of a tile, block lengths, warps, stages."""

    d: int
    block_d: int
    rows: int
    columns: int
    block_t: int
    block_c: int
    num_warps: int
    num_stages: int = 1  # there are no loops


@triton.jit
def _program(h, c, W, S: tl.constexpr):
    """Image, head and groups of a program, the raster indices of the groups' tokens, tile after tile, and masks of the
    valid groups and tokens. Programs of near tokens are neighbours.
    """
    program, blocks = tl.program_id(0), tl.cdiv(c, S.block_c)
    head, first, batch = program % h, program // h % blocks * S.block_c, program // h // blocks
    group, token = first + tl.arange(0, S.block_c), tl.arange(0, S.block_c * S.block_t)
    owner, position = first + token // S.block_t, token % S.block_t
    y = owner // (W // S.columns) * S.rows + position // S.columns
    x = owner % (W // S.columns) * S.columns + position % S.columns
    return batch, head, group, y * W + x, group < c, (owner < c) & (position < S.rows * S.columns)


@triton.jit
def _load(x, batch, head, token, valid, S: tl.constexpr):
    """Loads the tokens of tiles, (groups, t, d)."""
    return tl.reshape(load(x, batch, head, token, valid, tl.float32, S), (S.block_c, S.block_t, S.block_d))


@triton.jit
def _store(x, batch, head, token, valid, value, S: tl.constexpr):
    store(x, batch, head, token, valid, tl.reshape(value, (S.block_c * S.block_t, S.block_d)), S)


@triton.jit
def _logits(keys, samples, S: tl.constexpr):
    """Log features of the tokens of tiles at samples (groups, d): (groups, t); -inf beyond a tile."""
    within = tl.arange(0, S.block_t)[None, :] < S.rows * S.columns
    # (groups, t, d) * (groups, 1, d), summed over d
    return tl.where(within, tl.sum(keys * (samples[:, None, :] - 0.5 * keys), 2), float("-inf"))


@triton.jit
def _forward(k, v, omega, beta, log_mass, h, c, W, scale, S: tl.constexpr):
    """Kernel that computes the values and log-masses of a few groups of one image and head."""
    batch, head, group, token, real, valid = _program(h, c, W, S)
    samples = load(omega, batch, head, group, real, tl.float32, S)
    logits = _logits(_load(k, batch, head, token, valid, S) * scale, samples, S)
    largest = tl.max(logits, 1)
    weight = tl.exp(logits - largest[:, None])
    total = tl.sum(weight, 1)
    # (groups, t, 1) * (groups, t, d), summed over t
    values = tl.sum(weight[:, :, None] * _load(v, batch, head, token, valid, S), 1)
    store(beta, batch, head, group, real, values / total[:, None], S)
    tl.store(log_mass + (batch.to(tl.int64) * h + head) * c + group, largest + tl.log(total), real)


@triton.jit
def _gradient(k, v, omega, log_mass, dbeta, dlog_mass, dk, dv, domega, h, c, W, scale, S: tl.constexpr):
    """Kernel that computes domega of a few groups of one image and head, and dk and dv of their tokens."""
    batch, head, group, token, real, valid = _program(h, c, W, S)
    samples = load(omega, batch, head, group, real, tl.float32, S)
    gradient = load(dbeta, batch, head, group, real, tl.float32, S)[:, None, :]
    normaliser = load_numbers(log_mass, batch, head, group, real, h, c, 0.0)
    d_mass = load_numbers(dlog_mass, batch, head, group, real, h, c, 0.0)
    logits = _logits(_load(k, batch, head, token, valid, S) * scale, samples, S)
    weight = tl.exp(logits - normaliser[:, None])
    # (groups, t, d) * (groups, 1, d), summed over d
    d_weight = tl.sum(_load(v, batch, head, token, valid, S) * gradient, 2)
    _store(dv, batch, head, token, valid, weight[:, :, None] * gradient, S)
    d_logits = (weight * (d_weight + (d_mass - tl.sum(weight * d_weight, 1))[:, None]))[:, :, None]
    keys = _load(k, batch, head, token, valid, S) * scale  # loaded again: registers hold only one block of tokens
    _store(dk, batch, head, token, valid, d_logits * (samples[:, None, :] - keys) * scale, S)
    store(domega, batch, head, group, real, tl.sum(d_logits * keys, 1), S)


def _sizes(k: Tensor, omega: Tensor, tile: list[int]) -> Sizes:
    d, block_t = k.shape[3], triton.next_power_of_2(tile[0] * tile[1])
    block_d = block_length(d, 64)
    block_c = min(max(PER_PROGRAM // (block_t * block_d), 1), triton.next_power_of_2(omega.shape[2]))
    num_warps = min(max(block_c * block_t * block_d // PER_WARP, 1), 16)  # with 32, each has too few registers
    return Sizes(d, block_d, *tile, block_t, block_c, num_warps)


def _launch(kernel, k: Tensor, v: Tensor, omega: Tensor, others: tuple, W: int, tile: list[int]) -> None:
    (B, h, _, d), c, S = k.shape, omega.shape[2], _sizes(k, omega, tile)
    programs = B * h * triton.cdiv(c, S.block_c)
    launch(kernel, (programs,), *map(view, (k, v, omega)), *others, h, c, W, d**-0.25, S)


@torch.library.custom_op(f"{NAMESPACE}::tile_values", mutates_args=())
def _tile_values(k: Tensor, v: Tensor, omega: Tensor, W: int, tile: list[int]) -> tuple[Tensor, Tensor]:
    """Values (B, h, c, d) and log-masses (B, h, c), in float32, at samples (B, h, c, d) of tiles (rows, columns) of a
    grid W tokens wide. The last stride of every tensor is 1.
    """
    beta, log_mass = _empty_outputs(omega)
    _launch(_forward, k, v, omega, (view(beta), log_mass), W, tile)
    return beta, log_mass


def _empty_outputs(omega: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors for values (B, h, c, d) and log-masses (B, h, c) at samples omega."""
    return tuple(omega.new_empty(shape, dtype=torch.float32) for shape in (omega.shape, omega.shape[:3]))


@_tile_values.register_fake
def _(k, v, omega, W, tile):
    return _empty_outputs(omega)


@torch.library.custom_op(f"{NAMESPACE}::tile_values_backward", mutates_args=())
def _tile_values_backward(
    k: Tensor, v: Tensor, omega: Tensor, log_mass: Tensor, dbeta: Tensor, dlog_mass: Tensor, W: int, tile: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of k, v and omega."""
    gradients = _empty_gradients(k, v, omega)
    _launch(_gradient, k, v, omega, (log_mass, view(dbeta), dlog_mass, *map(view, gradients)), W, tile)
    return gradients


def _empty_gradients(k: Tensor, v: Tensor, omega: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return like_tokens(k), like_tokens(v), omega.new_empty(omega.shape)


@_tile_values_backward.register_fake
def _(k, v, omega, log_mass, dbeta, dlog_mass, W, tile):
    return _empty_gradients(k, v, omega)


def _save(ctx, inputs, output):
    *tensors, ctx.W, ctx.tile = inputs
    ctx.save_for_backward(*tensors, output[1])


@first_order
def _backward(ctx, dbeta, dlog_mass):
    gradients = _tile_values_backward(*ctx.saved_tensors, dense(dbeta), dlog_mass.contiguous(), ctx.W, ctx.tile)
    return *gradients, None, None


_tile_values.register_autograd(_backward, setup_context=_save)


def covers_group_values(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> bool:
    """Returns whether the groups are tiles of at most LARGEST tokens, with one sample each, and the tensors are
    `supported`.
    """
    fits = groups.tiles is not None and groups.tiles.num_queries <= LARGEST
    return fits and omega.shape[4] == 1 and supported(k, v)


@kernel(covers_group_values)
def group_values(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """`attention.ops.group_values.op.group_values` for covered arguments."""
    tensors = map(dense, (k, v, omega[:, :, 0, :, 0]))
    beta, log_mass = _tile_values(*tensors, groups.tiles.grid[1], list(groups.tiles.size))
    return beta[:, :, None], log_mass[:, :, None, :, None]
