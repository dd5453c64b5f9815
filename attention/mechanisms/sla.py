"""Sparse-linear attention (Zhang et al. 2025, arXiv:2509.24006): softmax on some blocks, linear attention on others.

By the products of mean queries and mean keys, each block of queries puts the blocks of keys of its head into three
classes, without gradient. Those of the largest products are critical, a share of the least, in whole blocks, is
negligible, and the rest is marginal. With phi the softmax over a token's channels,

    y_n = softmax attention to the prefix tokens and the critical blocks + A o_n + b,
    o_n = sum_m phi(q_n) . phi(k_m) v_m / sum_m phi(q_n) . phi(k_m)  over the tokens m of marginal blocks,

where the learned map A, b of a head's channels, shared by heads, is zero at first. o_n is 0 if no block is marginal.
Blocks are windows of the grid. Those that do not fill it are padded.
Cost: 2 N k w^2 C + 2 N (d + 1) C + (N / w^2)^2 (d + 2) C + N d C multiply-accumulates, the last for the learned map.

The released code (branch SLA-1) has blocks of 64 consecutive tokens, a share of them critical and none negligible. On
its main branch critical blocks are in o_n too.
"""

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, up_to_side
from ..ops.joint_softmax.op import gathered_logits, mix, prefix_term
from ..options import Options, fit_option, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, Windows, split_prefix
from ..parts.masking import mask_tokens, of_grid
from .bilevel_routing import follow


def sla(
    q: Tensor, k: Tensor, v: Tensor, *, blocks: Windows, topk: int, negligible: float, learned: nn.Module
) -> Tensor:
    """Attention to `topk` critical blocks, at most all, and `learned` of linear attention to marginal ones.

    negligible: share of the blocks, rounded down, that are skipped.
    """
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    queries, keys, values = (blocks.partition(x) for x in (q, k, v))
    ranking, mask = ranked(q, k, blocks), blocks.mask(q.device)
    critical, place, g = ranking[..., :topk], ranking.argsort(-1), blocks.num_windows
    count: Any = g  # of blocks with tokens that count; others stand last
    if mask is not None:
        count = g if blocks.key_mask is None else mask.any(-1).sum(-1)[..., None, None].double()  # as Python's floats
        mask = follow(mask.expand(*q.shape[:2], g, -1)[..., None], critical).mT  # (B, h, g, 1, e)
    marginal = (place >= topk) & (place < count - negligible * count // 1)
    terms = [(gathered_logits(queries, follow(keys, critical), mask), follow(values, critical))]
    exact = blocks.reverse(mix([*terms, *prefix_term(queries, k_prefix, v_prefix)]))
    return exact + learned(linear(q, k, v, marginal.to(v.dtype), blocks).to(v.dtype))


@full_precision
def ranked(q: Tensor, k: Tensor, blocks: Windows) -> Tensor:
    """Blocks of keys from the most to the least important of each block of queries: (B, h, g, g) int64."""
    scores, mask = blocks.mean(q.detach()) @ blocks.mean(k.detach()).mT, blocks.mask(q.device)
    if mask is not None:
        scores = scores.masked_fill(~mask.any(-1)[..., None, :], -torch.inf)  # blocks without a token that counts
    return scores.argsort(dim=-1, descending=True, stable=True)


@full_precision
def linear(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, blocks: Windows) -> Tensor:
    """Linear attention of each block of queries to blocks of keys with weights (B, h, g, g): (B, h, N, d)."""
    with_one = blocks.partition(mask_tokens(F.pad(v, (0, 1), value=1), blocks.key_mask))  # 0 for tokens that are none
    states = blocks.partition(k.softmax(-1)).mT @ with_one  # (B, h, g, d, d + 1)
    sums = (weights @ states.flatten(3)).view_as(states)
    y = blocks.reverse(blocks.partition(q.softmax(-1)) @ sums)
    return y[..., :-1] / y[..., -1:].clamp(min=1e-12)


def sla_reference(q, k, v, *, blocks, topk, negligible, learned):
    """`sla`, image by image, head by head, block by block."""
    y, P, counts = torch.zeros_like(q), k.shape[2] - q.shape[2], blocks.key_mask
    members = [index[(index >= 0) & (counts is None or counts[0, index])] for index in blocks.indices(q.device)]
    members = [tokens for tokens in members if len(tokens)]
    last = len(members) - int(negligible * len(members))
    for b, j, tokens in product(range(len(q)), range(q.shape[1]), members):
        queries, keys, values = q[b, j, tokens], k[b, j], v[b, j]
        order = torch.stack([queries.mean(0) @ keys[P + m].mean(0) for m in members]).argsort(descending=True)
        classes = order[:topk], order[topk:last]
        critical, marginal = ([P + int(m) for r in ranks for m in members[r]] for ranks in classes)
        critical = [*range(P), *critical]
        weights = (queries @ keys[critical].mT / q.shape[-1] ** 0.5).softmax(-1)
        kernel = queries.softmax(-1) @ keys[marginal].softmax(-1).mT
        share = kernel / kernel.sum(-1, keepdim=True).clamp(min=1e-12)
        y[b, j, tokens] = weights @ values[critical] + learned(share @ values[marginal])
    return y


class Sla(Attention):
    prefix_tokens = "exact"
    size_option = "topk"

    class Config(Options):
        block_size: int = option(7, "side w in tokens of a block", low=1)
        topk: int = option(1, "critical blocks k of each block of queries; all of them on a grid that has fewer", low=1)
        negligible: float = option(0.1, "share of blocks, rounded down, that is skipped if not critical", low=0, high=1)
        local: bool = local_option()
        fit: bool = fit_option(block_size=up_to_side)

        def blocks(self, grid: Grid, key_mask: Tensor | None = None) -> Windows:
            return Windows(grid, (self.block_size, self.block_size), key_mask=key_mask)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.learned = nn.Linear(context.head_dim, context.head_dim)
        for parameter in self.learned.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        g, w = (blocks := config.blocks(context.grid)).num_windows, blocks.num_queries
        C, d, with_one = context.dim, context.head_dim, context.dim + context.num_heads
        exact = (2 * g * w * w * min(config.topk, g) + g * g) * C
        linear = (2 * g * w + g * g) * d * with_one + context.num_tokens * d * C
        return Cost(d * (d + 1), exact + linear)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        blocks, c = self.config.blocks(grid, of_grid(key_mask, q.shape[2])), self.config
        return sla(q, k, v, blocks=blocks, topk=c.topk, negligible=c.negligible, learned=self.learned)
