"""Magnitude-aware linear attention (Fan et al. 2025, arXiv:2507.00698): weights that sharpen as a query grows.

With phi = elu + 1, w_nm = phi(q_n) . phi(k_m) / sqrt(d) and z_n the mean of w_nm over the N keys, a weight is

    (1 + 1 / z_n) w_nm / N - z_n / N,   y_n = the sum of weighted values + local term,

times a linear map of the layer's input. In ordinary linear attention, w_nm / (N z_n), the length of phi(q_n) cancels.
In w_nm, but not in z_n, features are rotated by the row and column of their tokens, as in `rala`. Without rotation the
weights of a query sum to one; with it they need not. They may be negative. Outputs grow faster than queries, so that
inputs without a norm can exceed fp16. The local term is a depthwise convolution of the values. Prefix tokens are not
rotated and have no local term. The factor 1 / (N sqrt(d)) of the products, which decides the balance of both terms, is
that of the released code.
Cost: N C^2 + 2 N d C + 26 N C multiply-accumulates, the first term for the gate.
"""

from functools import partial

from torch import Tensor

from ..base import Attention, Cost, LayerContext, projections, total
from ..costs import linear_attention_macs
from ..ops.random_features.maps import elu_plus_one, of_both
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from ..parts.masking import masked_mean
from ..parts.rotary import rotate, rotate_reference


@full_precision
def mala(q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
    """Linear attention with a factor and an offset for every query; positions refer to the whole grid."""
    phi_q, phi_k = of_both(elu_plus_one, q, k)
    phi_q = phi_q * q.shape[-1] ** -0.5
    z = phi_q @ masked_mean(phi_k, key_mask)[..., None]
    turn = partial(rotate, grid=grid, endpoint=True)
    y = linear_attention(phi_q, phi_k, v, "none", rotate=turn, key_mask=key_mask)
    count = k.shape[2] if key_mask is None else key_mask.sum(1)[:, None, None, None]
    return y / count * (1 + 1 / (z + 1e-6)) - z * masked_mean(v, key_mask)[:, :, None]


def mala_reference(q, k, v, *, grid):
    """`mala` as a dense matrix of weights."""
    N, (phi_q, phi_k) = k.shape[2], (x.exp().where(x < 0, x + 1) for x in (q, k))
    z = (phi_q @ phi_k.mT / q.shape[-1] ** 0.5).mean(-1, keepdim=True)
    turned_q, turned_k = (rotate_reference(x, grid, endpoint=True) for x in (phi_q, phi_k))
    w = turned_q @ turned_k.mT / q.shape[-1] ** 0.5
    return ((1 + 1 / (z + 1e-6)) * w / N - z / N) @ v


class Mala(Attention):
    prefix_tokens = "plain"
    has_positions = True  # rotations depend on positions
    local_by_head = False
    has_gate = True

    class Config(Options):
        local: bool = local_option(True)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return total(projections(context, 1), Cost(0, linear_attention_macs(context, context.head_dim)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return mala(q, k, v, grid=grid, key_mask=key_mask).to(v.dtype)
