"""Linformer (Wang et al. 2020, arXiv:2006.04768): keys and values projected from N tokens to c by learned matrices.

    k_hat = P_1 k,   v_hat = P_2 v,   y_n = softmax(q_n . k_hat / sqrt(d)) v_hat,   P_1, P_2: c x N.

The matrices belong to one grid; for another grid, their rows are resampled as images of the grid.
Cost: 4 N c C multiply-accumulates; 2 N c parameters per layer, N c or h times as many as they are shared.
Papers: EVA Table 3, LARA Table 8 'Linformer'.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..options import Options, attn_drop_option, local_option, option
from ..parts.geometry import Grid, resample, split_prefix
from .softmax import softmax, softmax_reference

MATRICES = {"heads": (2, 1), "kv": (1, 1), "none": (2, None), "layers": (1, 1)}
"""Sharing -> numbers of projections that a layer has: for keys and values, and for heads (None: one per head)."""


def linformer(q: Tensor, k: Tensor, v: Tensor, projection: Tensor, attn_drop: float = 0.0) -> Tensor:
    """Attention to prefix tokens and to projected keys and values.

    projection: (1 or 2, 1 or h, c, N): one for keys and values or one each, one for all heads or one each.
    """
    projection = projection.to(v.dtype).expand(2, v.shape[1], -1, -1)
    projected: list[Tensor] = []
    for p, x in zip(projection, (k, v), strict=True):
        prefix, tokens = split_prefix(x, q.shape[2])
        projected.append(torch.cat([prefix, torch.einsum("hcn,bhnd->bhcd", p, tokens)], 2))
    k_hat, v_hat = projected
    return softmax(q, k_hat, v_hat, attn_drop)


def linformer_reference(q, k, v, projection, attn_drop=0.0):
    """`linformer`, head by head."""
    y, P = [], k.shape[2] - q.shape[2]
    for head in range(q.shape[1]):
        of_head = projection[:, head if projection.shape[1] > 1 else 0]
        k_hat, v_hat = (
            torch.cat([x[:, head, :P], p @ x[:, head, P:]], 1) for p, x in ((of_head[0], k), (of_head[-1], v))
        )
        y.append(softmax_reference(q[:, head], k_hat, v_hat, attn_drop))
    return torch.stack(y, 1)


class Linformer(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its learned projection is of all positions of the grid"
    size_option = "num_landmarks"

    class Config(Options):
        num_landmarks: int = option(49, "rows c of the projections", low=1)
        sharing: Literal["heads", "kv", "none", "layers"] = option(
            "heads",
            "users of one projection: heads: all heads; kv: also keys and values; layers: also all layers of a "
            "grid; none: a projection for each head, of keys and of values",
        )
        local: bool = local_option()
        attn_drop: float = attn_drop_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        owner = self
        if config.sharing == "layers":
            owner = context.shared.setdefault(("linformer", config.num_landmarks, context.grid), self)
        # A tuple hides the owner from torch: its parameter occurs once in the state dict and in a weight average.
        self.owner = (owner,)
        if owner is self:
            count, heads = MATRICES[config.sharing]
            N = context.grid[0] * context.grid[1]
            self.projection = nn.Parameter(torch.empty(count, heads or self.num_heads, config.num_landmarks, N))
            nn.init.normal_(self.projection, std=config.num_landmarks**-0.5)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C = context.num_tokens, context.dim
        c, (parts, heads) = config.num_landmarks, MATRICES[config.sharing]
        parameters = parts * (heads or context.num_heads) * c * N  # with sharing: layers, for all layers together
        return Cost(parameters, 2 * N * c * C + 2 * N * c * C)  # projections, attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        # With more columns, entries become smaller, so that the sums over tokens stay the same.
        (owner,), N = self.owner, self.grid[0] * self.grid[1]
        projection = resample(owner.projection, self.grid, grid) * (N / (grid[0] * grid[1]))
        return linformer(q, k, v, projection, self.attn_drop)
