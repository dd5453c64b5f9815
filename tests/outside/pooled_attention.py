"""Pooled attention: softmax over the means of c bins of the grid.

Cost: 2 N c C multiply-accumulates.
"""

import torch
from torch import Tensor

from attention import Attention, Grid, LayerContext, register
from attention.base import Cost
from attention.mechanisms.softmax import softmax
from attention.options import Options, option
from attention.parts.geometry import split_prefix
from attention.parts.groups import Groups, bin_counts, bins, group_mean


def pooled(q: Tensor, k: Tensor, v: Tensor, *, groups: Groups) -> Tensor:
    """Queries (B, h, N, d), keys and values (B, h, P + N, d), prefix tokens as they are -> (B, h, N, d)."""
    split = (split_prefix(x, q.shape[2]) for x in (k, v))
    return softmax(q, *(torch.cat([prefix, group_mean(x, groups)[:, :, 0]], 2) for prefix, x in split))


def pooled_reference(q, k, v, *, groups):
    """`pooled` as one would write it on paper."""
    P = k.shape[2] - q.shape[2]
    members = [index[valid] + P for index, valid in zip(groups.members[0], groups.valid[0], strict=True)]
    bins_and_prefix = [*torch.arange(P).split(1), *members] if P else members
    k_bar, v_bar = (torch.stack([x[:, :, m].mean(2) for m in bins_and_prefix], 2) for x in (k, v))
    return (q @ k_bar.mT / q.shape[-1] ** 0.5).softmax(-1) @ v_bar


@register
class Pooled(Attention):
    prefix_tokens = "exact"  # bins are those of the grid alone; without this line, class tokens are refused

    class Config(Options):
        num_landmarks: int = option(49, "number of bins C", low=1)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.groups(context.grid, torch.device("cpu"))  # refuses a count that makes no bins

    def groups(self, grid: Grid, device: torch.device) -> Groups:
        return bins(grid, bin_counts(self.config.num_landmarks, grid, "attention(pooled).num_landmarks"), device)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, 2 * context.num_tokens * config.num_landmarks * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return pooled(q, k, v, groups=self.groups(grid, q.device))
