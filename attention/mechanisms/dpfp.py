"""DPFP (Schlag et al. 2021, arXiv:2102.11174): 2 nu d products of rectified coordinates as features.

The deterministic parameter-free projection,

    phi(x) = [r * roll(r, 1), ..., r * roll(r, nu)],   r = ReLU([x, -x]),

gives non-negative, sparse features for linear attention.
Cost: 4 N nu d C multiply-accumulates; linear in N.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid


@full_precision
def dpfp(q: Tensor, k: Tensor, v: Tensor, *, nu: int, key_mask: Tensor | None = None) -> Tensor:
    """Linear attention with the features of `projection`; 0 for a query without weights."""
    return linear_attention(projection(q, nu), projection(k, nu), v, key_mask=key_mask)


def projection(x: Tensor, nu: int) -> Tensor:
    """Features (..., 2 d nu) of vectors (..., d)."""
    r = torch.cat([x, -x], -1).relu()
    return torch.cat([r * r.roll(shift, -1) for shift in range(1, nu + 1)], -1)


def dpfp_reference(q, k, v, *, nu):
    """`dpfp`, feature by feature."""
    r_q, r_k = (torch.cat([x.relu(), (-x).relu()], -1) for x in (q, k))
    kernel, width = 0, r_q.shape[-1]
    for shift in range(1, nu + 1):
        for i in range(width):
            phi_q, phi_k = (r[..., i] * r[..., (i - shift) % width] for r in (r_q, r_k))
            kernel = kernel + phi_q[..., :, None] * phi_k[..., None, :]
    return kernel @ v / kernel.sum(-1, keepdim=True).clamp(min=1e-6)


class Dpfp(Attention):
    prefix_tokens = "plain"
    size_option = "nu"

    class Config(Options):
        nu: int = option(1, "rolls: 2 d nu features per head", low=1)
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        if config.nu >= 2 * self.head_dim:
            self.refuse("nu", config.nu, f"rolls repeat from twice head_dim on; at most {2 * self.head_dim - 1}")

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, linear_attention_macs(context, 2 * config.nu * context.head_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return dpfp(q, k, v, nu=self.config.nu, key_mask=key_mask).to(v.dtype)
