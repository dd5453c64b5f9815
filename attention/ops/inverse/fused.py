"""Iterations that approach the inverses of matrices, with gradients by hand: products alone.

With p = a z, u = p (7 - p) and w = p (15 - u), an iteration is z <- (13 z - z w) / 4.
"""

import torch
from torch import Tensor, baddbmm

from ...parts.features import autocast_off
from ..kernels import first_order


def approach_inverse(a: Tensor, z: Tensor, iterations: int) -> Tensor:
    """`attention.mechanisms.nystrom.approach_inverse`."""
    return Inverse.apply(a.flatten(0, -3), z.flatten(0, -3), iterations).view_as(a)


class Inverse(torch.autograd.Function):
    """Iterates z for matrices a and z (n, c, c). The backward pass keeps four matrices of every iteration."""

    @staticmethod
    def forward(ctx, a, z, iterations):
        kept = []
        for _ in range(iterations):
            p = torch.bmm(a, z)
            u = baddbmm(p, p, p, beta=7, alpha=-1)
            w = baddbmm(p, p, u, beta=15, alpha=-1)
            kept += z, p, u, w
            z = baddbmm(z, z, w, beta=13 / 4, alpha=-1 / 4)
        ctx.save_for_backward(a, *kept)
        return z

    @staticmethod
    @first_order
    def backward(ctx, dz):
        a, *kept = ctx.saved_tensors
        da, zero = torch.zeros_like(a), dz.new_zeros(())
        with autocast_off(dz):
            for i in reversed(range(0, len(kept), 4)):
                z, p, u, w = kept[i : i + 4]
                dw = baddbmm(zero, z.mT, dz, beta=0, alpha=-1 / 4)
                dz = baddbmm(dz, dz, w.mT, beta=13 / 4, alpha=-1 / 4)
                # du = -p' dw, and its terms 7 du - p' du are -u' dw
                dp = baddbmm(dw, dw, u.mT, beta=15, alpha=-1).baddbmm_(u.mT, dw, alpha=-1)
                dp.baddbmm_(torch.bmm(p.mT, dw), p.mT)
                dz.baddbmm_(a.mT, dp)
                da.baddbmm_(dp, z.mT)
        return da, dz, None
