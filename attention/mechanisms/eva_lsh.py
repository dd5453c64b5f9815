"""EVA by hashing (Zheng et al. 2023, arXiv:2302.04542): exact on hashed clusters, c groups along the hash.

Like `eva`, but the exact set E of a query holds the tokens that a hash finds near it (section 4.1), and groups hold
tokens that are neighbours in the order of the hash (section 7). SMYRF's hash sorts queries and keys, which are cut into
clusters of equal size; the i-th cluster of queries attends to the i-th cluster of keys, and groups are chunks of the
sorted keys. There is one round of hashing, because one softmax covers E and the groups.
Cost: 2 N (|E| + c) C multiply-accumulates with s = 1, 2 N (d + 2) h more for the hash, and a sort.
Paper: EVA sections 4.1 and 7.
"""

import itertools
from typing import Literal

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext, total, up_to_tokens
from ..costs import group_cost, num_padded, window_macs
from ..ops.group_values.landmarks import Landmarks, Mean, Pool, Transform, landmark_option
from ..options import Options, fit_option, local_option, option, released_option
from ..parts.features import full_precision
from ..parts.geometry import Grid, Windows, raster, split_prefix
from ..parts.groups import Groups, bin_counts, bins, bins_outside, up_to_bins
from ..parts.hashing import hash_clusters
from ..parts.sampling import Noise, gaussian, noise_option, redrawn
from .eva import eva, eva_reference


@full_precision
def eva_lsh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order_q: Tensor,
    order_k: Tensor,
    k_tilde: Tensor,
    mu: Tensor,
    omega: Tensor,
    *,
    groups: Groups,
    windows: Windows,
) -> Tensor:
    """`eva` along the order of a hash, in full precision, because a rounded key may fall in another cluster.

    order_q, order_k: queries and keys in the order of their hash, (B, h, N) int64. groups, windows: groups and clusters
    of that order, seen as a grid of one row.
    """
    k, v = (in_order(x, order_k) for x in (k, v))
    y = eva(in_order(q, order_q), k, v, k_tilde, mu, omega, groups=groups, windows=windows)
    return in_order(y, order_q.argsort(-1))


def eva_lsh_reference(q, k, v, order_q, order_k, k_tilde, mu, omega, *, groups, windows):
    """`eva_lsh`, image by image and head by head."""
    y, P = torch.zeros_like(q), k.shape[2] - q.shape[2]
    for b, head in itertools.product(*map(range, q.shape[:2])):
        of_q, of_k = order_q[b, head].tolist(), [*range(P), *(P + m for m in order_k[b, head].tolist())]
        tokens = (x[b, head, order][None, None] for x, order in ((q, of_q), (k, of_k), (v, of_k)))
        landmarks = (x.expand(*q.shape[:2], *x.shape[2:])[b, head][None, None] for x in (k_tilde, mu, omega))
        y[b, head, of_q] = eva_reference(*tokens, *landmarks, groups=groups, windows=windows)[0, 0]
    return y


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """Sorts the grid's tokens of (B, h, P + N, d) by this order (B, h, N); the prefix tokens stay first."""
    prefix, x = split_prefix(x, order.shape[2])
    x = x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[-1]))
    return torch.cat([prefix, x], 2) if prefix.shape[2] else x


class EvaLsh(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its clusters of equal size are cut from all tokens"
    size_option = "num_landmarks"
    directions: Tensor

    class Config(Options):
        cluster_size: int = option(49, "tokens of a cluster E", low=1)
        num_landmarks: int = option(49, "number of groups C", low=1)
        released: bool = released_option()
        partition: Literal["all", "mask"] = option(
            "all", "groups: all: chunks of the sorted keys; mask: these without E's members"
        )
        landmark_transform: Transform = landmark_option("landmark_transform")
        pool: Pool = landmark_option("pool")
        num_samples: int = landmark_option("num_samples")
        mu: Mean = landmark_option("mu")
        mu_scale: float | None = landmark_option("mu_scale")
        noise: Noise | None = noise_option()
        local: bool = local_option()
        fit: bool = fit_option(
            cluster_size=up_to_tokens, num_landmarks=lambda c, layer, _: up_to_bins(c, raster(layer.grid, "1d"))
        )

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.landmarks = Landmarks(config, self.num_heads, self.head_dim)
        self.register_buffer("directions", gaussian("iid", (self.num_heads, 1, self.head_dim + 2), self.qkv.weight))

    @staticmethod
    def clusters_and_groups(config: Config, grid: Grid, device: torch.device) -> tuple[Windows, Groups]:
        """Clusters and groups of the sorted tokens, which form a grid of one row."""
        order, c = raster(grid, "1d"), config.num_landmarks
        windows, fit = Windows(order, (1, config.cluster_size)), config.fit and config.mu != "trainable"
        groups = bins(order, bin_counts(c, order, "attention(eva_lsh).num_landmarks", fit), device)
        return windows, bins_outside(groups, windows) if config.partition == "mask" else groups

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, h = context.num_tokens, context.dim, context.num_heads
        windows, groups = cls.clusters_and_groups(config, context.grid, torch.device("meta"))
        clusters = Cost(0, 2 * N * (C + 2 * h) + window_macs(windows, C))  # the first term is the hash
        return total(clusters, group_cost(context, config, groups.members.shape, num_padded(windows)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        config, k_grid = self.config, split_prefix(k, q.shape[2])[1]
        order_q, order_k = (
            x.flatten(2) for x in hash_clusters(q, k_grid, redrawn(self.training, self.directions, q), 1)
        )
        windows, groups = self.clusters_and_groups(config, grid, q.device)
        k_tilde, mu, omega = self.landmarks(in_order(q, order_q), in_order(k_grid, order_k), groups)
        return eva_lsh(q, k, v, order_q, order_k, k_tilde, mu, omega, groups=groups, windows=windows).to(v.dtype)
