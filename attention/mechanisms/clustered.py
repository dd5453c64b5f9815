"""Clustered attention (Vyas et al. 2020, arXiv:2007.04825): J clusters of queries attend at once, then on k top keys.

Queries are clustered by the Hamming distance of their hash bits, and every cluster attends once, with the mean q_hat_j
of its queries: A_j = softmax(q_hat_j . k / sqrt(d)). The improved form (i-clustered) lets each query redistribute the
mass m_hat_j that its cluster gives to its k likeliest keys T_j by weights of its own:

    y_n = m_hat_j sum_{T_j} softmax_{T_j}(q_n . k_m / sqrt(d)) v_m + sum_{m not in T_j} A_jm v_m,   j = cluster(n)

Cost: 2 N (J + k) C + bits N C multiply-accumulates, the last for the hash; linear in N. The clustering counts bits,
which is no part of the cost; it does so by products of signs, h bits N J for each iteration.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_tokens
from ..options import Options, fit_option, local_option, option
from ..parts.features import full_precision, scale
from ..parts.geometry import Grid, gather_tokens
from ..parts.sampling import redrawn


@full_precision
def clustered(q: Tensor, k: Tensor, v: Tensor, cluster: Tensor, *, num_clusters: int, num_top_keys: int = 0) -> Tensor:
    """Attention of cluster means, improved on the `num_top_keys` likeliest keys of each cluster.

    cluster: cluster of every query, (B, h, N) int64 below `num_clusters`; clusters may be empty.
    """
    q, members = q * q.shape[-1] ** -0.5, cluster[..., None]
    attn = (cluster_mean(q, cluster, num_clusters) @ k.mT).softmax(-1)  # (B, h, J, N)
    if not num_top_keys:
        return (attn @ v).gather(2, members.expand_as(q))
    mass, top = attn.topk(min(num_top_keys, k.shape[2]), -1)
    of_cluster = torch.cat([attn.scatter(-1, top, 0.0) @ v, mass.sum(-1, keepdim=True)], -1)
    of_query = of_cluster.gather(2, members.expand(-1, -1, -1, of_cluster.shape[-1]))
    rest, mass = of_query.split([v.shape[-1], 1], -1)
    top = top.gather(2, members.expand(-1, -1, -1, top.shape[-1]))  # (B, h, N, k)
    weights = (gather_tokens(k, top) @ q[..., None]).softmax(3)
    return torch.addcmul(rest, mass, (weights.mT @ gather_tokens(v, top)).squeeze(3))


def clustered_reference(q, k, v, cluster, *, num_clusters, num_top_keys=0):
    """`clustered`, query by query."""
    y, s = torch.zeros_like(q), q.shape[-1] ** -0.5
    for b, h, n in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        q_hat = q[b, h, cluster[b, h] == cluster[b, h, n]].mean(0)
        attn = (s * k[b, h] @ q_hat).softmax(-1)
        top = attn.argsort(descending=True)[:num_top_keys]
        rest = torch.ones_like(attn).index_fill(0, top, 0) * attn
        own = (s * k[b, h, top] @ q[b, h, n]).softmax(-1)
        y[b, h, n] = attn[top].sum() * (own @ v[b, h, top]) + rest @ v[b, h]
    return y


def cluster_sum(x: Tensor, cluster: Tensor, num_clusters: int) -> Tensor:
    """Sums of tokens (B, h, N, d) over the members of each cluster, by the `cluster` of every token: (B, h, J, d)."""
    members = cluster[..., None].expand(*cluster.shape, x.shape[-1])
    sums = torch.zeros(*x.shape[:2], num_clusters, x.shape[-1], dtype=x.dtype, device=x.device)
    return sums.scatter_add(2, members, x)


def cluster_mean(x: Tensor, cluster: Tensor, num_clusters: int) -> Tensor:
    """Means of tokens (B, h, N, d) over each cluster's members, (B, h, J, d); zero for an empty cluster."""
    one = torch.ones((), dtype=x.dtype, device=x.device)
    count = cluster_sum(one.expand(*cluster.shape, 1), cluster, num_clusters)
    return cluster_sum(x, cluster, num_clusters) / count.clamp(min=1)


@torch.no_grad()
@full_precision
def hash_bits(q: Tensor, planes: Tensor) -> Tensor:
    """Side of every plane on which a query lies: q (B, h, N, d), planes [a, b] (h, bits, d + 1) -> a . q' > b.

    Returns:
        (B, h, N, bits), in memory plane by plane.
    """
    return (planes[..., :-1] @ scale(q).mT > planes[..., -1:]).mT


@torch.no_grad()
@full_precision
def hamming_clusters(bits: Tensor, num_clusters: int, num_iterations: int) -> Tensor:
    """Lloyd's algorithm in Hamming space: bits (B, h, N, b) -> cluster (B, h, N) int64.

    Centroids start at tokens spread evenly over the raster order and move to the majority of their members' bits, ties
    to 0; centroids without members stay. A token's nearest centroid shares the most bits with it, which a product of
    signs counts exactly. FlopCounterMode leaves the product out, since it is in place, as the mechanism's cost does.
    """
    N, shape, bits = bits.shape[2], bits.shape[:3], bits.mT.flatten(0, 1)
    start = torch.arange(num_clusters, device=bits.device) * N // num_clusters
    # Bits of centroids are 0 or -1, for their complements. Votes are 2 N + 2 times a sign, less 2, so that n members
    # tie at -2 n; without votes, a bit stays.
    signs, votes = torch.where(bits, 1.0, -1.0), torch.where(bits, 2 * N, -2 * N - 4)
    centroid, shared = votes[..., start] >> 63, signs.new_empty(len(signs), num_clusters, N)
    for iteration in range(num_iterations + 1):
        cluster = shared.baddbmm_(centroid.to(signs.dtype).mT, signs, beta=0).max(1).indices
        if iteration < num_iterations:
            centroid = centroid.scatter_add(2, cluster[:, None].expand_as(votes), votes) >> 63
    return cluster.view(shape)


class Clustered(Attention):
    prefix_tokens = "plain"
    has_positions = True  # clusters start at positions
    key_mask_refusal = "its clusters are those of all queries"
    size_option = "num_clusters"
    eval_planes: Tensor

    class Config(Options):
        num_clusters: int = option(49, "clusters of queries", low=1)
        num_top_keys: int = option(32, "keys k that each query weighs anew (improved clustered); 0: clustered", low=0)
        num_bits: int = option(63, "hash bits of a query", low=1, high=63)
        num_iterations: int = option(10, "iterations of Lloyd's algorithm", low=0, high=1000)
        local: bool = local_option()
        fit: bool = fit_option(num_clusters=up_to_tokens, num_top_keys=up_to_tokens)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.register_buffer("eval_planes", torch.randn(self.num_heads, config.num_bits, self.head_dim + 1))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C = context.num_tokens, context.dim
        attention = 2 * N * (config.num_clusters + min(config.num_top_keys, N)) * C
        return Cost(0, N * config.num_bits * C + attention)  # the first term is the hash

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        planes, config = redrawn(self.training, self.eval_planes, q), self.config
        cluster = hamming_clusters(hash_bits(q, planes), config.num_clusters, config.num_iterations)
        y = clustered(q, k, v, cluster, num_clusters=config.num_clusters, num_top_keys=config.num_top_keys)
        return y.to(v.dtype)
