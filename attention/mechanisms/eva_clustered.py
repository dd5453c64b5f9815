"""EVA by clustering (Zheng et al. 2023, arXiv:2302.04542): a window exactly, c clusters of keys by control variates.

Like `eva` with one sample, but groups follow the keys instead of the grid (section 7): keys are clustered like the
queries of clustered attention (Vyas et al. 2020), by Lloyd's algorithm on the bits of a hash. A group's landmark and
proposal come from the means of its keys and of the queries of the same tokens. Queries do not attend to empty clusters.
Cost: 2 N (|E| + c) C + bits N C multiply-accumulates, the last for the hash. The clustering counts bits.
Paper: EVA section 7.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..costs import group_cost, local_cost, num_padded, total, window_cost
from ..ops.group_values.landmarks import Landmarks, Mean, Transform, landmark_option
from ..ops.joint_softmax.op import attended_in_window, joint_softmax, mix_reference, summary_logits
from ..options import Options, fit_option, local_option, option, released_option
from ..parts.features import full_precision, scale, upcast, xi
from ..parts.geometry import Grid, Layout, Windows, split_prefix
from ..parts.position import BiasKind
from ..parts.sampling import Noise, noise_option, redrawn
from ..window_options import position_bias, window_option, windows_on
from .clustered import cluster_mean, cluster_sum, hamming_clusters, hash_bits


@full_precision
def eva_clustered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cluster: Tensor,
    k_tilde: Tensor,
    omega: Tensor,
    bias: Tensor | None = None,
    *,
    windows: Windows,
    log_count: bool = False,
) -> Tensor:
    """One softmax over the window and the clusters (eq. 16).

    cluster: cluster of every key of the grid, (B, h, N) int64 below c. k_tilde, omega: landmark and sample of each
    cluster, (B, h, c, d). log_count: see `eva`.
    """
    N, c = q.shape[2], k_tilde.shape[2]
    keys, values = scale(split_prefix(k, N)[1]), split_prefix(v, N)[1]
    own = omega.gather(2, cluster[..., None].expand_as(keys))
    log_xi = (keys * torch.sub(own, keys, alpha=0.5)).sum(-1)  # (B, h, N)
    least = torch.full_like(omega[..., 0], -torch.inf)
    largest = least.scatter_reduce(2, cluster, log_xi.detach(), "amax")
    features = (log_xi - largest.gather(2, cluster)).exp()[..., None]
    sums = cluster_sum(torch.cat([features * values, features, torch.ones_like(features)], -1), cluster, c)
    sums, mass, count = sums.split([values.shape[-1], 1, 1], -1)
    empty = count == 0
    beta = sums / mass.masked_fill(empty, 1)
    prior = count.log() if log_count else torch.zeros_like(count).masked_fill(empty, -torch.inf)
    logits = summary_logits(windows.partition(q), k_tilde[:, :, None]) + prior.mT[:, :, None]
    return joint_softmax(q, k, v, bias, values=beta[:, :, None], logits=logits, windows=windows)


def eva_clustered_reference(q, k, v, cluster, k_tilde, omega, bias=None, *, windows, log_count=False):
    """`eva_clustered`, cluster by cluster and query by query."""
    (N, d), y = q.shape[2:], torch.zeros_like(q)
    logits, values = [], []
    for c in range(k_tilde.shape[2]):
        members = cluster == c
        features = xi(scale(k[:, :, -N:]), omega[:, :, c, None]) * members
        mass = torch.where(members.any(-1), features.sum(-1), 1)
        values.append((features[:, :, None] @ v[:, :, -N:])[:, :, 0] / mass[..., None])
        weight = members.sum(-1, keepdim=True) if log_count else members.any(-1, keepdim=True)
        logits.append((q * k_tilde[:, :, c, None]).sum(-1) * d**-0.5 + weight.to(q.dtype).log())
    logits, values = torch.stack(logits, -1), torch.stack(values, 2)  # (B, h, N, c), (B, h, c, d)
    for n in range(N):
        y[:, :, n] = mix_reference(attended_in_window(n, q, k, v, bias, windows=windows), (logits[:, :, n], values))
    return y


def one_set_of_means(x: Tensor, cluster: Tensor, num_clusters: int) -> Tensor:
    """`cluster_mean` in the form that `Landmarks` takes, shared by all queries: (B, h, 1, c, d), in the type of x."""
    return cluster_mean(upcast(x), cluster, num_clusters)[:, :, None].to(x.dtype)


class EvaClustered(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its clusters are those of all keys"
    size_option = "num_landmarks"
    eval_planes: Tensor

    class Config(Options):
        num_samples: ClassVar[int] = 1  # samples per group, for `Landmarks`
        window_size: int = option(7, "side of the window E in tokens; 0: no window", low=0)
        num_landmarks: int = option(49, "number of clusters C", low=1)
        released: bool = released_option()
        layout: Layout | None = window_option("layout")
        overlap: int = window_option("overlap")
        position_bias: BiasKind | None = window_option("position_bias")
        num_bits: int = option(63, "hash bits of a key", low=1, high=63)
        num_iterations: int = option(10, "iterations of Lloyd's algorithm", low=0, high=1000)
        landmark_transform: Transform = landmark_option("landmark_transform")
        mu: Mean = landmark_option("mu")
        mu_scale: float | None = landmark_option("mu_scale")
        log_count: bool = option(False, "add log |P_c| to a cluster's logit")
        noise: Noise | None = noise_option()
        local: bool = local_option()
        fit: bool = fit_option()

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.refuse_above(context, "num_landmarks")
        self.position_bias = position_bias(self, context)
        self.landmarks = Landmarks(
            config, self.num_heads, self.head_dim, partial(one_set_of_means, num_clusters=config.num_landmarks)
        )
        self.register_buffer("eval_planes", torch.randn(self.num_heads, config.num_bits, self.head_dim + 1))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        hash_macs = context.num_tokens * config.num_bits * context.dim
        queries = num_padded(windows_on(config, context.grid))
        groups = group_cost(context, config, (1, config.num_landmarks, 0), queries)
        return total(window_cost(context, config), groups, Cost(0, hash_macs), local_cost(cls, context, config))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        config, k_grid = self.config, split_prefix(k, q.shape[2])[1]
        planes = redrawn(self.training, self.eval_planes, q)
        cluster = hamming_clusters(hash_bits(k_grid, planes), config.num_landmarks, config.num_iterations)
        k_tilde, _, omega = (x[:, :, 0] for x in self.landmarks(q, k_grid, cluster))
        options: dict[str, Any] = {"windows": windows_on(config, grid), "log_count": config.log_count}
        y = eva_clustered(q, k, v, cluster, k_tilde, omega[:, :, :, 0], self.position_bias(), **options)
        return y.to(v.dtype)
