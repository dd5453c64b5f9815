"""Linear attention (Katharopoulos et al. 2020, arXiv:2006.16236): a kernel of finite features, phi = elu + 1.

    y_n = sum_m phi(q_n) . phi(k_m) v_m / sum_m phi(q_n) . phi(k_m),

so that all queries share the sums over keys. Queries and keys are not scaled. EVA Table 5 calls it 'ELU'. In causal
attention the sums run along with the queries.
Cost: 2 N d C multiply-accumulates; linear in N.
Papers: EVA Table 5 'ELU' (language).
"""

import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs
from ..ops.random_features.maps import elu_plus_one, of_both
from ..ops.random_features.op import linear_attention, weighted_values_reference
from ..options import Options, causal_option, local_option
from ..parts.features import full_precision
from ..parts.geometry import Grid


@full_precision
def linear(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """Linear attention with the features elu + 1; 0 for a query whose weights vanish."""
    phi_q, phi_k = of_both(elu_plus_one, q, k)
    return linear_attention(phi_q, phi_k, v, causal=causal, key_mask=key_mask)


def linear_reference(q, k, v, *, causal=False):
    """`linear` as a dense matrix of weights."""
    return weighted_values_reference((F.elu(q) + 1) @ (F.elu(k) + 1).mT, v, causal=causal)


class Linear(Attention):
    prefix_tokens = "plain"

    class Config(Options):
        local: bool = local_option()
        causal: bool = causal_option()

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, linear_attention_macs(context, context.head_dim, config.causal))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return linear(q, k, v, causal=self.config.causal, key_mask=key_mask).to(v.dtype)
