"""Means and random-feature averages of groups that are tiles of the grid, with gradients by hand.

The backward pass keeps the weights within groups, but not the members of groups or their features.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parts.features import autocast_off, compute_dtype
from ...parts.groups import Groups
from .. import memory
from ..kernels import first_order
from ..memory import like_tokens, partition, tile_products, tiles_to_tokens
from ..products import factor_dtype, full_product


def covers(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> bool:
    """True if the groups are tiles: disjoint, of one size, and shared by all windows."""
    return groups.tiles is not None


def group_values(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """`op.group_values`."""
    with autocast_off(k):
        return GroupValues.apply(k, v, omega, groups.tiles)


def covers_mean(x: Tensor, groups: Groups) -> bool:
    """True if the groups are tiles and the call is not compiled: compilers fuse the definition's sums."""
    return groups.tiles is not None and not torch.compiler.is_compiling()


def group_mean(x: Tensor, groups: Groups) -> Tensor:
    """`attention.parts.groups.group_mean`."""
    return TileMean.apply(x, groups.tiles)


class TileMean(torch.autograd.Function):
    """Means (B, h, 1, c, d) of tokens (B, h, N, d); on a CPU by average pooling of images, whose own backward pass is
    slow.
    """

    @staticmethod
    def forward(ctx, x, tiles):
        ctx.tiles, ctx.shape = tiles, x.shape
        if not memory.on_cpu(x):
            return tiles.view(x).mean((4, 5)).flatten(2, 3)[:, :, None]
        images = x.transpose(1, 2).flatten(2).unflatten(1, tiles.grid).permute(0, 3, 1, 2)  # as they lie in memory
        return F.avg_pool2d(images, tiles.size).unflatten(1, x.shape[1::2]).flatten(3).mT[:, :, None]

    @staticmethod
    @first_order
    def backward(ctx, dy):
        tokens = like_tokens(dy.new_empty(()).expand(ctx.shape))
        target = ctx.tiles.view(tokens)
        of_tiles = dy[:, :, 0].unflatten(2, target.shape[2:4])[..., None, None, :]
        if memory.on_cpu(dy):
            torch.div(of_tiles.expand_as(target), ctx.tiles.num_queries, out=target)
        else:
            memory.copy(target, (of_tiles / ctx.tiles.num_queries).expand_as(target))
        return tokens, None


class GroupValues(torch.autograd.Function):
    """Averages (B, h, 1, c s, d) and log masses (B, h, 1, c, s) of k, v (B, h, N, d) at samples (B, h, 1, c, s, d)."""

    @staticmethod
    def forward(ctx, k, v, omega, tiles):
        kind, scale = factor_dtype(k), k.shape[-1] ** -0.25
        keys = partition(k, tiles, kind)
        lengths = torch.linalg.vector_norm(keys, dim=-1, dtype=compute_dtype(k)).square_()
        lengths = lengths[:, None].expand(-1, omega.shape[4], -1)
        samples = omega.to(kind).flatten(0, 3)
        log_xi = full_product(samples, keys.mT, lengths, beta=-(scale**2) / 2, alpha=scale)  # (B h c, s, t)
        del keys
        weights, log_mass = log_xi.softmax(-1), log_xi.logsumexp(-1)
        beta = full_product(weights.to(kind), partition(v, tiles, kind))
        ctx.save_for_backward(k, v, omega, weights)
        ctx.set_materialize_grads(False)
        ctx.tiles = tiles
        return beta.view(*omega.shape[:3], omega.shape[3] * omega.shape[4], omega.shape[5]), log_mass.view(
            omega.shape[:-1]
        )

    @staticmethod
    @first_order
    def backward(ctx, dbeta, dlog_mass):
        if dbeta is dlog_mass is None:  # no query attends to a group
            return None, None, None, None
        (k, v, omega, weights), tiles = ctx.saved_tensors, ctx.tiles
        dk = dv = domega = None
        full, kind, scale = weights.dtype, factor_dtype(k), k.shape[-1] ** -0.25
        is_row = omega.shape[4] == 1  # a matrix product of one row is slower
        with autocast_off(k):
            terms = [] if dlog_mass is None else [weights * dlog_mass.flatten(0, 3)[..., None]]
            if dbeta is not None:
                dbeta = dbeta.unflatten(3, omega.shape[3:5]).flatten(0, 3).to(kind)
                of_values = full_product(dbeta, partition(v, tiles, kind).mT)
                terms.append(torch.ops.aten._softmax_backward_data(of_values, weights, -1, full))
                if ctx.needs_input_grad[1]:
                    of_keys = weights.to(kind).mT
                    if is_row:
                        dv = tile_products(of_keys, dbeta, tiles, v)
                    else:
                        dv = tiles_to_tokens(torch.bmm(of_keys, dbeta), tiles, v)
            keys, dlog_xi = partition(k, tiles, kind), functools.reduce(torch.add, terms).mul_(scale)
            dlog_xi = dlog_xi.to(kind)
            if ctx.needs_input_grad[2]:
                domega = full_product(dlog_xi, keys).to(omega.dtype).view_as(omega)
            if ctx.needs_input_grad[0]:
                samples = omega.to(kind).flatten(0, 3)
                if is_row:
                    dk = tile_products(torch.sub(samples, keys, alpha=scale, out=keys), dlog_xi.mT, tiles, k)
                else:
                    keys.mul_(dlog_xi.sum(1)[..., None]).baddbmm_(dlog_xi.mT, samples, beta=-scale)
                    dk = tiles_to_tokens(keys, tiles, k)
        return dk, dv, domega, None
