"""MonarchAttention (Yaras et al. 2025, arXiv:2505.18698): the nearest Monarch matrix to softmax attention.

Blocks are the rows of the grid. Query (l, j) and key (k, i), each named by row and column, have the weight

    L[j, l, k] R[k, j, i],   the probability of row k given the query, times that of key i given row k and column j,

so that all queries of column j share their weights within a row. Softmax attention maximises <A, q K^T> / sqrt(d) plus
the entropy of every row of A; L and R maximise it in turns (section 3). With a[k, j] the mean of column j's queries
under the weights L[j, :, k], at first the query (k, j) itself,

    R[k, j, :] = softmax_i(s a . k_i),   L[j, l, :] = softmax_k(log sum_i exp(s a . k_i) + s (q - a) . r),

where s = 1/sqrt(d) and r[k, j] is the mean key under R[k, j, :]. The argument of the second softmax is the logarithm of
the row's sum of exponentials at the query, linearised at a, which is the entropy of R[k, j, :] plus s q . r. A grid of
one row or one column has exact softmax attention. Prefix tokens are rows of one key each.
Cost: ((2 t + 1) W + 2 t H) N C multiply-accumulates for t steps. No parameters.

The released code has blocks of consecutive tokens, and fills up the first one, in which the class token is.
"""

import torch
from torch import Tensor

from ..base import Attention, Cost, LayerContext
from ..options import Options, local_option, option
from ..parts.features import product, widened
from ..parts.geometry import Grid, split_prefix


def monarch(q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, steps: int) -> Tensor:
    """Monarch attention over the rows of a grid, with R and L maximised `steps` times each."""
    (prefix, k), (v_prefix, v) = split_prefix(k, q.shape[2]), split_prefix(v, q.shape[2])
    q = q * q.shape[-1] ** -0.5
    # with rows in front, products over rows and over columns read views, without a copy; b = B h
    a, k, v = (x.unflatten(2, grid).permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous() for x in (q, k, v))
    q = a.permute(1, 2, 0, 3)  # (b, W, H, d)
    to_prefix = product(q, prefix.flatten(0, 1).mT[:, None]) if prefix.shape[2] else None  # (b, W, H, P)
    for step in range(steps):
        log_r = widened(product(a, k.mT)).log_softmax(-1)[..., : grid[1]]  # (H, b, W, W)
        r = log_r.exp()
        information = (r * log_r).sum(-1)  # minus the entropy, (H, b, W)
        r = r.to(k.dtype)
        to_rows = product(q, (r @ k).permute(1, 2, 3, 0)) - information.permute(1, 2, 0)[:, :, None]
        rows = to_rows if to_prefix is None else torch.cat([to_rows, to_prefix], -1)  # (b, W, H, H + P)
        rows = widened(rows).softmax(-1)
        L = rows[..., : grid[0]]
        if step < steps - 1:  # where no query has weight, any a will do: linearised there, the sum is a lower bound
            of_queries = L / L.sum(-2, keepdim=True).clamp(min=1e-12)
            a = (of_queries.mT.to(q.dtype) @ q).permute(2, 0, 1, 3)
    y = L.to(v.dtype) @ (r @ v).permute(1, 2, 0, 3)
    if to_prefix is not None:
        y = y + rows[..., grid[0] : grid[0] + prefix.shape[2]].to(v.dtype) @ v_prefix.flatten(0, 1)[:, None]
    return y.unflatten(0, prefix.shape[:2]).transpose(2, 3).flatten(2, 3)


def monarch_reference(q, k, v, *, grid, steps):
    """`monarch`, weight by weight, with entropies in place of the linearisation."""
    (H, W), P, scale = grid, k.shape[2] - q.shape[2], q.shape[-1] ** -0.5
    row = [range(P + y * W, P + y * W + W) for y in range(H)]
    L = {(j, y): [torch.tensor(float(y == x), dtype=q.dtype) for x in range(H)] for j in range(W) for y in range(H)}
    for _ in range(steps):
        R = {}
        for x in range(H):
            for j in range(W):
                total = sum(L[j, y][x] for y in range(H)).clamp(min=1e-12)  # 0 where no query has weight on the row
                a = sum(L[j, y][x][..., None] * q[:, :, y * W + j] for y in range(H)) / total[..., None]
                R[x, j] = torch.stack([scale * (a * k[:, :, n]).sum(-1) for n in row[x]], -1).softmax(-1)
        for j in range(W):
            for y in range(H):
                own = q[:, :, y * W + j]
                logits = []
                for x in range(H):
                    mean = sum(R[x, j][..., i, None] * k[:, :, n] for i, n in enumerate(row[x]))
                    logits.append(scale * (own * mean).sum(-1) - torch.xlogy(R[x, j], R[x, j]).sum(-1))
                logits += [scale * (own * k[:, :, p]).sum(-1) for p in range(P)]
                L[j, y] = torch.stack(logits, -1).softmax(-1).unbind(-1)
    outputs = []
    for y in range(H):
        for j in range(W):
            weights = [L[j, y][x] * R[x, j][..., i] for x in range(H) for i in range(W)]
            weights = [*L[j, y][H:], *weights]
            outputs.append(sum(weight[..., None] * v[:, :, n] for n, weight in enumerate(weights)))
    return torch.stack(outputs, 2)


class Monarch(Attention):
    prefix_tokens = "exact"
    key_mask_refusal = "tokens that do not count would enter the mean queries of their columns"
    size_option = "steps"

    class Config(Options):
        steps: int = option(2, "times that L and R are maximised in turns, t", low=1, high=100)
        local: bool = local_option()

    @classmethod
    def cost(cls, context: LayerContext, config: Config) -> Cost:
        (H, W), t = context.grid, config.steps
        return Cost(0, ((2 * t + 1) * W + 2 * t * H) * context.num_tokens * context.dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return monarch(q, k, v, grid=grid, steps=self.config.steps)
