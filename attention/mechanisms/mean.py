"""Mean attention: every token attends to all tokens alike, a control that tells what weights of attention are worth.

    y_n = 1/N sum_m v_m.

This is softmax attention with queries or keys of zero, and `synthesizer` with factors of zero; queries and keys do not
exist. All tokens of an image get the same vector. Prefix tokens are ordinary tokens.
Cost: - 2 N C^2 multiply-accumulates: two projections less; sums are not counted.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..options import Options, local_option
from ..parts.geometry import Grid
from ..parts.masking import masked_mean


def mean(v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Mean of the values (B, h, N, d) over the tokens that count, at every token."""
    return masked_mean(v, key_mask)[:, :, None].expand_as(v)


def mean_reference(v):
    """`mean`, as a matrix of weights."""
    N = v.shape[2]
    return torch.full((N, N), 1 / N, dtype=v.dtype) @ v


class Mean(Attention):
    prefix_tokens = "plain"
    num_projections = 1

    class Config(Options):
        local: bool = local_option()

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, 0)

    def attend(self, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return mean(v, key_mask=key_mask)
