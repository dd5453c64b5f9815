"""Cross-covariance attention (El-Nouby et al. 2021, arXiv:2106.09681): channels attend to channels.

Each channel of queries and keys is a unit vector over the N tokens; their d x d products, times a learned temperature
per head, pass a softmax and mix the channels of every token's values. No weight depends on a pair of tokens, so there
is no limit in which this is softmax attention. XCiT's convolution between tokens belongs to its block, not to this
mechanism.
Cost: 2 N d C multiply-accumulates; linear in N. h parameters.
Papers: LARA Table 8 'XCIT'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..options import Options, attn_drop_option, local_option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from ..parts.masking import mask_tokens


@full_precision
def xca(
    q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, attn_drop: float = 0.0, *, key_mask: Tensor | None = None
) -> Tensor:
    """Attention between channels, whose logits are cosines times the temperature (h) of the head."""
    q, k = mask_tokens(q, key_mask), mask_tokens(k, key_mask)
    products = F.normalize(q, dim=-2).mT @ F.normalize(k, dim=-2)  # (B, h, d, d)
    weights = F.dropout((products * temperature[:, None, None]).softmax(-1), attn_drop)
    return v @ weights.mT


def xca_reference(q, k, v, temperature, attn_drop=0.0):
    """`xca`, channel by channel."""
    rows = []
    for a in range(q.shape[-1]):
        cosines = [F.cosine_similarity(q[..., a], k[..., b], dim=-1) for b in range(k.shape[-1])]  # each (B, h)
        rows.append((torch.stack(cosines, -1) * temperature[:, None]).softmax(-1))
    weights = F.dropout(torch.stack(rows, -2), attn_drop)
    return torch.einsum("bhij,bhnj->bhni", weights, v)


class Xca(Attention):
    prefix_tokens = "plain"

    class Config(Options):
        local: bool = local_option()
        attn_drop: float = attn_drop_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.temperature = nn.Parameter(torch.ones(context.num_heads))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(context.num_heads, 2 * context.num_tokens * context.head_dim * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return xca(q, k, v, self.temperature, self.attn_drop, key_mask=key_mask).to(v.dtype)
