"""Linear spatial-reduction attention (Wang et al. 2022, arXiv:2106.13797): keys and values from a grid of M bins.

The grid, of any size, is averaged to 7 x 7 bins; then follow a 1 x 1 convolution, LayerNorm, GELU and softmax over the
49 bins, in every stage of PVT-v2-Li (whose MLPs have a further ReLU: the model's `mlp_relu`).
Cost: M C^2 - 2 (N - M) C^2 + 2 N M C multiply-accumulates, M = 49: the convolution, less what the projection of keys
and values saves, and attention.
Paper: PVT-v2 'Li'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..options import Options, attn_drop_option, option
from ..parts.geometry import Grid, split_prefix
from .softmax import softmax
from .sra import project_reduced, reducing_convolution


def linear_sra(x: Tensor, convolution: nn.Module, *, grid: Grid, pool_size: int) -> Tensor:
    """Averages tokens (B, N, C) over bins, then applies a 1 x 1 convolution: (B, pool_size^2, C).

    Bins have the edges floor(i*H/pool_size), ceil((i+1)*H/pool_size); if pool_size does not divide H, bins overlap.
    """
    return convolution(F.adaptive_avg_pool2d(x.mT.unflatten(2, grid), pool_size)).flatten(2).mT


def linear_sra_reference(x, convolution, *, grid, pool_size):
    """`linear_sra`, bin by bin."""
    (H, W), P, pooled = grid, pool_size, []
    for i in range(P):
        for j in range(P):
            rows, columns = range(i * H // P, -(-(i + 1) * H // P)), range(j * W // P, -(-(j + 1) * W // P))
            mean = torch.stack([x[:, y * W + z] for y in rows for z in columns]).mean(0)
            pooled.append(mean @ convolution.weight[:, :, 0, 0].mT + convolution.bias)
    return torch.stack(pooled, 1)


class LinearSra(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its bins average every token of the grid"
    size_option = "pool_size"

    class Config(Options):
        pool_size: int = option(7, "side of the pooled grid in bins", low=1, high=64)
        attn_drop: float = attn_drop_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.sr = reducing_convolution(context.dim, 1)
        self.norm = nn.LayerNorm(context.dim, eps=1e-5)

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """(B, P + N, C) -> queries (B, h, P + N, d); keys and values (B, h, P + pool_size^2, d)."""
        prefix, tokens = split_prefix(x, grid[0] * grid[1])
        reduced = linear_sra(tokens, self.sr, grid=grid, pool_size=self.config.pool_size)
        return project_reduced(self.qkv, x, torch.cat([prefix, F.gelu(self.norm(reduced))], 1), self.num_heads)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, M, C = context.num_tokens, config.pool_size**2, context.dim
        convolution, saved = M * C * C, 2 * (N - M) * C * C  # saved in the projection of keys and values
        return Cost(C * C + 3 * C, convolution - saved + 2 * N * M * C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return softmax(q, k, v, self.attn_drop)
