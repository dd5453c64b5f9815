"""BigBird (Zaheer et al. 2020, arXiv:2007.14062): w sliding, g global and r random blocks of b tokens.

Tokens form n blocks of b. A query block attends, in one softmax, to w neighbours in block order (itself among them), to
g global blocks (the first and the last) and to r others, drawn once for every layer and head; global blocks attend to
everything. Every key counts once.
Cost: 2 N (w + 2 g + r) b C multiply-accumulates, 2 g b N C of them for the global rows. Linear in N.
Papers: LARA Table 9.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Attention, Cost, LayerContext, up_to_side
from ..ops.joint_softmax.op import mix, prefix_term
from ..options import Options, attn_drop_option, fit_option, local_option, option
from ..parts.features import product
from ..parts.geometry import Grid, Windows, raster, split_prefix
from ..parts.sampling import counter_uniform
from ..parts.tables import kept_table
from .softmax import softmax


def bigbird(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, windows: Windows, num_global: int, attn_drop: float = 0.0
) -> Tensor:
    """Softmax over the key blocks of each query block; over all keys for the queries of global blocks.

    blocks: key blocks of every head and query block, (h, n, m) int64; n marks an unused entry. windows: the n blocks.
    """
    (k_prefix, k_grid), (v_prefix, v_grid) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    queries, keys, values = (windows.partition(x) for x in (q, k_grid, v_grid))  # (B, h, n, b, d)
    (h, n, _), (*_, b, d) = blocks.shape, keys.shape
    index = blocks.clamp(max=n - 1)  # unused entries point at a block too
    inside = windows.mask(q.device)
    valid = (blocks < n)[..., None].expand(-1, -1, -1, b)
    valid = valid if inside is None else valid & inside[index]
    head = torch.arange(h, device=q.device)[:, None, None]
    logits = product(d**-0.5 * queries, keys[:, head, index].flatten(3, 4).mT)  # (B, h, n, b, m*b)
    logits = logits.masked_fill(~valid.flatten(2)[:, :, None], -torch.inf)
    y = mix([(logits, values[:, head, index].flatten(3, 4)), *prefix_term(queries, k_prefix, v_prefix)], attn_drop)
    rows = global_blocks(n, num_global, q.device)
    on_all = softmax(queries.index_select(2, rows).flatten(2, 3), k, v, attn_drop).unflatten(2, (len(rows), b))
    return windows.reverse(y.index_copy(2, rows, on_all.to(y.dtype)))


@kept_table
def global_blocks(n: int, num_global: int, device: torch.device) -> Tensor:
    """The first and last of n blocks alternately, (g,) int64: 0, n - 1, 1, n - 2, ..."""
    turn = torch.arange(min(num_global, n), device=device)
    return torch.where(turn % 2 == 0, turn // 2, n - 1 - turn // 2)


def choose_blocks(num_window: int, num_global: int, uniform: Tensor) -> Tensor:
    """Key blocks of every head and query block, each at most once: (h, n, w + g + r) int64; n marks an unused entry.

    uniform: (h, n, r) in [0, 1); draws r blocks without replacement from those neither near nor global, or all of them.
    """
    h, n, _ = uniform.shape
    near = torch.arange(n, device=uniform.device)[:, None] + torch.arange(num_window, device=uniform.device)
    near = near - num_window // 2
    shared = global_blocks(n, num_global, uniform.device)
    chosen = torch.cat([near, shared.expand(n, -1)], 1)
    twice = (chosen[:, :, None] == chosen[:, None]).tril(-1).any(-1)
    chosen = chosen.masked_fill(twice | (chosen < 0) | (chosen >= n), n).expand(h, -1, -1)
    for u in uniform.unbind(-1):
        block = (u * (n - (chosen < n).sum(-1))).long()[..., None]  # position among free blocks
        taken = chosen.sort(-1).values
        free_before = taken - torch.arange(taken.shape[-1], device=u.device)
        passed = (free_before <= block) & (taken < n)
        chosen = torch.cat([chosen, block + passed.sum(-1, keepdim=True)], -1)
    return chosen.clamp(max=n)


def bigbird_reference(q, k, v, blocks, *, windows, num_global, attn_drop=0.0):
    """`bigbird`, query by query."""
    n, block_of = blocks.shape[1], [windows.index_of(m) for m in range(q.shape[2])]
    first, last = range((num_global + 1) // 2), range(n - num_global // 2, n)
    y, P = torch.zeros_like(q), k.shape[2] - q.shape[2]
    for head, i in ((head, i) for head in range(q.shape[1]) for i in range(q.shape[2])):
        at = block_of[i]
        chosen = blocks[head, at].tolist()
        keys = [P + m for m, b in enumerate(block_of) if b in chosen or at in first or at in last]
        keys = [*range(P), *keys]
        weights = (q[:, head, i, None] @ k[:, head, keys].mT / q.shape[-1] ** 0.5).softmax(-1)
        y[:, head, i] = (F.dropout(weights, attn_drop) @ v[:, head, keys])[:, 0]
    return y


class Bigbird(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "its global blocks have fixed positions"
    size_option = "block_size"
    pattern_seed: Tensor

    class Config(Options):
        block_size: int = option(16, "tokens b of a block in raster order; side of a square block in 2d", low=1)
        layout: Literal["1d", "2d"] = option("1d", "blocks of the raster order, or square tiles of the grid")
        num_window: int = option(3, "neighbouring blocks w, the query's own included; odd", low=1, high=63)
        num_global: int = option(2, "global blocks g, taken in turns from the start and the end", low=0)
        num_random: int = option(3, "random blocks r of each query block; fewer where fewer remain", low=0, high=64)
        local: bool = local_option()
        attn_drop: float = attn_drop_option()
        fit: bool = fit_option(block_size=up_to_side)

        def windows(self, grid: Grid) -> Windows:
            """The blocks of this grid."""
            return Windows(raster(grid, self.layout), (1 if self.layout == "1d" else self.block_size, self.block_size))

    def __init__(self, context: LayerContext, config: Config):
        super().__init__(context, config)
        if (w := config.num_window) % 2 == 0:
            self.refuse("num_window", w, f"as many neighbours on both sides make it odd; nearest valid: {w - 1}")
        # The seed determines the blocks on every grid.
        self.register_buffer("pattern_seed", torch.randint(2**32, ()))

    def blocks(self, windows: Windows) -> Tensor:
        """The layer's pattern on this grid (h, n, m): the same in training and evaluation, and after reloading."""
        shape = (self.num_heads, windows.num_windows, self.config.num_random)
        return choose_blocks(self.config.num_window, self.config.num_global, counter_uniform(self.pattern_seed, shape))

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        windows, N, C = config.windows(context.grid), context.num_tokens, context.dim
        b, num_global = windows.num_queries, min(config.num_global, windows.num_windows)
        attended = config.num_window + num_global + config.num_random  # unused entries are computed too
        return Cost(0, 2 * windows.num_windows * b * attended * b * C + 2 * num_global * b * N * C)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        windows, num_global = self.config.windows(grid), self.config.num_global
        blocks = self.blocks(windows)
        return bigbird(q, k, v, blocks, windows=windows, num_global=num_global, attn_drop=self.attn_drop)
