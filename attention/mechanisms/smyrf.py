"""SMYRF (Daras et al. 2020, arXiv:2010.05315): softmax within clusters of c tokens that hashing finds, in r rounds.

Queries and keys are mapped to one sphere, on which near points have large products, projected on a random direction,
sorted, and cut into clusters of equal size; the i-th cluster of queries attends to the i-th cluster of keys. Rounds use
different directions and are weighted by their normalisers Lambda:

    y_n = sum_r softmax_r(Lambda_nr) o_nr,   o_nr = softmax over the keys of n's cluster in round r.

A pair that meets in two rounds counts twice.
Cost: 2 r N c C multiply-accumulates, 2 r N (d + 2) h for the hash, and a sort.
Paper: Scatterbrain Table 1 'SMYRF'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_tokens
from ..options import Options, attn_drop_option, fit_option, local_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, gather_tokens
from ..parts.hashing import at_ranks, cluster_mask, hash_clusters, ranks
from ..parts.sampling import gaussian, redrawn


@full_precision
def smyrf(q: Tensor, k: Tensor, v: Tensor, directions: Tensor, *, cluster_size: int, attn_drop: float = 0.0) -> Tensor:
    """Softmax attention within hashed clusters, in full precision, because a rounded key may fall in another cluster.

    directions: directions of the hash, one per round, (h, r, d + 2).
    """
    N, d = v.shape[2:]
    of_q, of_k = hash_clusters(q, k, directions, cluster_size)
    logits = gather_tokens(q * q.shape[-1] ** -0.5, of_q) @ gather_tokens(k, of_k).mT  # (B, h, r, g, c, c)
    if N % cluster_size:
        logits = logits.masked_fill(~cluster_mask(N, cluster_size, q.device)[:, None], -torch.inf)
    y = F.dropout(logits.softmax(-1), attn_drop) @ gather_tokens(v, of_k)
    y, log_mass = at_ranks(torch.cat([y, logits.logsumexp(-1, keepdim=True)], -1), ranks(of_q, N)).split([d, 1], -1)
    return (log_mass.softmax(2) * y).sum(2)


def smyrf_reference(q, k, v, directions, *, cluster_size, attn_drop=0.0):
    """`smyrf` by dense masks, round by round."""
    numerator = denominator = 0
    for r in range(directions.shape[1]):
        logits = q @ k.mT * q.shape[-1] ** -0.5
        weights = torch.where(same_cluster(q, k, directions[:, r], cluster_size), logits.exp(), 0)
        denominator = denominator + weights.sum(-1, keepdim=True)
        numerator = numerator + F.dropout(weights, attn_drop) @ v
    return numerator / denominator


def same_cluster(q: Tensor, k: Tensor, direction: Tensor, size: int) -> Tensor:
    """Mask (B, h, N, N) of pairs whose clusters belong together along `direction` (h, d + 2), by the paper's text."""
    norms = [(x**2).sum(-1, keepdim=True) for x in (q, k)]
    M2 = norms[0].max(2, keepdim=True).values + norms[1].max(2, keepdim=True).values
    zero = torch.zeros_like(norms[0])
    F_q, G_k = torch.cat([q, zero, (M2 - norms[0]) ** 0.5], -1), torch.cat([k, (M2 - norms[1]) ** 0.5, zero], -1)
    hashes = [(x * direction[:, None]).sum(-1) for x in (F_q, G_k)]
    of_q, of_k = ((x[..., None] > x[..., None, :]).sum(-1) // size for x in hashes)  # rank // size
    return of_q[..., None] == of_k[..., None, :]


def cluster_macs(context: LayerContext, size: int, num_rounds: int) -> int:
    """MACs of the hash, logits and values of clusters of `size` tokens, the last one padded, in all rounds."""
    N, C, h = context.num_tokens, context.dim, context.num_heads
    padded = N + -N % size
    return num_rounds * (2 * N * (C + 2 * h) + 2 * padded * size * C)


class Smyrf(Attention):
    prefix_tokens = "plain"
    key_mask_refusal = "its clusters of equal size are cut from all tokens"
    size_option = "cluster_size"
    directions: Tensor

    class Config(Options):
        cluster_size: int = option(49, "tokens per cluster", low=1)
        num_rounds: int = option(2, "rounds of hashing", low=1)
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(cluster_size=up_to_tokens)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        shape = self.num_heads, config.num_rounds, self.head_dim + 2
        self.register_buffer("directions", gaussian("iid", shape, self.qkv.weight))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        return Cost(0, cluster_macs(context, config.cluster_size, config.num_rounds))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        directions = redrawn(self.training, self.directions, q)
        return smyrf(q, k, v, directions, cluster_size=self.config.cluster_size, attn_drop=self.attn_drop).to(v.dtype)
