"""EVA (Zheng et al. 2023, arXiv:2302.04542): a window exactly, and c groups of tokens by control variates.

A query attends exactly to its local window E, and to c groups of tokens P_c through one summary each: a key k_tilde_c
that represents the group in the softmax, and a random-feature estimate beta_c of the group's average value (eq. 16,
Algorithm 1):

    y_n = [sum_E exp(l_nm) v_m + sum_c exp(t_nc) beta_c] / [sum_E exp(l_nm) + sum_c exp(t_nc)]
    l_nm = q_n . k_m / sqrt(d) + bias,   t_nc = q_n . k_tilde_c / sqrt(d)
    beta_c = sum_{P_c} xi(k_m, omega_c) v_m / sum_{P_c} xi(k_m, omega_c)
    omega_c ~ N(mu_c, I),   mu_c = q_tilde_c + k_tilde_c

With s > 1 samples beta depends on the query, by self-normalised importance weights over the samples. In causal
attention (Algorithm 2) a query attends to the earlier tokens of its block and the groups before it.
Cost: 2 N (|E| + c) C multiply-accumulates with s = 1, 2 N C more for beta and 2 c C d for the landmarks; linear in N.
Papers: EVA Tables 1-3, 6 (|E| and C), 8 (all other options).
"""

from typing import Any, Literal

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext, total, up_to_side
from ..costs import group_cost, num_padded, window_cost
from ..ops.group_values.landmarks import Landmarks, Mean, Pool, Transform, landmark_option
from ..ops.group_values.op import Visibility, attended_summaries, group_logits, group_prior, group_values
from ..ops.joint_softmax.op import attended_in_window, joint_softmax, mix_reference
from ..ops.packed.op import Packing
from ..options import Options, fit_option, local_option, option, released_option
from ..parts.geometry import Grid, Layout, Windows, raster, split_prefix
from ..parts.groups import Groups, bin_counts, bins, bins_outside, chunks_outside, up_to_bins, up_to_outside
from ..parts.position import BiasKind
from ..parts.sampling import Noise, noise_option
from ..window_options import position_bias, window_option, windows_on
from .local import local


def eva(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_tilde: Tensor,
    mu: Tensor,
    omega: Tensor,
    bias: Tensor | None = None,
    *,
    groups: Groups,
    windows: Windows,
    visibility: Visibility = "paper",
    log_count: bool = False,
    attn_drop: float = 0.0,
) -> Tensor:
    """One softmax over the window and the groups (eq. 16).

    Args:
        k_tilde: landmarks (B, h, G, c, d), G = 1 or g windows. mu: proposal means (B, h, G, c, d); omega: samples
            (B, h, G, c, s, d), both in the scale d^-1/4 of the features.
        visibility: see `attended_groups`. log_count: adds log |P_c| to a group's logit.
    """
    prior = group_prior(q, groups, visibility, log_count, windows)
    beta, log_mass = group_values(split_prefix(k, q.shape[2])[1], split_prefix(v, q.shape[2])[1], omega, groups)
    if omega.shape[4] == 1:
        return joint_softmax(q, k, v, bias, k_tilde, beta, prior, windows=windows, attn_drop=attn_drop)
    logits = group_logits(windows.partition(q), k_tilde, mu, omega, log_mass, prior)
    return joint_softmax(q, k, v, bias, values=beta, logits=logits, windows=windows, attn_drop=attn_drop)


def eva_reference(
    q, k, v, k_tilde, mu, omega, bias=None, *, groups, windows, visibility="paper", log_count=False, attn_drop=0.0
):
    """`eva`, query by query and group by group."""
    y, (k_grid, v_grid) = torch.zeros_like(q), (x[:, :, -q.shape[2] :] for x in (k, v))
    for n in range(q.shape[2]):
        window = windows.index_of(n) if k_tilde.shape[2] > 1 else 0
        attended = [attended_in_window(n, q, k, v, bias, windows=windows)]
        attended += attended_summaries(
            n, q, k_grid, v_grid, k_tilde, mu, omega, groups, window, visibility, log_count, windows
        )
        y[:, :, n] = mix_reference(*attended, attn_drop=attn_drop)
    return y


def up_to_groups(count: int, context: LayerContext, config: Any) -> tuple[int, str]:
    windows = windows_on(config, context.grid)
    if config.partition == "complement" and config.window_size:
        return up_to_outside(count, windows)
    return up_to_bins(count, raster(context.grid, "1d") if config.partition == "all_1d" else windows.grid)


class Eva(Attention):
    prefix_tokens = "exact"
    size_option = "num_landmarks"
    takes_clips = True

    class Config(Options):
        window_size: tuple[int, ...] | int = option(
            7, "side of the window E in tokens, or one for each axis; 0: no window", low=0
        )
        num_landmarks: int = option(49, "number of groups C; 0: none (local attention)", low=0)
        released: bool = released_option()
        layout: Layout | None = window_option("layout")
        overlap: int = window_option("overlap")
        position_bias: BiasKind | None = window_option("position_bias")
        partition: Literal["all", "all_1d", "complement", "mask"] = option(
            "all",
            "groups: all: 2-D bins of all tokens; all_1d: raster chunks of them; complement: raster chunks of the"
            " tokens outside E; mask: 2-D bins without E's members",
        )
        landmark_transform: Transform = landmark_option("landmark_transform")
        pool: Pool = landmark_option("pool")
        num_samples: int = landmark_option("num_samples")
        mu: Mean = landmark_option("mu")
        mu_scale: float | None = landmark_option("mu_scale")
        log_count: bool = option(False, "add log |P_c| to a group's logit")
        noise: Noise | None = noise_option()
        released_overlap_groups: bool | None = option(
            None,
            "grow the bins by the overlap too, and divide means at the border by the tokens of a whole bin; null: as "
            "released, where that acts and is not causal",
            chosen=lambda c: bool(c.released and c.overlap and c.partition == "all" and not c.causal),
        )
        causal: bool = window_option("causal")
        visibility: Visibility | None = option(
            None,
            "groups that a causal query attends to: paper: those before its window; released: those before itself",
            chosen=lambda c: "released" if c.released and c.causal else "paper",
        )
        attn_drop: float = option(0.0, "dropout rate of the joint softmax weights", low=0, high=1)
        local: bool = local_option()
        fit: bool = fit_option(window_size=up_to_side, overlap=up_to_side, num_landmarks=up_to_groups)

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        c, per_window = config.num_landmarks, config.partition in ("complement", "mask")
        self.position_bias = position_bias(self, context)
        if not (config.window_size or c):
            self.refuse("window_size", 0, "with num_landmarks = 0 nothing is attended to; give one of them")
        if per_window and not (config.window_size and c):
            self.refuse("partition", config.partition, "needs window_size and num_landmarks above 0; use all")
        if config.released_overlap_groups and not (config.overlap and config.partition == "all"):
            self.refuse("released_overlap_groups", True, "needs overlap above 0 and partition all")
        if config.causal and not (config.window_size and config.partition == "all"):
            self.refuse("causal", True, "needs window_size above 0 and partition all")
        if config.visibility != "paper" and not config.causal:
            self.refuse("visibility", config.visibility, "acts with causal; leave it out")
        if c:
            self.groups(config, context.grid, torch.device("cpu"))  # refuses windows that leave no tokens
            self.landmarks = Landmarks(config, self.num_heads, self.head_dim)

    @staticmethod
    def groups(config: Config, grid: Grid, device: torch.device) -> Groups:
        """The partition of the option `partition` over this grid."""
        c, partition, windows = config.num_landmarks, config.partition, windows_on(config, grid)
        key, fit = "attention(eva).num_landmarks", config.fit and config.mu != "trainable"  # means of c groups
        if partition == "complement":
            return chunks_outside(windows, c, device, key, fit)
        area = raster(grid, "1d") if partition == "all_1d" else windows.grid
        margin = windows.overlap if config.released_overlap_groups else ()
        groups = bins(area, bin_counts(c, area, key, fit), device, margin)
        return bins_outside(groups, windows) if partition == "mask" else groups

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        own = window_cost(context, config)
        if not config.num_landmarks:
            return own
        groups, windows = cls.groups(config, context.grid, torch.device("meta")), windows_on(config, context.grid)
        return total(own, group_cost(context, config, groups.members.shape, num_padded(windows)))

    def packing(self, grid: Grid) -> Packing | None:
        config, windows = self.config, windows_on(self.config, grid)
        if not config.num_landmarks:
            return Packing(windows, self.position_bias)
        tiles = self.groups(config, grid, torch.device("cpu")).tiles if config.partition == "all" else None
        return tiles and Packing(windows, self.position_bias, (0, 0), tiles, config.log_count, self.landmarks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        config, bias = self.config, self.position_bias()
        options: dict[str, Any] = {"windows": windows_on(config, grid, key_mask), "attn_drop": self.attn_drop}
        if not config.num_landmarks:
            return local(q, k, v, bias, **options)
        groups = self.groups(config, grid, q.device).masked(options["windows"].key_mask)
        k_tilde, mu, omega = self.landmarks(q, split_prefix(k, q.shape[2])[1], groups)
        options |= {"groups": groups, "visibility": config.visibility, "log_count": config.log_count}
        return eva(q, k, v, k_tilde, mu, omega, bias, **options)
