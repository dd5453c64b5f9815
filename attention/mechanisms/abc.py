"""ABC (Peng et al. 2022, arXiv:2110.02488): keys and values written into c slots by a learned softmax.

Attention with bounded-memory control, its learned MLP control: softmax attention reads the slots, which control weights
fill, Pi = softmax over tokens of a linear map of the input, c per head,

    k_hat = Pi k,   v_hat = Pi v,   y_n = softmax(q_n . k_hat / sqrt(d)) v_hat.

Takes any number of tokens in any order. In causal attention a query reads the slots as written by the tokens up to it,
and the sums that normalise Pi run along with the tokens. Gated versions are left out.
Cost: (4 + h) N c C multiply-accumulates, h N c C of them for the control.
Papers: LARA Table 4 'ABC'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..costs import mix_features_macs
from ..ops.random_features.causal import running_logits, running_mass, running_mix
from ..options import Options, causal_option, local_option, option
from ..parts.features import upcast
from ..parts.geometry import Grid, split_heads
from ..parts.linear import init_linear
from ..parts.masking import mask_logits
from .softmax import softmax, softmax_reference


def abc(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    control: Tensor,
    attn_drop: float = 0.0,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention to slots that the tokens, if causal those up to the query, write by logits `control` (B, h, N, c)."""
    control = mask_logits(upcast(control), key_mask, -2)
    if causal:
        mass = running_mass(control)
        logits = running_logits(q * q.shape[-1] ** -0.5, k, control, mass)
        weights = F.dropout(logits.softmax(-1), attn_drop)
        return running_mix(weights, control, mass, v).to(v.dtype)
    weights = control.softmax(-2).to(v.dtype).mT
    return softmax(q, weights @ k, weights @ v, attn_drop)


def abc_reference(q, k, v, control, attn_drop=0.0, *, causal=False):
    """`abc`, slot by slot; if causal, the last query of every prefix."""
    if causal:
        prefixes = ([x[:, :, : n + 1] for x in (k, v, control)] for n in range(q.shape[2]))
        return torch.cat([abc_reference(q[:, :, n, None], *x, attn_drop) for n, x in enumerate(prefixes)], 2)
    written = []
    for slot in control.unbind(-1):
        weights = (slot.exp() / slot.exp().sum(-1, keepdim=True))[..., None]
        written.append([(weights * x).sum(-2) for x in (k, v)])
    k_hat, v_hat = (torch.stack(x, -2) for x in zip(*written, strict=True))
    return softmax_reference(q, k_hat, v_hat, attn_drop)


class Abc(Attention):
    prefix_tokens = "plain"
    size_option = "num_landmarks"

    class Config(Options):
        num_landmarks: int = option(49, "slots c per head", low=1)
        local: bool = local_option()
        attn_drop: float = option(0.0, "dropout rate of the attention weights over slots", low=0, high=1)
        causal: bool = causal_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.control = init_linear(nn.Linear(context.dim, context.num_heads * config.num_landmarks))

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """(B, N, C) -> queries, keys and values (B, h, N, d), logits of the control (B, h, N, c)."""
        return *super().project(x, grid), *split_heads(self.control(x), 1, self.num_heads)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, slots = context.num_tokens, context.dim, context.num_heads * config.num_landmarks
        writing_and_reading = 2 * mix_features_macs(context, config.num_landmarks, config.causal)
        return Cost((C + 1) * slots, N * slots * C + writing_and_reading)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, control: Tensor, grid: Grid, key_mask: Tensor | None = None
    ) -> Tensor:
        return abc(q, k, v, control, self.attn_drop, causal=self.config.causal, key_mask=key_mask)
