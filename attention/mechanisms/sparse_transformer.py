"""Sparse Transformer (Child et al. 2019, arXiv:1904.10509): own block of b tokens, and the last c of every other.

This is the fixed pattern without a causal mask. Tokens in raster order form blocks of b; the last c positions of a
block, n mod b >= b - c, summarise it. A query attends, in one softmax, to its own block and to the summary positions of
every other block. Child et al. split the two sets over heads or layers and mask the future; this is the union.
Cost: 2 N (b + (N/b - 1) c) C multiply-accumulates: N^2 / b at fixed b, N^1.5 where b is a row of the grid.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, at_most
from ..ops.joint_softmax.op import mix, prefix_term, shared_logits
from ..options import Options, attn_drop_option, fit_option, local_option, option
from ..parts.features import product
from ..parts.geometry import Grid, Windows, split_prefix


def sparse_transformer(
    q: Tensor, k: Tensor, v: Tensor, *, block_size: int, num_summary: int, attn_drop: float = 0.0
) -> Tensor:
    """Softmax over a query's block of b tokens and all summaries, the last c positions of each block.

    A last block of fewer than b tokens has only the summary positions that exist in it.
    """
    blocks = Windows((1, q.shape[2]), (1, block_size))
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    sizes = [block_size - num_summary, num_summary]  # parts of a block, so that no key occurs twice
    queries = blocks.partition(q)  # (B, h, g, b, d)
    (own_k, shared_k), (own_v, shared_v) = (blocks.partition(x).split(sizes, 3) for x in (k, v))
    own = product(queries * q.shape[-1] ** -0.5, own_k.mT)
    shared = shared_logits(queries, shared_k.flatten(2, 3))
    valid = blocks.mask(q.device)
    if valid is not None:
        valid_own, valid_shared = valid.split(sizes, 1)
        own = own.masked_fill(~valid_own[:, None], -torch.inf)
        shared = shared.masked_fill(~valid_shared.flatten(), -torch.inf)
    terms = [(own, own_v), (shared, shared_v.flatten(2, 3)[:, :, None]), *prefix_term(queries, k_prefix, v_prefix)]
    return blocks.reverse(mix(terms, attn_drop))


def sparse_transformer_reference(q, k, v, *, block_size, num_summary, attn_drop=0.0):
    """`sparse_transformer` as softmax under a dense mask."""
    N, b, c = q.shape[2], block_size, num_summary
    visible = torch.tensor([[m // b == n // b or m % b >= b - c for m in range(N)] for n in range(N)])
    visible = F.pad(visible, (k.shape[2] - N, 0), value=True)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    return F.dropout(weights, attn_drop) @ v


class SparseTransformer(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its summary tokens have fixed positions"
    size_option = "block_size"

    class Config(Options):
        block_size: int | None = option(None, "tokens b of a block, in raster order; null: a row of the grid", low=1)
        num_summary: int = option(1, "last positions c of every block that all queries attend to", low=1)
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(
            block_size=at_most(lambda x, _: x.num_tokens, "larger than the {most} tokens of the {H}x{W} grid"),
            num_summary=at_most(lambda x, c: min(c.block_size or x.grid[1], x.num_tokens), "a block has {most} tokens"),
        )

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, b, c = context.num_tokens, config.block_size or context.grid[1], config.num_summary
        padded = N + -N % b
        return Cost(0, 2 * padded * (b - c + padded // b * c) * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        b, c = self.config.block_size or grid[1], self.config.num_summary
        if c > b and not self.config.fit:
            self.refuse("num_summary", c, f"a block has {b} tokens; at most {b}")
        return sparse_transformer(q, k, v, block_size=b, num_summary=min(b, c), attn_drop=self.attn_drop)
