"""Locality-sensitive hashing: tokens sorted by a hash and cut into clusters of equal size.

A clustering is a table of token indices (..., g, c): cluster by cluster, in the order of the hash. If c does not divide
N, the last cluster is padded; `cluster_mask` marks the padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .features import full_precision
from .tables import kept_table


def asymmetric_transform(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Maps queries and keys (..., N, d) to one sphere (..., N, d + 2), on which a large product is a small distance.

    With M^2 = max ||q||^2 + max ||k||^2 over tokens, ||F(q) - G(k)||^2 = 2 (M^2 - q . k): F(q) = [q; 0; sqrt(M^2 -
    ||q||^2)], G(k) = [k; sqrt(M^2 - ||k||^2); 0] (SMYRF, Daras et al., 2020).
    """
    norms = torch.stack([q, k]).square().sum(-1, keepdim=True)
    (rest_q, rest_k), zero = (norms.amax(-2, keepdim=True).sum(0) - norms).sqrt(), torch.zeros_like(norms[0])
    return torch.cat([q, zero, rest_q], -1), torch.cat([k, rest_k, zero], -1)


@torch.no_grad()
@full_precision
def hash_clusters(q: Tensor, k: Tensor, directions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Clusters queries and keys by their ranks along random directions; clusters of equal index belong together.

    Args:
        q, k: (B, h, N, d). directions: one per round, (h, r, d + 2). size: tokens per cluster.
    Returns:
        Two clusterings (B, h, r, g, c), without gradients.
    """
    of_q, of_k = equal_clusters(directions @ torch.stack(asymmetric_transform(q, k)).mT, size)
    return of_q, of_k


def equal_clusters(order: Tensor, size: int) -> Tensor:
    """Clustering (..., g, c) into runs of `size` tokens by ascending `order` (..., N); ties keep their order."""
    index = order.argsort(dim=-1, stable=True)
    return F.pad(index, (0, -index.shape[-1] % size)).unflatten(-1, (-1, size))


@kept_table
def cluster_mask(tokens: int, size: int, device: torch.device) -> Tensor:
    """Mask of the entries of a clustering of N `tokens` that are not padding: (g, c) bool."""
    return (torch.arange(tokens + -tokens % size, device=device) < tokens).view(-1, size)


def ranks(clusters: Tensor, tokens: int) -> Tensor:
    """The position of every token in the order of the clusters: (..., g, c) -> (..., N) int64."""
    return clusters.flatten(-2)[..., :tokens].argsort(-1)


def at_ranks(y: Tensor, ranks: Tensor) -> Tensor:
    """Members of clusters (B, h, r, g, c, d) -> tokens (B, h, r, N, d), which have these `ranks` (B, h, r, N)."""
    return y.flatten(3, 4).gather(3, ranks[..., None].expand(*ranks.shape, y.shape[-1]))
