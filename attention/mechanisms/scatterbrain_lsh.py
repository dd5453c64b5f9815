"""Scatterbrain by hashing (Chen et al. 2021, arXiv:2110.15343): exact on hashed clusters, s random features elsewhere.

Like `scatterbrain`, but the support of a query is the union, over r rounds, of the clusters of c tokens that SMYRF's
hash finds for it; a pair that meets in several rounds counts once. The support's share of the random features is
subtracted from the sums over all tokens. Without the subtraction (leave_one_out: none), this is the naive sum of SMYRF
and Performer, with which the paper compares in Table 1; for that, the released code averages the two attentions.
Cost: 4 N s C + 2 r N c C + r N c s h multiply-accumulates, 2 r N (d + 2) h more for the hash, and a sort. Linear in N.
Paper: Scatterbrain section 4.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_tokens
from ..ops.random_features.maps import log_kernel, of_both
from ..options import Options, fit_option, local_option, option
from ..parts.features import full_precision, phi
from ..parts.geometry import Grid, gather_tokens, split_prefix
from ..parts.hashing import at_ranks, cluster_mask, hash_clusters, ranks
from ..parts.sampling import OmegaSampling, gaussian, omega_sampling_option, redrawn
from .scatterbrain import check_features, feature_cost, features_option, redraw_option, sample_omega, samples
from .smyrf import cluster_macs, same_cluster

LeaveOneOut = Literal["subtract", "none", "average"]


@full_precision
def scatterbrain_lsh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor | None,
    directions: Tensor,
    *,
    cluster_size: int,
    leave_one_out: LeaveOneOut = "subtract",
) -> Tensor:
    """Exact within hashed clusters, by random features elsewhere; a pair that meets in several rounds counts once.

    Args:
        omega: samples (h, s, d); None takes the features elu + 1. directions: one per round of the hash, (h, r, d + 2).
        leave_one_out: subtract: the estimates of pairs within clusters are left out. none: they count in addition to
            the exact weights. average: exact and estimated attention are normalised separately and averaged.
    """
    N, d = q.shape[2:]
    (k_prefix, k), (v_prefix, v) = split_prefix(k, N), split_prefix(v, N)
    log_q, log_k = of_both(lambda x: log_kernel(x, omega), q, k)
    log_q, low_k = log_q + (log_k.logsumexp(-2, keepdim=True) - math.log(log_k.shape[-1])), log_k.softmax(-2)
    low_shift, average = log_q.detach().amax(-1, keepdim=True), leave_one_out == "average"
    q, (of_q, of_k) = q * d**-0.5, hash_clusters(q, k, directions, cluster_size)
    of_rank, of_rank_k = ranks(torch.stack([of_q, of_k]), N)
    k, low_keys, v_own = gather_tokens(torch.cat([k, low_k, v], -1), of_k).split([d, low_k.shape[-1], v.shape[-1]], -1)
    logits, padded = gather_tokens(q, of_q) @ k.mT, None
    if N % cluster_size:  # queries too: the shift fits only in their own cluster
        valid = cluster_mask(N, cluster_size, q.device)
        padded = ~(valid[:, :, None] & valid[:, None])
        logits = logits.masked_fill(padded, -torch.inf)
    on_prefix = q @ k_prefix.mT
    largest = at_ranks(logits.detach().amax(-1, keepdim=True), of_rank).amax(2)
    shift = torch.cat([largest, on_prefix.detach(), *([] if average else [low_shift])], -1).amax(-1, keepdim=True)
    low_q = (log_q - (low_shift if average else shift)).exp()
    low, low_mass = low_q @ (low_k.mT @ v), low_q.sum(-1, keepdim=True)
    meetings = [gather_tokens(x.mT // cluster_size, y) for x, y in ((of_rank, of_q), (of_rank_k, of_k))]
    times = (meetings[0][..., None, :] == meetings[1][..., None, :, :]).sum(-1).clamp(min=1)
    weights = (logits - gather_tokens(shift, of_q)).exp() / times
    sums = [weights.sum(-1, keepdim=True)]
    if leave_one_out == "subtract":
        estimate = gather_tokens(low_q, of_q) @ low_keys.mT / times
        estimate = estimate if padded is None else estimate.masked_fill(padded, 0)
        weights, sums = weights - estimate, [*sums, estimate.sum(-1, keepdim=True)]
    of_query = at_ranks(torch.cat([weights @ v_own, *sums], -1), of_rank).sum(2)
    y, mass, *estimates = of_query.split([v.shape[-1], *[1] * len(sums)], -1)
    if k_prefix.shape[2]:  # runtimes of exported graphs disagree on empty sums
        on_prefix = (on_prefix - shift).exp()
        y, mass = y + on_prefix @ v_prefix, mass + on_prefix.sum(-1, keepdim=True)
    if average:
        return (low / low_mass + y / mass) / 2
    for estimate in estimates:
        low_mass = (low_mass - estimate).maximum(8 * torch.finfo(low_mass.dtype).eps * low_mass)
    return (low + y) / (low_mass + mass)


def scatterbrain_lsh_reference(q, k, v, omega, directions, *, cluster_size, leave_one_out="subtract"):
    """`scatterbrain_lsh` by the dense matrix A."""
    P, directions = k.shape[2] - q.shape[2], directions.unbind(1)
    support = sum(same_cluster(q, k[:, :, P:], direction, cluster_size) for direction in directions) > 0
    phi_q, phi_k = (F.elu(x) + 1 if omega is None else phi(x, omega) for x in (q, k[:, :, P:]))
    estimate = phi_q @ phi_k.mT / phi_q.shape[-1]
    estimate = F.pad(estimate.masked_fill(support, 0) if leave_one_out == "subtract" else estimate, (P, 0))
    exact = (q @ k.mT * q.shape[-1] ** -0.5).exp() * F.pad(support, (P, 0), value=True)
    if leave_one_out == "average":
        return sum(A @ v / A.sum(-1, keepdim=True) for A in (exact, estimate)) / 2
    A = exact + estimate
    return A @ v / A.sum(-1, keepdim=True)


class ScatterbrainLsh(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its clusters of equal size are cut from all tokens"
    size_option = "num_samples"
    directions: Tensor
    omega: Tensor | None

    class Config(Options):
        num_samples: int = option(96, "samples omega per head", low=1)
        cluster_size: int = option(49, "tokens c of a cluster", low=1)
        num_rounds: int = option(2, "rounds r of hashing", low=1)
        leave_one_out: LeaveOneOut = option(
            "subtract",
            "estimates within clusters: subtract: left out; none: counted too (naive sum); average: clusters and "
            "estimate are normalised apart, and averaged (released)",
        )
        features: Literal["positive", "hyperbolic", "elu"] = features_option()
        omega_sampling: OmegaSampling = omega_sampling_option()
        feature_redraw: Literal["redraw", "fixed"] = redraw_option()
        local: bool = local_option()
        fit: bool = fit_option(cluster_size=up_to_tokens)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        shape = self.num_heads, config.num_rounds, self.head_dim + 2
        self.register_buffer("directions", gaussian("iid", shape, self.qkv.weight))
        check_features(self)
        self.register_buffer("omega", sample_omega(self, self.qkv.weight))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, h, size = context.num_tokens, context.dim, context.num_heads, config.cluster_size
        s, features = feature_cost(context, config)
        features += 2 * N * s * C  # sums over keys, weighted means for every query
        estimates = config.num_rounds * (N + -N % size) * size * s * h  # for the pairs within clusters
        corrected = estimates if config.leave_one_out == "subtract" else 0
        return Cost(0, features + cluster_macs(context, size, config.num_rounds) + corrected)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        config = self.config
        omega, directions = samples(self, q), redrawn(self.training, self.directions, q)
        options: dict[str, Any] = {"cluster_size": config.cluster_size, "leave_one_out": config.leave_one_out}
        return scatterbrain_lsh(q, k, v, omega, directions, **options).to(v.dtype)
