"""Neighborhood attention (Hassani et al. 2023, arXiv:2204.07143): softmax over the k x k nearest tokens of every query.

The window stops at the grid's border, so that every query has k^2 keys (equations 1 to 3); dilated by delta (DiNAT,
arXiv:2209.15001), neighbours are sought among the tokens i mod delta of each axis. Old released code pads grids smaller
than k delta, and padding is a key. Here construction refuses such grids; on a small grid at a later call, queries have
fewer neighbours.
Cost: 2 N e C multiply-accumulates, e = (k + t - 1)^2 keys of a tile of t^2 queries, t = (k + 1) / 2 (paper: k^2).
"""

from typing import Literal

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext, at_most
from ..ops.joint_softmax.op import attended_tokens, gathered_logits, mix, mix_reference, prefix_term
from ..options import Options, attn_drop_option, fit_option, local_option, option
from ..parts.geometry import Grid, Windows, each_axis, select_tokens, split_prefix
from ..parts.masking import of_grid
from ..parts.neighborhoods import tiles, tiling
from ..parts.position import PositionBias


def neighborhood(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None = None,
    *,
    grid: Grid,
    size: Grid,
    dilation: Grid,
    counts: Tensor | None = None,
    attn_drop: float = 0.0,
) -> Tensor:
    """Softmax over the neighbours of every query, for k (`size`) and delta (`dilation`) of both axes.

    table: bias by query minus key, (1, (2 k_y - 1) (2 k_x - 1), h). counts: (B, N) bool, true for tokens that count.
    """
    (k_prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    index = tiles(grid, size, dilation, q.device)
    queries, keys, values = select_tokens(q, index.queries), select_tokens(k, index.keys), select_tokens(v, index.keys)
    counts = None if counts is None else counts[:, None, index.keys][:, :, :, None]
    logits = gathered_logits(queries, keys, index.offsets >= 0, counts)
    if table is not None:
        logits = logits + table[0, index.offsets.clamp(min=0)].permute(3, 0, 1, 2)
    y = mix([(logits, values), *prefix_term(queries, k_prefix, v_prefix)], attn_drop)
    return select_tokens(y.flatten(2, 3), index.position)


def neighborhood_reference(q, k, v, table=None, *, grid, size, dilation, counts=None, attn_drop=0.0):
    """`neighborhood`, query by query."""
    y = torch.zeros_like(q)
    for n in range(q.shape[2]):
        rows, columns = map(neighbors, divmod(n, grid[1]), grid, size, dilation)
        keys = [(a * grid[1] + b, i, j) for a, i in rows for b, j in columns]
        keys = [key for key in keys if counts is None or counts[0, key[0]]]
        bias = None if table is None else table[0, [i * (2 * size[1] - 1) + j for _, i, j in keys]].T
        y[:, :, n] = mix_reference(attended_tokens(n, q, k, v, [m for m, _, _ in keys], bias), attn_drop=attn_drop)
    return y


def neighbors(i: int, length: int, k: int, dilation: int) -> list[tuple[int, int]]:
    """The k neighbours of token i along an axis and their offsets, for the twin."""
    members, j = range(i % dilation, length, dilation), i // dilation
    start = max(0, min(j - k // 2, len(members) - k))
    return [(m, j - a + k - 1) for a, m in enumerate(members)][start : start + k]


class Neighborhood(Attention):
    prefix_tokens = "exact"
    size_option = "kernel_size"

    class Config(Options):
        kernel_size: int | tuple[int, int] = option(7, "neighbours k along both axes, or (rows, columns): odd", low=1)
        dilation: int | tuple[int, int] = option(1, "step delta between neighbours, or (rows, columns)", low=1)
        position_bias: Literal["table", "none"] = option("table", "relative position bias of the neighbours")
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(
            dilation=at_most(
                lambda x, c: tuple(max(side // k, 1) for side, k in zip(x.grid, each_axis(c.kernel_size), strict=True)),
                "times the kernel size {config.kernel_size}, beyond the {H}x{W} grid",
            ),
            kernel_size=at_most(lambda x, _: tuple(side - 1 + side % 2 for side in x.grid), "beyond the {H}x{W} grid"),
        )

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        self.size, self.dilation = each_axis(config.kernel_size), each_axis(config.dilation)
        for k in self.size:
            if k % 2 == 0:
                self.refuse("kernel_size", k, f"as many neighbours on both sides make it odd; nearest valid: {k - 1}")
        windows = Windows(context.grid, self.size)  # its offsets are the neighbours' offsets
        self.position_bias = PositionBias(config.position_bias, self.num_heads, self.head_dim, windows)

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        table, macs = context.num_heads * (config.position_bias == "table"), 2 * context.dim
        sizes = context.grid, each_axis(config.kernel_size), each_axis(config.dilation)
        for length, k, delta in zip(*sizes, strict=True):
            tiles_of_residue, queries, keys = tiling(length, k, delta)
            table, macs = table * (2 * k - 1), macs * delta * tiles_of_residue * queries * keys
        return Cost(table, macs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, key_mask: Tensor | None = None) -> Tensor:
        table, counts = self.position_bias.table, of_grid(key_mask, q.shape[2])
        return neighborhood(
            q, k, v, table, grid=grid, size=self.size, dilation=self.dilation, counts=counts, attn_drop=self.attn_drop
        )
