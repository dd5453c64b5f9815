"""Bi-level routing attention (Zhu et al. 2023, arXiv:2303.08810): tokens attend to the k regions most like their own.

Each of S x S regions chooses the k regions whose mean keys have the largest products with its mean query over all
channels; its tokens attend to the tokens of these regions by one softmax (algorithm 1). The choice has no gradient. The
local term is a depthwise convolution of the values, with a filter for every channel.
Cost: 2 N^2 k C / S^2 + S^4 C + 25 N C multiply-accumulates.

Regions that do not fill the grid are padded. Padding is neither a key nor part of a mean here. In the released code it
is a key (one version pads tokens, another queries, keys and values), and logits are divided by sqrt(C), not sqrt(d).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..ops.joint_softmax.op import gathered_logits, mix, prefix_term
from ..options import Options, attn_drop_option, local_option, option, released_option
from ..parts.features import full_precision
from ..parts.geometry import Grid, Windows, gather_tokens, split_prefix
from ..parts.masking import of_grid


def bilevel_routing(q: Tensor, k: Tensor, v: Tensor, *, regions: Windows, topk: int, attn_drop: float = 0.0) -> Tensor:
    """Attention of every region to the tokens of its `topk` regions, at most all."""
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    queries, mask, routes = regions.partition(q), regions.mask(q.device), route(q, k, regions, topk)
    keys, values = (follow(regions.partition(x), routes) for x in (k, v))
    if mask is not None:
        mask = follow(mask.expand(q.shape[0], 1, *mask.shape[-2:])[..., None], routes).mT  # (B, 1, g, 1, e)
    terms = [(gathered_logits(queries, keys, mask), values), *prefix_term(queries, k_prefix, v_prefix)]
    return regions.reverse(mix(terms, attn_drop))


@full_precision
def route(q: Tensor, k: Tensor, regions: Windows, topk: int) -> Tensor:
    """Chooses the regions that each region attends to, from q, k (B, h, N, d); best first, (B, 1, g, topk) int64."""
    q_bar, k_bar = (regions.mean(x.detach()).transpose(1, 2).flatten(2) for x in (q, k))  # (B, g, C)
    scores, mask = q_bar @ k_bar.mT, regions.mask(q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask.any(-1), -torch.inf)  # regions without a token that counts
    return scores.argsort(dim=-1, descending=True, stable=True)[:, None, :, :topk]


def follow(x: Tensor, routes: Tensor) -> Tensor:
    """Gathers, from tokens of regions (B, h, g, w, d), those that each region attends to, (B, h, g, topk w, d)."""
    regions = gather_tokens(x.flatten(3), routes.expand(-1, x.shape[1], -1, -1))
    return regions.unflatten(4, x.shape[3:]).flatten(3, 4)


def bilevel_routing_reference(q, k, v, *, regions, topk, attn_drop=0.0):
    """`bilevel_routing`, image by image, region by region."""
    y, P, counts = torch.zeros_like(q), k.shape[2] - q.shape[2], regions.key_mask
    members = [index[(index >= 0) & (counts is None or counts[0, index])] for index in regions.indices(q.device)]
    members = [tokens for tokens in members if len(tokens)]
    for b in range(len(q)):
        means = [(q[b, :, tokens].mean(1).flatten(), k[b, :, P + tokens].mean(1).flatten()) for tokens in members]
        for tokens, (q_bar, _) in zip(members, means, strict=True):
            best = torch.stack([q_bar @ k_bar for _, k_bar in means]).argsort(descending=True)[:topk]
            attended = [*range(P), *(P + m for r in best for m in members[r])]
            weights = (q[b, :, tokens] @ k[b, :, attended].mT / q.shape[-1] ** 0.5).softmax(-1)
            y[b, :, tokens] = F.dropout(weights, attn_drop) @ v[b, :, attended]
    return y


class BilevelRouting(Attention):
    prefix_tokens = "exact"
    local_by_head = False
    size_option = "topk"

    class Config(Options):
        num_regions: int = option(
            7, "regions S along each side; fewer where regions of ceil(H / S) x ceil(W / S) tokens fill it", low=1
        )
        topk: int = option(4, "regions k that each region attends to; all of them on a grid that has fewer", low=1)
        released: bool = released_option()
        scale: Literal["head_dim", "dim"] | None = option(
            None,
            "channels whose square root divides the logits: those of a head, or of all heads; null: head_dim, as "
            "released dim",
            chosen=lambda c: "dim" if c.released else "head_dim",
        )
        local: bool = local_option(True)
        attn_drop: float = attn_drop_option()

        def regions(self, grid: Grid, key_mask: Tensor | None = None) -> Windows:
            return Windows(grid, (-(-grid[0] // self.num_regions), -(-grid[1] // self.num_regions)), key_mask=key_mask)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        if config.topk > config.num_regions**2:
            self.refuse("topk", config.topk, f"of {config.num_regions**2} regions; at most so many")

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        g, w = (regions := config.regions(context.grid)).num_windows, regions.num_queries
        macs = (2 * g * w * w * min(config.topk, g) + g * g) * context.dim
        return Cost(0, macs)

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        q, *others = super().project(x, grid)
        return q * self.num_heads**-0.5 if self.config.scale == "dim" else q, *others

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        regions = self.config.regions(grid, of_grid(key_mask, q.shape[2]))
        return bilevel_routing(q, k, v, regions=regions, topk=self.config.topk, attn_drop=self.attn_drop)
