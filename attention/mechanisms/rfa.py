"""RFA (Peng et al. 2021, arXiv:2103.02143): s trigonometric random features of unit queries and keys.

    exp(-||q^ - k^||^2 / 2) = E cos(omega . (q^ - k^)),   q^ = q / (sigma ||q||),   k^ = k / (sigma ||k||),

with a learned sigma per head. Since norms are constant, this estimates softmax attention with logits
q . k / (sigma^2 ||q|| ||k||). It differs from `performer` with trigonometric features only by the norms. The paper's
gates, for causal attention, are left out.
Cost: 6 N s C multiply-accumulates; linear in N. h parameters.
Papers: EVA Table 5 'RFA' (language).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..costs import linear_attention_macs
from ..ops.random_features.maps import of_both, waves
from ..ops.random_features.op import linear_attention, weighted_values_reference
from ..options import Options, causal_option, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid
from ..parts.sampling import gaussian, redrawn


@full_precision
def rfa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    sigma: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention with the kernel that samples omega (h, s, d) estimate, for the sigma (h) of every head."""

    def phi(x: Tensor) -> Tensor:
        return waves(F.normalize(x, dim=-1) / sigma[:, None, None] @ omega.mT)

    phi_q, phi_k = of_both(phi, q, k)
    return linear_attention(phi_q, phi_k / omega.shape[-2], v, causal=causal, key_mask=key_mask)


def rfa_reference(q, k, v, omega, sigma, *, causal=False):
    """`rfa` as a dense matrix of kernel estimates."""
    q, k = (x / x.square().sum(-1, keepdim=True).sqrt() / sigma[:, None, None] for x in (q, k))
    difference = q[..., :, None, :] - k[..., None, :, :]
    kernel = torch.einsum("bhnmd,hsd->bhnms", difference, omega).cos().mean(-1)
    return weighted_values_reference(kernel, v, causal=causal)


class Rfa(Attention):
    prefix_tokens = "plain"
    size_option = "num_samples"
    omega: Tensor

    class Config(Options):
        num_samples: int = option(64, "samples omega per head, redrawn in training", low=1)
        causal: bool = causal_option()
        local: bool = local_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.log_sigma = nn.Parameter(torch.zeros(context.num_heads))
        self.register_buffer(
            "omega", gaussian("iid", (self.num_heads, config.num_samples, self.head_dim), self.log_sigma)
        )

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        s = config.num_samples
        features = 2 * context.num_tokens * s * context.dim
        return Cost(context.num_heads, features + linear_attention_macs(context, 2 * s, config.causal))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        omega, causal = redrawn(self.training, self.omega, q), self.config.causal
        return rfa(q, k, v, omega, self.log_sigma.exp(), causal=causal, key_mask=key_mask).to(v.dtype)
