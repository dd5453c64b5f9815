"""Identity attention: every token attends to itself alone, a control that tells what attention is worth at all.

    y_n = v_n,

so that the layer is two linear maps of each token, and a network of such layers never mixes tokens before its pooling.
MetaFormer (Yu et al. 2022, arXiv:2111.11418) has the identity as its simplest token mixer, without projections. Here
values and output are projected, as in any other mechanism; queries and keys do not exist. A class token would receive
nothing from the image, and is refused.
Cost: - 2 N C^2 multiply-accumulates: two projections less.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..options import Options
from ..parts.geometry import Grid


def identity(v: Tensor) -> Tensor:
    """Values (B, h, N, d), as they are."""
    return v


def identity_reference(v):
    """`identity`, as a matrix of weights."""
    return torch.eye(v.shape[2], dtype=v.dtype) @ v


class Identity(Attention):
    num_projections = 1

    class Config(Options):
        pass

    @classmethod
    def without_order(cls, config: Config) -> bool:
        return True

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, 0)

    def attend(self, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        return identity(v)
