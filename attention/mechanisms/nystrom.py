"""Nystromformer (Xiong et al. 2021, arXiv:2102.03902): c landmarks, a pseudo-inverse, a convolution of values.

Landmarks q_bar, k_bar are means of c segments. Nystrom's method routes attention through them: with s = 1/sqrt(d),

    y = softmax(s q k_bar^T) A^+ softmax(s q_bar k^T) v + conv(v),   A = softmax(s q_bar k_bar^T),

where A^+ comes from a few iterations that approach the inverse, and conv is a depthwise convolution over tokens, one
filter per head.
Cost: 4 N c C + h N c^2 + 4 i h c^3 + t N C multiply-accumulates: i iterations for the inverse, t filter taps.
Papers: EVA Table 2, LARA Table 8 'Nystromformer'.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base import Attention, Cost, LayerContext
from ..ops.group_values.op import group_mean
from ..ops.inverse import fused
from ..ops.kernels import with_fast_path
from ..options import Options, fit_option, option
from ..parts.features import full_precision
from ..parts.geometry import Grid, Layout, raster, split_prefix
from ..parts.groups import Groups, bin_counts, bins, up_to_bins
from ..parts.local_term import on_images
from .softmax import softmax


@full_precision
def nystrom(
    q: Tensor, k: Tensor, v: Tensor, filters: Tensor | None = None, *, groups: Groups, grid: Grid, iterations: int
) -> Tensor:
    """Nystrom's approximation of softmax attention, plus a convolution of values; both leave out prefix tokens.

    filters: (h, rows, columns), odd sides, for the convolution over the raster `grid` of the tokens. groups: segments
    whose means are landmarks.
    """
    (_, k_grid), (_, v_grid) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    q_bar, k_bar = (group_mean(x, groups).squeeze(2) for x in (q, k_grid))
    to_landmarks = k_bar.mT * q.shape[-1] ** -0.5
    inverse = pseudo_inverse((q_bar @ to_landmarks).softmax(-1), iterations)
    # The paper's order of products; (A^+ (softmax v)) would cost c^2 C instead of h N c^2.
    y = ((q @ to_landmarks).softmax(-1) @ inverse) @ softmax(q_bar, k, v)
    if filters is None:
        return y
    width = v.shape[1] * v.shape[-1]
    of_channels = filters.repeat_interleave(v.shape[-1], 0)[:, None]
    return y + on_images(lambda x: F.conv2d(x, of_channels, padding="same", groups=width), v_grid, grid, width)


def pseudo_inverse(a: Tensor, iterations: int) -> Tensor:
    """Approaches the inverse of square matrices (..., c, c) of positive numbers from their transpose, each scaled by
    its own norms. The norm of rows has no gradient, because it is 1 for rows of weights.
    """
    z = a.mT / (a.detach().sum(-1).amax(-1) * a.sum(-2).amax(-1))[..., None, None]
    return approach_inverse(a, z, iterations)


@with_fast_path(fused.approach_inverse)
def approach_inverse(a: Tensor, z: Tensor, iterations: int) -> Tensor:
    """Iterates z <- z (13 - az (15 - az (7 - az))) / 4, in which az = a z, for square matrices a and z (..., c, c)."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z


def nystrom_reference(q, k, v, filters=None, *, groups, grid, iterations):
    """`nystrom`, with the norms, matrices and filter taps written out."""
    members = [index[valid] for index, valid in zip(groups.members[0], groups.valid[0], strict=True)]
    k_grid, v_grid = k[:, :, -q.shape[2] :], v[:, :, -q.shape[2] :]
    q_bar, k_bar = (torch.stack([x[:, :, m].mean(2) for m in members], 2) for x in (q, k_grid))
    a_1, a_2, a_3 = (
        torch.softmax(x @ y.mT / x.shape[-1] ** 0.5, -1) for x, y in ((q, k_bar), (q_bar, k_bar), (q_bar, k))
    )
    z = torch.stack([m.mT / torch.linalg.matrix_norm(m, 1) for m in a_2.flatten(0, 1)]).view_as(a_2)
    eye = torch.eye(len(members), dtype=q.dtype)
    for _ in range(iterations):
        z = 0.25 * z @ (13 * eye - a_2 @ z @ (15 * eye - a_2 @ z @ (7 * eye - a_2 @ z)))
    y = a_1 @ z @ (a_3 @ v)
    if filters is None:
        return y
    (H, W), (rows, columns), mixed = grid, filters.shape[1:], []
    for n in range(H * W):
        top, left, total = n // W - rows // 2, n % W - columns // 2, 0
        for i, j in [(i, j) for i in range(rows) for j in range(columns) if 0 <= top + i < H and 0 <= left + j < W]:
            total = total + filters[:, i, j, None] * v_grid[:, :, (top + i) * W + left + j]
        mixed.append(total)
    return y + torch.stack(mixed, 2)


class Nystrom(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its pseudo-inverse takes every landmark and its convolution every token"
    size_option = "num_landmarks"

    class Config(Options):
        num_landmarks: int = option(49, "segments c, one landmark each", low=1)
        segments: Layout = option("2d", "rectangles of the grid, or chunks of the raster order")
        # In float32, outputs are within 1e-3 of float64 at 16 iterations and 7e-2 at 22; from 36 on they may be NaN.
        pinv_iterations: int = option(6, "iterations of the pseudo-inverse", low=1, high=16)
        conv: Literal["1d", "2d", "none"] = option("1d", "convolution of values: of the raster order, the grid, none")
        conv_size: int = option(33, "length (1d) or side (2d) of the filter in tokens; odd", low=1)
        fit: bool = fit_option(
            num_landmarks=lambda c, layer, config: up_to_bins(c, raster(layer.grid, config.segments))
        )

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        size, unused = config.conv_size, config.conv == "none"
        if unused and size != self.Config.conv_size:
            self.refuse("conv_size", size, f"does not act with conv: none; set conv_size: {self.Config.conv_size}")
        if size % 2 == 0:
            self.refuse("conv_size", size, f"must be odd; nearest valid: {size - 1}")
        sides = (1, size) if config.conv == "1d" else (size, size)
        self.filters = None if unused else nn.Parameter(torch.empty(self.num_heads, *sides))
        if self.filters is not None:
            nn.init.trunc_normal_(self.filters, std=0.02)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        N, C, h = context.num_tokens, context.dim, context.num_heads
        c, taps = config.num_landmarks, {"1d": config.conv_size, "2d": config.conv_size**2, "none": 0}[config.conv]
        landmarks = 3 * N * c * C + c * c * C  # logits of queries, of landmarks on keys and on landmarks; values
        inverse = 4 * config.pinv_iterations * h * c**3 + h * N * c * c
        return Cost(h * taps, landmarks + inverse + N * c * C + taps * N * C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        config, segments = self.config, raster(grid, self.config.segments)
        counts = bin_counts(config.num_landmarks, segments, f"{self.label}.num_landmarks", config.fit)
        options = {"groups": bins(segments, counts, q.device), "iterations": config.pinv_iterations}
        options["grid"] = grid if config.conv == "2d" else raster(grid, "1d")
        return nystrom(q, k, v, self.filters, **options).to(v.dtype)
