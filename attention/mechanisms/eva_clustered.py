"""EVA by clustering (Zheng et al. 2023, arXiv:2302.04542): a window exactly, c clusters of keys by control variates.

Like `eva` with one sample, but groups follow the keys instead of the grid (section 7): keys are clustered like the
queries of clustered attention (Vyas et al. 2020), by Lloyd's algorithm on the bits of a hash. A group's landmark and
proposal come from the means of its keys and of the queries of the same tokens. Queries do not attend to empty clusters.
Cost: 2 N (|E| + c) C + bits N C multiply-accumulates, the last for the hash; for the clustering see `clustered`.
Paper: EVA section 7.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, total, up_to_side, up_to_tokens
from ..costs import group_cost, num_padded, window_cost
from ..ops.group_values.landmarks import Landmarks, Mean, Transform, landmark_option
from ..ops.joint_softmax.op import attended_in_window, joint_softmax, mix_reference
from ..ops.kernels import first_order, with_fast_path
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
) -> Tensor:
    """One softmax over the window and the clusters (eq. 16).

    cluster: cluster of every key of the grid, (B, h, N) int64 below c. k_tilde, omega: landmark and sample of each
    cluster, (B, h, c, d).
    """
    k_grid, v_grid = (split_prefix(x, q.shape[2])[1] for x in (k, v))
    y = cluster_values(k_grid, v_grid, omega, cluster)
    beta, filled = y[..., :-1], y[..., -1:].detach()  # 0 for an empty cluster, otherwise 1
    logits = filled.log().mT[:, :, None]
    return joint_softmax(q, k, v, bias, k_tilde[:, :, None], beta[:, :, None], logits, windows=windows)


def averages(k: Tensor, v: Tensor, omega: Tensor, cluster: Tensor) -> tuple[Tensor, ...]:
    """`cluster_values`, and what its gradients need.

    The features exp(-|omega - k'|^2 / 2) are xi(k', omega) up to a factor of the cluster, and divided by its largest.
    """
    far = torch.sub(omega.gather(2, cluster[..., None].expand_as(k)), k, alpha=k.shape[-1] ** -0.25)
    log_xi, largest = far.square().sum(-1) * -0.5, omega.new_empty(omega.shape[:-1])  # (B, h, N), (B, h, c)
    largest = largest.scatter_reduce(2, cluster, log_xi.detach(), "amax", include_self=False)
    features, v = (log_xi - largest.gather(2, cluster)).exp()[..., None], F.pad(v, (0, 1), value=1.0)
    sums = cluster_sum(features * v, cluster, omega.shape[2])
    mass = sums[..., -1:].clamp(min=0.5)  # at least the largest feature, 1; an empty cluster has none
    return sums / mass, mass, far, features, v


class ClusterValues(torch.autograd.Function):
    """`cluster_values` with gradients by hand."""

    @staticmethod
    def forward(ctx, k, v, omega, cluster):
        y, *kept = averages(k, v, omega, cluster)
        ctx.save_for_backward(cluster, y, *kept)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        cluster, y, mass, far, features, v = ctx.saved_tensors
        dsums, scale = dy / mass, far.shape[-1] ** -0.25
        dsums[..., -1:].sub_((dsums * y).sum(-1, keepdim=True))
        of_token = dsums.gather(2, cluster[..., None].expand_as(v)).mul_(features)
        dk = (of_token * v).sum(-1, keepdim=True).mul_(scale) * far
        return dk, of_token[..., :-1], cluster_sum(dk, cluster, y.shape[2]).div_(-scale), None


@with_fast_path(ClusterValues.apply)
def cluster_values(k: Tensor, v: Tensor, omega: Tensor, cluster: Tensor) -> Tensor:
    """Random-feature averages of the values (B, h, N, d) of each cluster and of ones, (B, h, c, d + 1); zero for an
    empty cluster. See `eva_clustered`.
    """
    return averages(k, v, omega, cluster)[0]


def eva_clustered_reference(q, k, v, cluster, k_tilde, omega, bias=None, *, windows):
    """`eva_clustered`, cluster by cluster and query by query."""
    (N, d), y = q.shape[2:], torch.zeros_like(q)
    logits, values = [], []
    for c in range(k_tilde.shape[2]):
        members = cluster == c
        features = xi(scale(k[:, :, -N:]), omega[:, :, c, None]) * members
        mass = torch.where(members.any(-1), features.sum(-1), 1)
        values.append((features[:, :, None] @ v[:, :, -N:])[:, :, 0] / mass[..., None])
        filled = members.any(-1, keepdim=True).to(q.dtype)
        logits.append((q * k_tilde[:, :, c, None]).sum(-1) * d**-0.5 + filled.log())
    logits, values = torch.stack(logits, -1), torch.stack(values, 2)  # (B, h, N, c), (B, h, c, d)
    for n in range(N):
        y[:, :, n] = mix_reference(attended_in_window(n, q, k, v, bias, windows=windows), (logits[:, :, n], values))
    return y


def one_set_of_means(x: Tensor, cluster: Tensor, num_clusters: int) -> Tensor:
    """`cluster_mean`, shared by all queries: (B, h, 1, c, d), in the type of x."""
    return cluster_mean(upcast(x), cluster, num_clusters)[:, :, None].to(x.dtype)


def pooled_before(means: Tensor, _: Any) -> Tensor:
    """The `pool` of `Landmarks` for tokens that are means of clusters already; a function that pickle finds."""
    return means


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
        noise: Noise | None = noise_option()
        local: bool = local_option()
        fit: bool = fit_option(num_landmarks=up_to_tokens, window_size=up_to_side, overlap=up_to_side)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.position_bias = position_bias(self, context)
        self.landmarks = Landmarks(config, self.num_heads, self.head_dim, pool=pooled_before)
        self.register_buffer("eval_planes", torch.randn(self.num_heads, config.num_bits, self.head_dim + 1))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        hash_macs = context.num_tokens * config.num_bits * context.dim
        queries = num_padded(windows_on(config, context.grid))
        groups = group_cost(context, config, (1, config.num_landmarks, 0), queries)
        return total(window_cost(context, config), groups, Cost(0, hash_macs))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        config, k_grid = self.config, split_prefix(k, q.shape[2])[1]
        planes = redrawn(self.training, self.eval_planes, q)
        cluster = hamming_clusters(hash_bits(k_grid, planes), config.num_landmarks, config.num_iterations)
        q_bar, k_bar = one_set_of_means(torch.cat([q, k_grid], -1), cluster, config.num_landmarks).chunk(2, -1)
        k_tilde, _, omega = (x.squeeze(2) for x in self.landmarks(q_bar, k_bar, None))
        bias, windows = self.position_bias(), windows_on(config, grid)
        return eva_clustered(q, k, v, cluster, k_tilde, omega.squeeze(3), bias, windows=windows).to(v.dtype)
