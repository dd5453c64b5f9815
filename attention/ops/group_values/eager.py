"""Random-feature averages of groups that are tiles of the grid, with gradients by hand.

Kept for the backward pass are the weights within groups, and neither the members of groups nor their features.
"""

import torch
from torch import Tensor

from attention.ops.dispatch import first_order
from attention.ops.joint_softmax.eager import cut, uncut
from attention.ops.memory import like_tokens
from attention.parts.features import full_type, own_types
from attention.parts.groups import Groups


def covers(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> bool:
    """Not: groups that overlap, differ in size, or differ among windows."""
    return groups.tiles is not None


def group_values(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """`attention.control_variates.group_values`."""
    with own_types(k):
        return GroupValues.apply(k, v, omega, *groups.tiles)


class GroupValues(torch.autograd.Function):
    """Of k, v (B, h, N, d) at samples (B, h, 1, c, s, d): averages (B, h, 1, c s, d) and log masses (B, h, 1, c, s)."""

    @staticmethod
    def forward(ctx, k, v, omega, grid, tile):
        samples, scale, full = omega.to(full_type(omega)).flatten(0, 3), k.shape[-1] ** -0.25, full_type(k)
        keys = cut(k, grid, tile, full)
        half = torch.linalg.vector_norm(keys, dim=-1).square_()[:, None].expand(-1, omega.shape[4], -1)
        log_xi = torch.baddbmm(half, samples, keys.mT, beta=-(scale**2) / 2, alpha=scale)  # (B h c, s, t)
        del keys
        weights, log_mass = log_xi.softmax(-1), log_xi.logsumexp(-1)
        beta = torch.bmm(weights, cut(v, grid, tile, full))
        ctx.save_for_backward(k, v, omega, weights)
        ctx.set_materialize_grads(False)
        ctx.grid, ctx.tile = grid, tile
        return beta.view(*omega.shape[:3], -1, omega.shape[-1]), log_mass.view(omega.shape[:-1])

    @staticmethod
    @first_order
    def backward(ctx, dbeta, dlog_mass):
        if dbeta is dlog_mass is None:  # no query sees a group
            return None, None, None, None, None
        (k, v, omega, weights), place = ctx.saved_tensors, (ctx.grid, ctx.tile)
        dk = dv = domega = None
        full, scale = weights.dtype, k.shape[-1] ** -0.25
        with own_types(k):
            dlog_xi = 0 if dlog_mass is None else weights * dlog_mass.reshape(-1, omega.shape[4], 1)
            if dbeta is not None:
                dbeta = dbeta.reshape(-1, *omega.shape[4:])
                of_values = torch.bmm(dbeta, cut(v, *place, full).mT)
                dlog_xi = dlog_xi + torch.ops.aten._softmax_backward_data(of_values, weights, -1, full)
                if ctx.needs_input_grad[1]:
                    dv = uncut(_transposed_product(weights, dbeta), like_tokens(v), *place)
            keys = cut(k, *place, full)
            if ctx.needs_input_grad[2]:
                domega = scale * torch.bmm(dlog_xi, keys).to(omega.dtype).view_as(omega)
            if ctx.needs_input_grad[0]:
                keys *= dlog_xi.sum(1)[..., None] * -(scale**2)
                keys += _transposed_product(scale * dlog_xi, omega.to(full).flatten(0, 3))
                dk = uncut(keys, like_tokens(k), *place)
        return dk, dv, domega, None, None


def _transposed_product(x: Tensor, y: Tensor) -> Tensor:
    """x^T y of x (n, s, t) and y (n, s, d): (n, t, d)."""
    return x.mT * y if x.shape[1] == 1 else torch.bmm(x.mT, y)  # as a matrix product a row takes longer
