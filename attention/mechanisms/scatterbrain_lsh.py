"""Scatterbrain with a support that hashing finds (Chen et al., 2021): SMYRF's clusters exactly, random
features elsewhere. The option `support: lsh` of `scatterbrain`.

A pair that meets in several rounds counts once, so that the support is the union of all rounds' clusters. Its part of
the random features is subtracted from their sums over all tokens.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Cost, LayerContext
from attention.mechanisms.smyrf import cluster_macs, same_cluster
from attention.parts.features import full_precision, log_features, phi, scale
from attention.parts.geometry import split_prefix
from attention.parts.hashing import cluster_ids, cluster_mask, from_clusters, hash_clusters, to_clusters
from attention.window_options import windows_on


@full_precision
def scatterbrain_lsh(
    q: Tensor, k: Tensor, v: Tensor, omega: Tensor, directions: Tensor, *, cluster_size: int
) -> Tensor:
    """Hashed clusters exactly, all else by random features; a pair that meets in several rounds counts once.

    Args:
        q: (B, h, N, d). k, v: (B, h, P + N, d); prefix tokens are seen exactly. omega: samples (h, s, d).
        directions: of the hash, one per round, (h, r, d + 2).
    Returns:
        (B, h, N, d), float32 at least.
    """
    (N, d), S = q.shape[2:], omega.shape[-2]
    (k_prefix, k), (v_prefix, v) = split_prefix(k, N), split_prefix(v, N)
    log_k = log_features(scale(k), omega)
    log_q = log_features(scale(q), omega) + log_k.logsumexp(-2, keepdim=True) - math.log(S)
    log_mass = log_q.logsumexp(-1, keepdim=True)  # of the estimated row, (B, h, N, 1)
    low_q, low_k = log_q.softmax(-1), log_k.softmax(-2)  # low_q low_k^T: the estimate, row by row divided by its mass
    of_q, of_k = hash_clusters(q, k, directions, cluster_size)
    valid = cluster_mask(N, cluster_size, q.device)
    valid = valid[:, :, None] & valid[:, None]  # queries too: the shift suits them in their own cluster alone
    q = q * d**-0.5
    logits = (to_clusters(q, of_q) @ to_clusters(k, of_k).mT).masked_fill(~valid, -torch.inf)
    on_prefix = q @ k_prefix.mT
    largest = from_clusters(logits.detach().amax(-1, keepdim=True), of_q, N).amax(2)
    shift = torch.cat([largest, log_mass.detach(), on_prefix.detach()], -1).amax(-1, keepdim=True)
    low_mass = (log_mass - shift).exp()
    meetings = [to_clusters(cluster_ids(clusters, N).mT, clusters) for clusters in (of_q, of_k)]
    times = (meetings[0][..., None, :] == meetings[1][..., None, :, :]).sum(-1).clamp(min=1)
    exact = (logits - to_clusters(shift, of_q)).exp() / times
    estimate = (to_clusters(low_q, of_q) @ to_clusters(low_k, of_k).mT).masked_fill(~valid, 0) / times
    correction = (exact - to_clusters(low_mass, of_q) * estimate) @ to_clusters(v, of_k)
    sums = torch.cat([correction, exact.sum(-1, keepdim=True), estimate.sum(-1, keepdim=True)], -1)
    correction, exact, estimate = from_clusters(sums, of_q, N).sum(2).split([v.shape[-1], 1, 1], -1)
    left = (1 - estimate).clamp(min=8 * torch.finfo(estimate.dtype).eps)
    on_prefix = (on_prefix - shift).exp()
    y = low_mass * (low_q @ (low_k.mT @ v)) + correction + on_prefix @ v_prefix
    return y / (exact + low_mass * left + on_prefix.sum(-1, keepdim=True))


def scatterbrain_lsh_reference(q, k, v, omega, directions, *, cluster_size):
    """`scatterbrain_lsh` by the dense matrix A."""
    k_grid = k[:, :, -q.shape[2] :]
    estimate = phi(q, omega) @ phi(k, omega).mT / omega.shape[-2]
    exact = (q @ k.mT * q.shape[-1] ** -0.5).exp()
    support = sum(same_cluster(q, k_grid, direction, cluster_size) for direction in directions.unbind(1)) > 0
    A = torch.where(F.pad(support, (k.shape[2] - q.shape[2], 0), value=True), exact, estimate)
    return A @ v / A.sum(-1, keepdim=True)


def lsh_cost(context: LayerContext, config: Any) -> Cost:
    """Of a layer of `scatterbrain` with support lsh."""
    N, C, h, size = context.num_tokens, context.dim, context.num_heads, windows_on(config, context.grid).num_queries
    s = config.num_samples * (2 if config.features == "hyperbolic" else 1)
    features = 4 * N * s * C  # of queries and keys, sums over keys, their mean for every query
    estimates = config.num_rounds * (N + -N % size) * size * s * h  # of the pairs within clusters
    return Cost(0, features + cluster_macs(context, size, config.num_rounds) + estimates)
