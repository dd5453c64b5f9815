"""Hydra attention (Bolya et al. 2022, arXiv:2209.07484): as many heads as channels, by the cosine kernel.

    y_n = q_n / |q_n| * sum_m k_m / |k_m| * v_m,

with products channel by channel and norms over all C channels; the network's number of heads has no effect. The sum is
not normalised, so that the output grows with the number of tokens. The state is one vector.
Cost: 2 N C multiply-accumulates; linear in N and in C.

The paper's listing divides by norms without a floor; here the floor is 1e-12.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..ops.random_features.op import linear_attention
from ..options import Options, local_option
from ..parts.features import full_precision
from ..parts.geometry import Grid


@full_precision
def hydra(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Linear attention of one channel per head with unit queries and keys, without a normaliser."""
    heads = q.shape[1], q.shape[3]
    q, k = (x / torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True).clamp(min=1e-12) for x in (q, k))
    q, k, v = (x.mT.flatten(1, 2)[..., None] for x in (q, k, v))  # (B, C, N, 1): heads of one channel
    return linear_attention(q, k, v, "none", key_mask=key_mask)[..., 0].unflatten(1, heads).mT


def hydra_reference(q, k, v):
    """`hydra`, token by token."""
    length_q, length_k = (sum((x**2).sum(-1).unbind(1)) ** 0.5 for x in (q, k))  # (B, N)
    state = 0
    for m in range(k.shape[2]):
        state = state + k[:, :, m] * v[:, :, m] / length_k[:, m, None, None].clamp(min=1e-12)
    return torch.stack([q[:, :, n] * state / length_q[:, n, None, None].clamp(min=1e-12) for n in range(q.shape[2])], 2)


class Hydra(Attention):
    prefix_tokens = "plain"

    class Config(Options):
        local: bool = local_option()

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, 2 * context.num_tokens * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return hydra(q, k, v, key_mask=key_mask).to(v.dtype)
