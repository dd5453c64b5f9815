"""Rank-augmented linear attention (Fan et al. 2025, arXiv:2411.07635): keys weighted by the mean query, outputs gated.

With phi = elu + 1 for queries and keys, q_bar the mean of phi(q) over the N tokens, and rho_n the rotation of the
channels of every head by the row and column of token n (the first half of the channels by the row),

    alpha_m = N softmax_m(q_bar . phi(k_m) / sqrt(d)),
    y_n = sum_m alpha_m rho_n phi(q_n) . rho_m phi(k_m) v_m / (sum_m alpha_m phi(q_n) . phi(k_m) + 1e-6 N) + local term,

times a linear map of the layer's input. The local term is a depthwise convolution of the values. Rotated weights may be
negative, and do not sum to one. alpha is a number per key, so that a head's matrix of weights has rank d at most, as
in other linear attention; the product with the gate raises the rank of the output. Prefix tokens are not rotated and
have no local term. If 4 does not divide d, the remaining channels of a head are not rotated.
Cost: N C^2 + 2 N d C + 25 N C multiply-accumulates, the first term for the gate.

Released models have this attention in the first two of four stages only. In heads of few channels the normaliser, which
has no rotations, may be far smaller than the sum that it divides: y is kept within twice its channel's largest |v|.
"""

from functools import partial

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext, projections, total
from ..costs import linear_attention_macs
from ..ops.random_features.maps import elu_plus_one, of_both, within
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from ..parts.masking import mask_logits, mask_tokens, masked_mean
from ..parts.rotary import rotate, rotate_reference


@full_precision
def rala(q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
    """Linear attention with weighted keys and rotations; positions refer to the whole grid, for every `key_mask`."""
    phi_q, phi_k = of_both(elu_plus_one, q, k)
    q_bar = masked_mean(phi_q, key_mask)[:, :, None] * q.shape[-1] ** -0.5
    alpha = mask_logits(q_bar @ phi_k.mT, key_mask).softmax(-1).mT  # divided by N, like the normaliser
    turn = partial(rotate, grid=grid, endpoint=True)
    y = linear_attention(phi_q, alpha * phi_k, v, "sum", rotate=turn, key_mask=key_mask)
    bound = 2 * mask_tokens(v, key_mask).abs().amax(2, keepdim=True)
    return within(y, bound)


def rala_reference(q, k, v, *, grid):
    """`rala` as a dense matrix of weights."""
    N, (phi_q, phi_k) = k.shape[2], (x.exp().where(x < 0, x + 1) for x in (q, k))
    logits = (phi_q.mean(2, keepdim=True) * phi_k).sum(-1) / q.shape[-1] ** 0.5
    alpha = N * logits.exp() / logits.exp().sum(-1, keepdim=True)
    weights = phi_q @ phi_k.mT * alpha[:, :, None]
    turned_q, turned_k = (rotate_reference(x, grid, endpoint=True) for x in (phi_q, phi_k))
    turned = turned_q @ turned_k.mT * alpha[:, :, None]
    y, bound = turned / N @ v / (weights.mean(-1, keepdim=True) + 1e-6), 2 * v.abs().amax(2, keepdim=True)
    return torch.minimum(torch.maximum(y, -bound), bound)


class Rala(Attention):
    prefix_tokens = "plain"
    has_positions = True  # rotations depend on positions
    local_by_head = False
    has_gate = True

    class Config(Options):
        local: bool = local_option(True)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        macs = linear_attention_macs(context, context.head_dim) + context.num_tokens * context.dim
        return total(projections(context, 1), Cost(0, macs))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return rala(q, k, v, grid=grid, key_mask=key_mask).to(v.dtype)
