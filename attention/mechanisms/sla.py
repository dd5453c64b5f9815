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

`router` is that of SLA2 (Zhang et al. 2026, arXiv:2602.12675). Learned maps, the identity at first, are applied to mean
queries and mean keys, and y_n = alpha s_n + (1 - alpha) o_n, or s_n if no block is marginal, with s_n the softmax
attention above and a learned alpha for each head, 0.5 at first. Training, while the maps need gradients, weights blocks
in place of choosing them: m = sigmoid(10 product + lambda), whose sum over the blocks is k (Eq. 16, 17), multiplies the
weights of a block in s_n, and 1 - m those in o_n, at the cost of softmax attention and linear attention. With
`train.freeze=blocks.*.router`, the paper's second stage, and in evaluation, blocks are chosen. Cost: 2 (N / w^2) d C in
place of N d C. The paper has an alpha for each block of a fixed grid, no negligible blocks, products of few bits, and
in algorithm 2 a softmax of the products over sqrt(d). It has released no code.
"""

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext, up_to_side
from ..ops.joint_softmax.op import gathered_logits, mix, prefix_term, summary_logits
from ..options import Options, fit_option, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, Windows, split_prefix
from ..parts.masking import mask_tokens, of_grid
from .bilevel_routing import follow


def sla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    router: Tensor | None = None,
    alpha: Tensor | None = None,
    *,
    blocks: Windows,
    topk: int,
    negligible: float,
    learned: nn.Module | None = None,
    soft: bool = False,
) -> Tensor:
    """Attention to `topk` critical blocks, at most all, and linear attention to marginal ones.

    Args:
        router: differences of the maps of mean queries and mean keys from the identity, (2, d, d).
        alpha: share of softmax attention in each head, (h,), with a router.
        negligible: share of the blocks, rounded down, that are skipped.
        learned: the map A, b, if there is no router. soft: True if blocks are weighted, not chosen.
    """
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    queries, keys, values = (blocks.partition(x) for x in (q, k, v))
    scores, mask, g = importance(q, k, router, blocks=blocks), blocks.mask(q.device), blocks.num_windows
    ranking = scores.argsort(dim=-1, descending=True, stable=True)
    place, attended = ranking.argsort(-1), ranking[..., :topk]
    count: Any = g  # of blocks with tokens that count; others stand last
    if blocks.key_mask is not None:
        count = (scores > -torch.inf).sum(-1, keepdim=True).double()  # as Python's floats
    kept = place < count - negligible * count // 1
    marginal = (place >= topk) & kept
    weights = marginal.to(v.dtype)
    if soft or topk >= g:
        keys, values = (x.flatten(2, 3)[:, :, None] for x in (keys, values))
        logits, mask = summary_logits(queries, keys), None if mask is None else mask.flatten(-2)[..., None, None, :]
    else:
        logits, values = gathered_logits(queries, follow(keys, attended)), follow(values, attended)
        mask = None if mask is None else follow(mask.expand(*q.shape[:2], g, -1)[..., None], attended).mT
    logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    if soft:
        log_odds = soft_topk(scores, place < topk)
        weights = torch.sigmoid(-log_odds) * kept
        logits = logits + F.logsigmoid(log_odds).repeat_interleave(blocks.num_queries, -1)[..., None, :]
    exact = mix([(logits, values), *prefix_term(queries, k_prefix, v_prefix)])
    other = linear(q, k, v, weights, blocks).to(v.dtype)
    if learned is not None:
        return blocks.reverse(exact + learned(other))
    assert alpha is not None, "a router comes with alpha"
    share = torch.where(marginal.any(-1), alpha[:, None], 1)[..., None, None].to(v.dtype)
    return blocks.reverse(other + share * (exact - other))


@full_precision
def importance(q: Tensor, k: Tensor, router: Tensor | None, *, blocks: Windows) -> Tensor:
    """Products of each block's mean query with mean keys, (B, h, g, g); -inf for blocks without a token that counts."""
    (q_bar, k_bar), mask = (blocks.mean(x) for x in (q, k)), blocks.mask(q.device)
    if router is not None:
        q_bar, k_bar = q_bar + q_bar @ router[0].mT, k_bar + k_bar @ router[1].mT
    scores = q_bar @ k_bar.mT
    return scores if mask is None else scores.masked_fill(~mask.any(-1)[..., None, :], -torch.inf)


@full_precision
def soft_topk(scores: Tensor, top: Tensor) -> Tensor:
    """Log-odds of weights sigmoid(scores / 0.1 + lambda), whose sum over (..., g) is the number of finite scores in
    `top`, the largest of g (SLA2, Eq. 17).
    """
    x, top = (scores - scores.amax(-1, keepdim=True)) / 0.1, top & (scores > -torch.inf)

    def excess(z: Tensor) -> Tensor:  # of the sum; 1 - m, not m, of those in `top`, so that small terms count
        return torch.where(top, -torch.sigmoid(-z), torch.sigmoid(z)).sum(-1, keepdim=True)

    with torch.no_grad():
        high = 40 - x.where(x > -torch.inf, 0).amin(-1, keepdim=True)
        low = torch.full_like(high, -40)
        for _ in range(30):
            middle = (low + high) / 2
            above = excess(x + middle) > 0
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    z = x + high
    for _ in range(2):  # Newton's steps, through which lambda has its first and second derivatives
        slope = (torch.sigmoid(z) * torch.sigmoid(-z)).sum(-1, keepdim=True)
        z = z - excess(z) / slope.clamp(min=torch.finfo(z.dtype).tiny)
    return z


@full_precision
def linear(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, blocks: Windows) -> Tensor:
    """Linear attention of each block of queries to blocks of keys with weights (B, h, g, g): (B, h, g, w, d)."""
    with_one = blocks.partition(mask_tokens(F.pad(v, (0, 1), value=1), blocks.key_mask))  # 0 for tokens that are none
    states = blocks.partition(k.softmax(-1)).mT @ with_one  # (B, h, g, d, d + 1)
    sums = (weights @ states.flatten(3)).view_as(states)
    y = blocks.partition(q.softmax(-1)) @ sums
    return y[..., :-1] / y[..., -1:].clamp(min=1e-12)


def sla_reference(q, k, v, router=None, alpha=None, *, blocks, topk, negligible, learned=None, soft=False):
    """`sla`, image by image, head by head, block by block."""
    y, P, counts = torch.zeros_like(q), k.shape[2] - q.shape[2], blocks.key_mask
    members = [index[(index >= 0) & (counts is None or counts[0, index])] for index in blocks.indices(q.device)]
    members = [tokens for tokens in members if len(tokens)]
    own = torch.cat([torch.full((len(tokens),), i) for i, tokens in enumerate(members)])  # each token's block
    tokens_of_blocks, last = torch.cat(members), len(members) - int(negligible * len(members))
    maps = torch.eye(q.shape[-1], dtype=q.dtype) + (torch.zeros(2, 1, 1) if router is None else router)
    for b, j, tokens in product(range(len(q)), range(q.shape[1]), members):
        queries, means = q[b, j, tokens], torch.stack([k[b, j, P + m].mean(0) for m in members])
        scores = (means @ maps[1].mT) @ (maps[0] @ queries.mean(0))
        order = scores.argsort(descending=True)
        m = torch.zeros_like(scores).index_fill(0, order[:topk], 1)
        m = soft_topk(scores, m > 0).sigmoid() if soft else m
        keys, values = (torch.cat([x[b, j, :P], x[b, j, P + tokens_of_blocks]]) for x in (k, v))
        weights = (queries @ keys.mT / q.shape[-1] ** 0.5).softmax(-1) * F.pad(m[own], (P, 0), value=1)  # Eq. 5 of SLA2
        exact = weights / weights.sum(-1, keepdim=True) @ values
        kernel = queries.softmax(-1) @ keys[P:].softmax(-1).mT * (1 - m).index_fill(0, order[last:], 0)[own]
        other = kernel / kernel.sum(-1, keepdim=True).clamp(min=1e-12) @ values[P:]
        share = 1 if router is None or last <= topk else alpha[j]
        y[b, j, tokens] = exact + learned(other) if router is None else share * exact + (1 - share) * other
    return y


class Sla(Attention):
    prefix_tokens = "exact"
    size_option = "topk"

    class Config(Options):
        block_size: int = option(7, "side w in tokens of a block", low=1)
        topk: int = option(1, "critical blocks k of each block of queries; all of them on a grid that has fewer", low=1)
        negligible: float = option(0.1, "share of blocks, rounded down, that is skipped if not critical", low=0, high=1)
        router: bool = option(
            False, "learned choice of critical blocks, and a learned share alpha in place of the map A, b (SLA2)"
        )
        local: bool = local_option()
        fit: bool = fit_option(block_size=up_to_side)

        def blocks(self, grid: Grid, key_mask: Tensor | None = None) -> Windows:
            return Windows(grid, (self.block_size, self.block_size), key_mask=key_mask)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        if config.router:
            self.router = nn.ParameterList(torch.zeros(context.head_dim, context.head_dim) for _ in range(2))
            self.alpha = nn.Parameter(torch.zeros(context.num_heads))
            return
        self.learned = nn.Linear(context.head_dim, context.head_dim)
        for parameter in self.learned.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        g, w = (blocks := config.blocks(context.grid)).num_windows, blocks.num_queries
        C, d, with_one = context.dim, context.head_dim, context.dim + context.num_heads
        exact = (2 * g * w * w * min(config.topk, g) + g * g) * C
        linear = (2 * g * w + g * g) * d * with_one
        if config.router:
            return Cost(2 * d * d + context.num_heads, exact + linear + 2 * g * d * C)
        return Cost(d * (d + 1), exact + linear + g * w * d * C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        blocks, c = self.config.blocks(grid, of_grid(key_mask, q.shape[2])), self.config
        options: dict[str, Any] = {"blocks": blocks, "topk": c.topk, "negligible": c.negligible}
        if not c.router:
            return sla(q, k, v, learned=self.learned, **options)
        of_queries, of_keys = self.router[0], self.router[1]
        soft = self.training and (of_queries.requires_grad or of_keys.requires_grad)
        return sla(q, k, v, torch.stack([of_queries, of_keys]), self.alpha.sigmoid(), soft=soft, **options)
