"""Linear attention with gradients by hand.

The result is laid out in memory as tokens with adjacent heads. The backward pass keeps features, values, sums and the
result.
"""

import torch
from torch import baddbmm, bmm

from ...parts.features import autocast_off, full_precision
from ..kernels import first_order
from ..memory import like_tokens


def covers(phi_q, phi_k, v, normaliser="floor", eps=1e-6, *, rotate=None, causal=False):
    """True if sums run over all keys of the same heads, and the call is not compiled: compilers fuse it."""
    same_heads = phi_q.dim() == 4 and phi_q.shape[:2] == phi_k.shape[:2] == v.shape[:2]
    return same_heads and not causal and not torch.compiler.is_compiling()


@full_precision
def linear_attention(phi_q, phi_k, v, normaliser="floor", eps=1e-6, *, rotate=None, causal=False):
    """`op.linear_attention`."""
    turned = (None, None) if rotate is None else (rotate(phi_q), rotate(phi_k))
    return Sums.apply(phi_q, phi_k, v, *turned, normaliser, eps)


class Sums(torch.autograd.Function):
    """Attention by features (B, h, N, f) and (B, h, M, f) of values (B, h, M, d); with rotated features unless None."""

    @staticmethod
    def forward(ctx, phi_q, phi_k, v, turned_q, turned_k, normaliser, eps):
        q, k, values = (x.flatten(0, 1) for x in (phi_q, phi_k, v))
        turned = [own if x is None else x.flatten(0, 1) for own, x in ((q, turned_q), (k, turned_k))]
        y, state = like_tokens(phi_q.new_empty(()).expand(*phi_q.shape[:3], v.shape[3])), bmm(turned[1].mT, values)
        sums, total, divisor = None, None, None
        if normaliser == "none":
            y.copy_(bmm(turned[0], state).view(y.shape))
        else:
            sums = k.sum(-2)[..., None]
            total = bmm(q, sums)
            if normaliser in ("sum", "mean"):
                divisor = total + eps * (v.shape[2] if normaliser == "mean" else 1)
            else:
                divisor = (
                    total.abs().clamp_(min=eps).copysign_(total) if normaliser == "floor" else total.clamp(min=eps)
                )
            torch.div(bmm(turned[0], state).view(y.shape), divisor.view(*y.shape[:3], 1), out=y)
        others = (None, None) if turned_q is None else turned
        total = total if normaliser in ("floor", "clamp") else None
        ctx.save_for_backward(q, k, values, *others, state, sums, total, divisor, None if divisor is None else y)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        q, k, v, turned_q, turned_k, state, sums, total, divisor, y = ctx.saved_tensors
        of_q, of_k = (own if x is None else x for own, x in ((q, turned_q), (k, turned_k)))
        heads, dturned = dy.shape[:2], (None, None)
        with autocast_off(dy):
            if divisor is None:
                dnumerator = dy.flatten(0, 1)
            else:
                dnumerator = torch.div(dy, divisor.unflatten(0, heads), out=dy.new_empty(dy.shape))
                dtotal = (dnumerator * y).sum(-1, keepdim=True).flatten(0, 1)  # its negative
                dnumerator = dnumerator.flatten(0, 1)
                if total is not None:
                    dtotal *= divisor == total  # 0 at the floor
            dq, dstate = bmm(dnumerator, state.mT), bmm(of_q.mT, dnumerator)
            dv, dk = bmm(of_k, dstate), None
            if divisor is None:
                dk = bmm(v, dstate.mT)
                if turned_q is not None:  # weights have none but rotated features
                    dturned, dq, dk = (dq, dk), None, None
            elif turned_q is None:
                dq.baddbmm_(dtotal, sums.mT, alpha=-1)
                dk = baddbmm(bmm(dtotal.mT, q), v, dstate.mT, beta=-1)
            else:
                dturned = dq, bmm(v, dstate.mT)
                dq, dk = dtotal * -sums.mT, bmm(-dtotal.mT, q).expand_as(k)
        return *(None if x is None else x.unflatten(0, heads) for x in (dq, dk, dv, *dturned)), None, None
