"""Random-feature averages of groups that are tiles of the grid, with gradients by hand.

Kept for the backward pass are the weights within groups, and neither the members of groups nor their features.
"""

import torch
from torch import Tensor

from attention.ops.dispatch import first_order
from attention.ops.memory import like_tokens, partition, reverse
from attention.parts.features import autocast_off, compute_dtype
from attention.parts.groups import Groups


def covers(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> bool:
    """Not: groups that overlap, differ in size, or differ among windows."""
    return groups.tiles is not None


def group_values(k: Tensor, v: Tensor, omega: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """`op.group_values`."""
    with autocast_off(k):
        return GroupValues.apply(k, v, omega, groups.tiles)


class GroupValues(torch.autograd.Function):
    """Of k, v (B, h, N, d) at samples (B, h, 1, c, s, d): averages (B, h, 1, c s, d) and log masses (B, h, 1, c, s)."""

    @staticmethod
    def forward(ctx, k, v, omega, tiles):
        samples, scale, full = omega.to(compute_dtype(omega)).flatten(0, 3), k.shape[-1] ** -0.25, compute_dtype(k)
        keys = partition(k, tiles, full)
        half = torch.linalg.vector_norm(keys, dim=-1).square_()[:, None].expand(-1, omega.shape[4], -1)
        log_xi = torch.baddbmm(half, samples, keys.mT, beta=-(scale**2) / 2, alpha=scale)  # (B h c, s, t)
        del keys
        weights, log_mass = log_xi.softmax(-1), log_xi.logsumexp(-1)
        beta = torch.bmm(weights, partition(v, tiles, full))
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
        full, scale = weights.dtype, k.shape[-1] ** -0.25
        with autocast_off(k):
            dlog_xi = 0 if dlog_mass is None else weights * dlog_mass.flatten(0, 3)[..., None]
            if dbeta is not None:
                dbeta = dbeta.unflatten(3, omega.shape[3:5]).flatten(0, 3)
                of_values = torch.bmm(dbeta, partition(v, tiles, full).mT)
                dlog_xi = dlog_xi + torch.ops.aten._softmax_backward_data(of_values, weights, -1, full)
                if ctx.needs_input_grad[1]:
                    dv = reverse(_transposed_product(weights, dbeta), like_tokens(v), tiles)
            keys = partition(k, tiles, full)
            if ctx.needs_input_grad[2]:
                domega = scale * torch.bmm(dlog_xi, keys).to(omega.dtype).view_as(omega)
            if ctx.needs_input_grad[0]:
                keys *= dlog_xi.sum(1)[..., None] * -(scale**2)
                keys += _transposed_product(scale * dlog_xi, omega.to(full).flatten(0, 3))
                dk = reverse(keys, like_tokens(k), tiles)
        return dk, dv, domega, None


def _transposed_product(x: Tensor, y: Tensor) -> Tensor:
    """x^T y of x (n, s, t) and y (n, s, d): (n, t, d)."""
    return x.mT * y if x.shape[1] == 1 else torch.bmm(x.mT, y)  # as a matrix product a row takes longer
